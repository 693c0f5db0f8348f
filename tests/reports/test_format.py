import pytest

from unet3d.reports.format import GIB, MIB, amount, size_text, unit_for


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.00"),
        (100, "<0.001"),
        (MIB // 100, "0.01"),
        (MIB // 4, "0.25"),
        (int(99.99 * MIB), "99.99"),
        (100 * MIB, "100"),
        (81920 * MIB, "81,920"),
    ],
)
def test_amounts_have_the_digits_that_matter(num_bytes: int, text: str) -> None:
    assert amount(num_bytes, MIB) == text


def test_the_unit_suits_the_largest_number() -> None:
    assert unit_for(8 * GIB - 1) == ("MiB", MIB)
    assert unit_for(8 * GIB) == ("GiB", GIB)


def test_sizes_are_written_along_x_y_z() -> None:
    assert size_text((192, 192, 160)) == "192x192x160"
