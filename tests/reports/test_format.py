from unet3d.reports.figures import drawable
from unet3d.reports.format import (
    GIB,
    MIB,
    amount,
    duration,
    score,
    slab_line,
    slot_line,
    unit_for,
)


def test_amounts_have_the_digits_that_matter():
    for num_bytes, text in (
        *((0, "0.00"), (100, "<0.001"), (MIB // 100, "0.01"), (MIB // 4, "0.25")),
        *((int(99.99 * MIB), "99.99"), (100 * MIB, "100"), (81920 * MIB, "81,920")),
    ):
        assert amount(num_bytes, MIB) == text


def test_units_suit_the_largest_number():
    assert unit_for(8 * GIB - 1) == ("MiB", MIB)
    assert unit_for(8 * GIB) == ("GiB", GIB)
    assert (score(0.12345), score(None), score(2, 1)) == ("0.123", "–", "2.0")


def test_durations_read_as_people_write_them():
    for seconds, words in (
        *((41.4, "41 s"), (59.7, "1 min 00 s"), (61, "1 min 01 s")),
        *((3599.6, "1 h 00 min"), (7500, "2 h 05 min"), (90000, "25 h 00 min")),
    ):
        assert duration(seconds) == words


def test_names_are_drawn_as_they_are():
    assert drawable("$x$ \ud800") == r"\$x\$ ?"
    assert drawable("a" * 20, 20) == "a" * 20
    assert drawable("abc def", 5) == "abc…"


def test_a_slot_is_one_short_line():
    many = [f"decoder.{level}.{part}" for level in (12, 11, 10) for part in ("skip", "up", "0")]
    for blocks, words in (
        (["head"], "1 block, head"),
        (many, "9 blocks, decoder.12.skip to decoder.10.0"),
    ):
        line = slot_line(11, "cuda:11", "bfloat16", blocks)
        assert line == f"slot 11 on cuda:11, bfloat16: {words}"
        assert len(line) <= 80


def test_a_line_tells_of_equal_and_of_uneven_slabs():
    assert slab_line([8, 8]) == "patches of 16 planes along X: 2 slabs of 8"
    assert slab_line([32, 32, 16]) == "patches of 80 planes along X: 3 slabs of 16 to 32"
