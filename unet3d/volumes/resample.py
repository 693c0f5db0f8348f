"""Resampling of arrays from one voxel grid to another that covers the same box of space.

Every interpolation here is linear in the voxels and separable, so it is one small matrix per axis.
The matrices are SciPy's ``zoom`` of the identity with ``grid_mode=True``: voxels are cells, the
outer *faces* of the two grids coincide, and values beyond the border repeat it.

Grids are resampled along their own axes, as if these were at right angles. Where they are not (a CT
of a tilted gantry) anatomy stays as skewed as it is stored, and returns to its place afterwards.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.volumes.files import times
from unet3d.volumes.grids import rounded_mm
from unet3d.volumes.memory_limits import refuse_beyond_memory

SpacingSetting = Literal["median", "native"] | Spacing
"""What data.spacing_mm may be."""

THICK_SLICE_RATIO = 3.0
"""An axis is thick when its spacing exceeds the finest by this factor (the value of nnU-Net)."""

THIN_SLICE_PERCENTILE = 10
"""Where few thick slices are to keep what the thinnest of them show, the spacing across them is
this percentile of the data set's (the value of nnU-Net)."""

NEGLIGIBLE_WEIGHT = 1e-12

MAX_AXIS = 2**60
"""Where the count of voxels along an axis stops; no memory holds so many."""

MAX_LOST_VOXELS = 8
"""Voxels along an axis of which a whole volume may become a single voxel."""

REMEDY = "fix the spacing or its unit in the header, or train with another data.spacing_mm"

FLOAT32_BYTES = 4
WEIGHT_BYTES = 16
"""An interpolation's weight while it is made: twice in float64."""


def median_spacing(spacings_mm: Sequence[Spacing]) -> Spacing:
    """Return the median of spacings, axis by axis."""
    x, y, z = (rounded_mm(float(median)) for median in np.median(spacings_mm, axis=0))
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
        target_mm[thick] = max(rounded_mm(float(finer)), coarsest_other)
    x, y, z = target_mm
    return (x, y, z)


def grid_shape(array: npt.NDArray[Any]) -> Shape:
    """Return the voxels along X, Y, Z of an array, the last three of its axes."""
    x, y, z = array.shape[-3:]
    return (x, y, z)


def resampled_shape(shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None) -> Shape:
    """Return the shape at the target spacing, at least one voxel along each axis.

    Args:
        shape: Voxels along X, Y, Z.
        spacing_mm: Their spacing.
        target_mm: The spacing to reach; None: keep the shape.
    """
    if target_mm is None:
        return shape
    x, y, z = (
        max(1, round(min(size * have / want, MAX_AXIS)))
        for size, have, want in zip(shape, spacing_mm, target_mm, strict=True)
    )
    return (x, y, z)


def visible_shape(shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None) -> Shape:
    """Return :func:`resampled_shape` if there is something left to see.

    Args:
        shape: Voxels along X, Y, Z.
        spacing_mm: Their spacing.
        target_mm: The spacing to reach; None: keep the shape.

    Raises:
        VolumeError: Nothing but a single voxel would be left.
    """
    new_shape = resampled_shape(shape, spacing_mm, target_mm)
    if max(new_shape) == 1 and max(shape) > MAX_LOST_VOXELS:
        change = _change(shape, spacing_mm, new_shape, target_mm)
        raise VolumeError(f"{change}, and nothing would be left to see; {REMEDY}")
    return new_shape


def affordable_shape(
    shape: Shape, spacing_mm: Spacing, target_mm: Spacing | None, num_arrays: int
) -> Shape:
    """Return :func:`visible_shape` once it is known that the memory suffices to get there.

    Args:
        shape: Voxels along X, Y, Z.
        spacing_mm: Their spacing.
        target_mm: The spacing to reach; None: keep the shape.
        num_arrays: Arrays of this shape that are kept at a time, such as the channels.

    Raises:
        VolumeError: It does not, or nothing but a single voxel would be left.
    """
    new_shape = visible_shape(shape, spacing_mm, target_mm)
    change = _change(shape, spacing_mm, new_shape, target_mm)
    needed = _resampling_bytes(shape, new_shape, num_arrays)
    refuse_beyond_memory(needed, f"{change}, which", REMEDY)
    return new_shape


def _change(shape: Shape, spacing_mm: Spacing, new_shape: Shape, target_mm: Spacing | None) -> str:
    return (
        f"{times(shape)} voxels of {times(spacing_mm)} mm would become {times(new_shape)} of "
        f"{times(target_mm or spacing_mm)} mm"
    )


def _resampling_bytes(shape: Shape, new_shape: Shape, num_arrays: int) -> int:
    """Count what :class:`Resampling` and the preparation before it hold at the same time."""
    voxels = [math.prod((*new_shape[:axis], *shape[axis:])) for axis in range(4)]
    # Each multiplication copies its input so that the axis comes last.
    step = max(2 * have + want for have, want in zip(voxels, voxels[1:], strict=False))
    weights = sum(size * new for size, new in zip(shape, new_shape, strict=True) if size != new)
    kept = num_arrays * (2 * voxels[0] + voxels[3])
    return FLOAT32_BYTES * (kept + (step if shape != new_shape else 0)) + WEIGHT_BYTES * weights


def thick_axes(*spacings_mm: Spacing) -> tuple[bool, bool, bool]:
    """Tell which axes have thick slices in any of the given spacings."""
    x, y, z = (
        any(spacing[axis] > THICK_SLICE_RATIO * min(spacing) for spacing in spacings_mm)
        for axis in range(3)
    )
    return (x, y, z)


