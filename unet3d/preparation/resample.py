"""The grid of a resampled image: spacing and shape, and how voxels are interpolated.

Images are resampled along their own axes, as if these were at right angles. If they are not, as in
a CT with a tilted gantry, anatomy stays sheared as stored; segmentations are again on the original
grid, and so in the right place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import FLOAT32_BYTES, refuse_beyond_memory
from unet3d.inputs.plain_data import PLAIN
from unet3d.preparation.interpolation import Order

THICK_SLICE_RATIO = 3.0
"""Slices are thick if their spacing exceeds the finest by this factor (the value of nnU-Net)."""

MAX_FINER = 200.0
"""Most voxels along an axis that one voxel may become. With a wrong unit of length, it becomes
1000."""

MAX_VOXELS = 2**40
"""Most voxels of a volume at the target spacing: 4 TiB in float32."""

MAX_LOST_VOXELS = 8
"""Longest side, in voxels, of a volume that may become a single voxel."""

REMEDY = (
    "fix the spacing or its unit in the header (for a microscope's file: --spacing), or train with "
    "another data.spacing_mm"
)


SpacingSetting = Literal["median", "native"] | Spacing
"""Allowed values of data.spacing_mm."""

THIN_SLICE_PERCENTILE = 10
"""Percentile of a data set's spacings that is the target across thick slices, so that cases with
thinner slices lose less (the value of nnU-Net)."""


@dataclass(frozen=True, kw_only=True)
class Interpolation:
    """How images are resampled to the target spacing, and logits back.

    A spline across slices that lie far apart overshoots their intensities, so its order differs
    across slices. As in nnU-Net, there is at most one axis of slices: none if two are equally
    coarse.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    order: Literal[1, 3] = 3
    """Order of the splines."""
    thick: Literal["auto", "always", "never"] = "auto"
    """Whether slices are interpolated one by one: if they are thick, always, or never."""
    across_slices: Literal[0, 1] = 1
    """Order of the interpolation of images across slices that are interpolated one by one."""
    logits_across_slices: Literal[0, 1] = 1
    """Order of the interpolation of logits across such slices."""
    clips: Annotated[bool, Field(strict=True)] = False
    """Whether results are clipped to the range of intensities of the image, or of each slice if
    slices are interpolated one by one."""

    def slice_axis(self, have_mm: Spacing, want_mm: Spacing) -> int | None:
        """Return the axis across which slices are interpolated one by one, if there is one.

        The spacing before resampling decides, or else the spacing after it.
        """
        if self.thick == "never":
            return None
        for spacing_mm in (have_mm, want_mm):
            coarsest = max(spacing_mm)
            if self.thick == "always" or coarsest / min(spacing_mm) > THICK_SLICE_RATIO:
                return spacing_mm.index(coarsest) if spacing_mm.count(coarsest) == 1 else None
        return None

    def orders(self, slice_axis: int | None) -> tuple[Order, Order, Order]:
        """Return the order of the interpolation of images along X, Y, Z."""
        x, y, z = (self.across_slices if axis == slice_axis else self.order for axis in range(3))
        return (x, y, z)


def thick_axes(*spacings_mm: Spacing) -> tuple[bool, bool, bool]:
    """Return which axes have thick slices in any of the given spacings."""
    x, y, z = (
        any(spacing[axis] > THICK_SLICE_RATIO * min(spacing) for spacing in spacings_mm)
        for axis in range(3)
    )
    return (x, y, z)


def median_spacing(spacings_mm: Sequence[Spacing]) -> Spacing:
    """Return the median of spacings, axis by axis."""
    x, y, z = (float(median) for median in np.median(spacings_mm, axis=0))
    return (x, y, z)


def target_spacing(
    spacings_mm: Sequence[Spacing], shapes: Sequence[Shape], setting: SpacingSetting
) -> Spacing | None:
    """Return the target spacing by data.spacing_mm; None: each case keeps its own.

    In data sets with thick slices, the median can be so coarse that cases with thinner slices would
    lose most of their few slices. So if the coarsest axis of the median exceeds both others by the
    factor :data:`THICK_SLICE_RATIO` in spacing, and both others exceed it by that factor in voxels,
    its target is the 10th percentile of its spacings, but not below the other two: the rule of
    nnU-Net (Isensee et al., Nature Methods 2021). ``shapes`` are the shapes of the same cases.
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


def resampled_shape(shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None) -> Shape:
    """Return the shape at the target spacing, at least one voxel along each axis.

    Without a target the shape stays.
    """
    if target_mm is None:
        return shape
    x, y, z = (
        max(1, round(have / want * size))  # in nnU-Net's order, which decides how halves round
        for size, have, want in zip(shape, spacing_mm, target_mm, strict=True)
    )
    return (x, y, z)


def visible_shape(
    shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None, num_arrays: int = 0
) -> Shape:
    """Return :func:`resampled_shape`; VolumeError if a unit of length is clearly wrong.

    VolumeError also if the host lacks memory to resample ``num_arrays`` arrays, such as channels.
    """
    new_shape = resampled_shape(shape, spacing_mm, target_mm)
    change = (
        f"{times(shape)} voxels of {times(spacing_mm)} mm would become {times(new_shape)} of "
        f"{times(target_mm or spacing_mm)} mm"
    )
    if max(new_shape) == 1 and max(shape) > MAX_LOST_VOXELS:
        raise VolumeError(f"{change}, which is far too few; {REMEDY}")
    finest = max(new / old for new, old in zip(new_shape, shape, strict=True))
    if new_shape != shape and (finest > MAX_FINER or math.prod(new_shape) > MAX_VOXELS):
        raise VolumeError(f"{change}, which is far too many; {REMEDY}")
    # The arrays, an intermediate result along each axis, the result, and a contiguous copy.
    voxels = math.prod(shape) + 3 * max(math.prod(shape), math.prod(new_shape))
    refuse_beyond_memory(FLOAT32_BYTES * num_arrays * voxels, f"{change}, which", REMEDY)
    return new_shape
