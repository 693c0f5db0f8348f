"""Voxel grids of one box of space: which shape a spacing gives, and how voxels are interpolated.

Grids are resampled along their own axes, as if these were at right angles. Where they are not (a CT
of a tilted gantry) anatomy stays as skewed as it is stored, and returns to its place afterwards.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy.typing as npt
from pydantic import ConfigDict, Field

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import FLOAT32_BYTES, refuse_beyond_memory
from unet3d.inputs.plain_data import PLAIN
from unet3d.preparation.interpolation import Order

THICK_SLICE_RATIO = 3.0
"""An axis is thick when its spacing exceeds the finest by this factor (the value of nnU-Net)."""

MAX_FINER = 200.0
"""Voxels along an axis that one may become. A unit that is taken for another makes 1000 of it."""

MAX_VOXELS = 2**40
"""Of a volume at the target spacing: 4 TiB in float32."""

MAX_LOST_VOXELS = 8
"""Voxels along an axis of which a whole volume may become a single voxel."""

REMEDY = "fix the spacing or its unit in the header, or train with another data.spacing_mm"


@dataclass(frozen=True, kw_only=True)
class Interpolation:
    """How images come to the target spacing, and logits back; by default as in our own trainings.

    A spline through slices that lie far apart swings above and below what either of them holds, so
    it is of another order across them. Ours judges each axis for itself. nnU-Net, which clips, cuts
    an image into slices along one axis at most: none where two are equally coarse.
    """

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    order: Literal[1, 3] = 3
    """Of the splines."""
    thick: Literal["auto", "always", "never"] = "auto"
    """Whether slices are interpolated one by one: where they are thick, always, or never."""
    across_slices: Literal[0, 1] = 1
    """Order of the interpolation of images across slices that are interpolated one by one."""
    logits_across_slices: Literal[0, 1] = 1
    """The same of logits."""
    clips: Annotated[bool, Field(strict=True)] = False
    """Whether the result stays within the range of the intensities: of the image, or of each slice
    where slices are interpolated one by one, and then there is one axis of slices at most."""

    def slice_axes(self, have_mm: Spacing, want_mm: Spacing) -> tuple[int, ...]:
        """Return the axes across which slices are interpolated one by one.

        The spacing of what is resampled counts first, then the one that it gets.
        """
        if self.thick == "never":
            return ()
        if self.thick == "auto" and not self.clips:
            thick = thick_axes(have_mm, want_mm)
            return tuple(axis for axis in range(3) if thick[axis])
        for spacing_mm in (have_mm, want_mm):
            coarsest = max(spacing_mm)
            if self.thick == "always" or coarsest / min(spacing_mm) > THICK_SLICE_RATIO:
                axes = tuple(axis for axis in range(3) if coarsest / spacing_mm[axis] == 1)
                return axes if len(axes) == 1 else ()
        return ()

    def orders(self, slice_axes: tuple[int, ...]) -> tuple[Order, Order, Order]:
        """Return the order of the interpolation of images along X, Y, Z."""
        x, y, z = (self.across_slices if axis in slice_axes else self.order for axis in range(3))
        return (x, y, z)


def thick_axes(*spacings_mm: Spacing) -> tuple[bool, bool, bool]:
    """Tell which axes have thick slices in any of the given spacings."""
    x, y, z = (
        any(spacing[axis] > THICK_SLICE_RATIO * min(spacing) for spacing in spacings_mm)
        for axis in range(3)
    )
    return (x, y, z)


def grid_shape(array: npt.NDArray[Any]) -> Shape:
    """Return the voxels along X, Y, Z of an array, the last three of its axes."""
    x, y, z = array.shape[-3:]
    return (x, y, z)


def resampled_shape(shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None) -> Shape:
    """Return the shape at the target spacing, at least one voxel along each axis.

    Without a target the shape stays.
    """
    if target_mm is None:
        return shape
    x, y, z = (
        max(1, round(have / want * size))  # halves depend on the order: nnU-Net's
        for size, have, want in zip(shape, spacing_mm, target_mm, strict=True)
    )
    return (x, y, z)


def visible_shape(shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None) -> Shape:
    """Return :func:`resampled_shape`, or refuse one that a wrong unit of length makes.

    Raises:
        VolumeError: Nothing but a single voxel would be left, or far too many voxels.
    """
    new_shape = resampled_shape(shape, spacing_mm, target_mm)
    change = _change(shape, spacing_mm, new_shape, target_mm)
    if max(new_shape) == 1 and max(shape) > MAX_LOST_VOXELS:
        raise VolumeError(f"{change}, and nothing would be left to see; {REMEDY}")
    finest = max(new / old for new, old in zip(new_shape, shape, strict=True))
    if new_shape != shape and (finest > MAX_FINER or math.prod(new_shape) > MAX_VOXELS):
        raise VolumeError(f"{change}, which is far too many; {REMEDY}")
    return new_shape


def affordable_shape(
    shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None, num_arrays: int
) -> Shape:
    """Return :func:`visible_shape` once it is known that the memory suffices to get there.

    So many arrays of that shape, such as channels, are resampled together.

    Raises:
        VolumeError: It does not suffice, or the shape is absurd.
    """
    new_shape = visible_shape(shape, spacing_mm, target_mm)
    change = _change(shape, spacing_mm, new_shape, target_mm)
    # The arrays, a piece of them on its way along each axis, the result, and a copy in order.
    voxels = math.prod(shape) + 3 * max(math.prod(shape), math.prod(new_shape))
    refuse_beyond_memory(FLOAT32_BYTES * num_arrays * voxels, f"{change}, which", REMEDY)
    return new_shape


def _change(shape: Shape, spacing_mm: Spacing, new_shape: Shape, target_mm: Spacing | None) -> str:
    return (
        f"{times(shape)} voxels of {times(spacing_mm)} mm would become {times(new_shape)} of "
        f"{times(target_mm or spacing_mm)} mm"
    )
