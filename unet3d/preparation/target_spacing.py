"""The spacing that the cases of a data set are resampled to."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from unet3d.config import Shape, Spacing
from unet3d.preparation.resample import THICK_SLICE_RATIO

SpacingSetting = Literal["median", "native"] | Spacing
"""What data.spacing_mm may be."""

THIN_SLICE_PERCENTILE = 10
"""Where few thick slices are to keep what the thinnest of them show, the spacing across them is
this percentile of the data set's (the value of nnU-Net)."""


def median_spacing(spacings_mm: Sequence[Spacing]) -> Spacing:
    """Return the median of spacings, axis by axis."""
    x, y, z = (float(median) for median in np.median(spacings_mm, axis=0))
    return (x, y, z)


def target_spacing(
    spacings_mm: Sequence[Spacing], shapes: Sequence[Shape], setting: SpacingSetting
) -> Spacing | None:
    """Return the spacing that cases are resampled to; None: each keeps its own.

    The median of some data sets with thick slices is so coarse that cases with thinner ones would
    lose most of theirs, of which they have few. So where the coarsest axis of the median exceeds
    both others by the factor :data:`THICK_SLICE_RATIO` in spacing, and is exceeded by both in
    voxels, it takes the 10th percentile of its spacings, but not less than the others have: the
    rule of nnU-Net (Isensee et al., Nature Methods 2021).

    Args:
        spacings_mm: Spacing of each case.
        shapes: Voxels along X, Y, Z of each case, at that spacing.
        setting: The value of data.spacing_mm.
    """
    if setting == "native":
        return None
    if setting != "median":
        return setting
    target_mm = list(median_spacing(spacings_mm))
    size = np.median(shapes, axis=0)
    thick = int(np.argmax(target_mm))
    coarsest_other = max(target_mm[:thick] + target_mm[thick + 1 :])
    is_thick = target_mm[thick] > THICK_SLICE_RATIO * coarsest_other
    if is_thick and size[thick] * THICK_SLICE_RATIO < np.delete(size, thick).min():
        finer = np.percentile([spacing[thick] for spacing in spacings_mm], THIN_SLICE_PERCENTILE)
        target_mm[thick] = max(float(finer), coarsest_other)
    x, y, z = target_mm
    return (x, y, z)
