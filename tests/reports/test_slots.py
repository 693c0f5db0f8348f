from unet3d.reports.slots import slab_line, slot_line


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
