from unet3d.reports.figures import drawable
from unet3d.reports.format import GIB, MIB, amount, duration, score, size_text, unit_for


def test_amounts_have_the_digits_that_matter():
    for num_bytes, text in (
        *((0, "0.00"), (100, "<0.001"), (MIB // 100, "0.01"), (MIB // 4, "0.25")),
        *((int(99.99 * MIB), "99.99"), (100 * MIB, "100"), (81920 * MIB, "81,920")),
    ):
        assert amount(num_bytes, MIB) == text


def test_units_suit_the_largest_number_and_sizes_are_along_x_y_z():
    assert unit_for(8 * GIB - 1) == ("MiB", MIB)
    assert unit_for(8 * GIB) == ("GiB", GIB)
    assert size_text((192, 192, 160)) == "192x192x160"
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
