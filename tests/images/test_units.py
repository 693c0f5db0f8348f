"""Units of lengths and volumes: mm and mL for patients, µm or nm and µm³ for microscopes."""

import pytest

from unet3d.images.units import Units, default_tolerance_mm


@pytest.mark.parametrize(
    ("spacing_mm", "spacing", "volume"),
    [
        ((1.0, 1.0, 2.5), "1 x 1 x 2.5 mm", "1,234 mL"),
        ((0.05, 0.05, 0.05), "0.05 x 0.05 x 0.05 mm", "1,234 mL"),
        ((127e-6, 127e-6, 284e-6), "0.127 x 0.127 x 0.284 µm", "1,234,500,000,000,000 µm³"),
        ((0.049, 1.0, 1.0), "49 x 1000 x 1000 µm", "1,234,500,000,000,000 µm³"),
        ((1e-5, 1e-5, 1e-5), "10 x 10 x 10 nm", "1,234,500,000,000,000 µm³"),
        ((49e-6, 1e-3, 1e-3), "49 x 1000 x 1000 nm", "1,234,500,000,000,000 µm³"),
    ],
)
def test_the_finest_spacing_chooses_the_unit(spacing_mm, spacing, volume):
    units = Units.of(spacing_mm)
    assert units.spacing_text(spacing_mm) == spacing
    assert units.volume_text(1234.5) == volume  # mL, 1e12 µm3 each
    assert units.length_text(units.mm * 1.5) == f"1.5 {units.length}"


def test_volumes_have_three_digits():
    for volume_ml, text in (
        *((0, "0 mL"), (1e-9, "1.00e-09 mL"), (0.01234, "0.0123 mL")),
        *((99.94, "99.9 mL"), (99.96, "100 mL"), (1234.5, "1,234 mL")),
    ):
        assert Units().volume_text(volume_ml) == text
    assert Units.of((1e-3,) * 3).volume_text(2.5e-12) == "2.50 µm³"


def test_surfaces_of_cells_are_near_within_two_voxels():
    for spacing_mm, tolerance_mm in (
        *(((1.0, 1.0, 5.0), 1.0), ((0.05, 0.1, 0.1), 1.0)),
        *(((2e-4, 1.5e-4, 5e-4), 3e-4), ((1e-5, 1e-5, 1e-5), 2e-5)),
    ):
        assert default_tolerance_mm(spacing_mm) == pytest.approx(tolerance_mm)