class Resampling:
    """Cubic splines from one grid to another, and linear interpolation across thick slices.

    A spline through slices that lie far apart swings above and below what either of them holds;
    nnU-Net treats that axis with a lower order for the same reason. A spline depends on all voxels
    of a line, but on those far away by less than :data:`NEGLIGIBLE_WEIGHT`.
    """

    def __init__(self, shape: Shape, new_shape: Shape, thick: tuple[bool, bool, bool]) -> None:
        """Set it up.

        Args:
            shape: Voxels along X, Y, Z of images.
            new_shape: Voxels along X, Y, Z of the results.
            thick: Which axes have thick slices.
        """
        self._shape = shape
        self._new_shape = new_shape
        self._thick = thick

    def needed(self, axis: int, begin: int, end: int) -> slice:
        """Return the planes of the image that some planes of the result depend on.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of the result.
            end: The one after the last.
        """
        if self._shape == self._new_shape:
            return slice(begin, end)
        planes = torch.nonzero(self._matrix(axis)[begin:end].any(dim=0)).flatten().tolist()
        return slice(planes[0], planes[-1] + 1)

    def planes(
        self, image: npt.NDArray[np.float32], axis: int, begin: int, end: int
    ) -> npt.NDArray[np.float32]:
        """Return some planes of the result.

        Args:
            image: The planes that are needed for them, shape (C, X, Y, Z).
            axis: As in :meth:`needed`.
            begin: As there.
            end: As there.

        Returns:
            Shape (C, X', Y', Z'); the image itself where the grids are one.

        Raises:
            VolumeError: The memory does not suffice.
        """
        if self._shape == self._new_shape:
            return image
        shape = _with(self._new_shape, axis, end - begin)
        refuse_beyond_memory(
            _resampling_bytes(grid_shape(image), shape, 0)
            + FLOAT32_BYTES * len(image) * math.prod(shape),
            f"resampling {times(grid_shape(image))} voxels to {times(shape)}",
            REMEDY,
        )
        matrices = [self._matrix(one) for one in range(3)]
        matrices[axis] = matrices[axis][begin:end, self.needed(axis, begin, end)]
        result = np.empty((len(image), *shape), np.float32)
        for channel, array in enumerate(image):
            planes = torch.from_numpy(np.ascontiguousarray(array))
            result[channel] = _apply(planes, matrices).numpy()
        return result

    def _matrix(self, axis: int) -> torch.Tensor:
        order: Literal[1, 3] = 1 if self._thick[axis] else 3
        return _matrix(self._shape[axis], self._new_shape[axis], order=order)


def _with(shape: Shape, axis: int, voxels: int) -> Shape:
    x, y, z = (voxels if one == axis else size for one, size in enumerate(shape))
    return (x, y, z)


def resample_classes(
    classes: npt.NDArray[np.unsignedinteger], shape: Shape
) -> npt.NDArray[np.unsignedinteger]:
    """Resample class indices: each class linearly as a mask of its own; the strongest one wins.

    No index arises that was not there. Interpolating the indices themselves would put class 2
    between classes 1 and 3; taking the nearest would leave stairs.

    Args:
        classes: Class indices, shape (X, Y, Z).
        shape: Voxels along X, Y, Z of the result.
    """
    if classes.shape == shape:
        return classes
    from scipy import ndimage

    matrices = [
        _matrix(size, new_size, order=1)
        for size, new_size in zip(classes.shape, shape, strict=True)
    ]
    result = np.zeros(shape, classes.dtype)
    strongest = _apply(torch.from_numpy((classes == 0).astype(np.float32)), matrices).numpy()
    for index, box in enumerate(ndimage.find_objects(classes), start=1):
        if box is None:
            continue
        # Only the box of the class, and the part of the new grid that it reaches, can change.
        inner = [matrix[:, axis] for matrix, axis in zip(matrices, box, strict=True)]
        rows = [torch.nonzero(matrix.any(dim=1)).flatten().tolist() for matrix in inner]
        if not all(rows):
            continue
        reach = tuple(slice(row[0], row[-1] + 1) for row in rows)
        mask = torch.from_numpy((classes[box] == index).astype(np.float32))
        strength = _apply(
            mask, [matrix[axis] for matrix, axis in zip(inner, reach, strict=True)]
        ).numpy()
        wins = strength > strongest[reach]
        result[reach][wins] = index
        strongest[reach][wins] = strength[wins]
    return result


@functools.lru_cache(maxsize=64)
def _matrix(size: int, new_size: int, order: Literal[1, 3]) -> torch.Tensor:
    """Return the interpolation from ``size`` to ``new_size`` voxels, shape (new_size, size)."""
    if size == new_size:
        return torch.eye(size)
    from scipy import ndimage  # takes a third of a second, and images at their own spacing do not

    rows = [
        ndimage.zoom(column, new_size / size, order=order, mode="nearest", grid_mode=True)
        for column in np.eye(size)
    ]
    matrix = np.stack(rows, axis=1).astype(np.float32)
    # The weights of a spline fade by a factor of four with each voxel, down to denormal numbers,
    # which slow every multiplication tenfold and which no float32 result can show.
    matrix[np.abs(matrix) < NEGLIGIBLE_WEIGHT] = 0
    return torch.from_numpy(matrix)


def _apply(array: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
    """Multiply each axis of an array (X, Y, Z) by its matrix."""
    for matrix in matrices:  # each step moves the next axis to the front
        if matrix.shape[0] != matrix.shape[1] or not torch.equal(matrix, torch.eye(len(matrix))):
            array = torch.tensordot(array, matrix, dims=([0], [1]))
        else:
            array = array.movedim(0, -1)
    return array
