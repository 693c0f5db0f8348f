"""Synthetic heads of any size, with labels, each determined by a seed.

The head is geometry in millimetres, scaled to the field of view; shape and spacing only say how it
is sampled. Every surface is the zero level of a function of position. A voxel that a surface
crosses holds a mixture, from how much of the voxel lies on either side.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.interpolate import BSpline
from scipy.spatial.transform import Rotation

from unet3d.config import Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.images.files import times
from unet3d.images.grids import MAX_SPACING_MM, MIN_SPACING_MM
from unet3d.images.memory_limits import refuse_beyond_memory

Array = npt.NDArray[np.float32]

LABEL_NAMES = ("background", "brain", "ventricles", "lesion")
"""Names of the labels; the value of a label is its index here."""

MIN_VOXELS = 16
"""Voxels along each axis that a head needs."""

SLAB_VOXELS = 1 << 21
"""Voxels worked on at once, which bounds the memory beyond the result."""

VOXEL_BYTES = 8
"""What the result takes of each voxel, with the copy that is written."""

WORK_BYTES = 100
"""What a voxel takes while it is worked on; measured: 80 to 90."""

MAX_STRETCH = 1.5
"""Largest side of the head as a multiple of the shortest side of the field of view."""

# A FLAIR-like contrast. Fat is so bright that its blurred and shaded parts look like lesions.
AIR, SKIN, FAT, MUSCLE, SKULL = 0.02, 0.45, 0.95, 0.42, 0.08
FLUID, GREY, WHITE, LESION = 0.16, 0.58, 0.44, 0.86
NOISE = 0.045
"""Standard deviation of the noise in each of the two channels of the receiver."""

BRAIN_CENTRE, BRAIN_SCALE = (0.0, 0.0, 0.1), (0.76, 0.78, 0.72)
"""Centre and size of the brain, as fractions of the head's semi-axes."""

LESION_DENT = 0.35
"""How far, in radii, a lesion's surface may depart from a sphere."""

LESION_REACH = 2.2
"""Distance from its centre, in radii, beyond which a lesion has no effect."""

SPLINE_STD = 0.479**1.5
"""Standard deviation that a cubic B-spline of three variables leaves of its coefficients' 1."""


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What a seed determines before any voxel is sampled; lengths are in mm."""

    centre: npt.NDArray[np.float64]
    rotation: npt.NDArray[np.float64]
    semi_axes: tuple[float, float, float]
    ventricle_size: float
    lesions: list[tuple[npt.NDArray[np.float64], float]]
    """Centre relative to the head's, in the head's axes, and radius."""
    gain: float
    fields: dict[str, npt.NDArray[np.float64]]
    """Coefficients of smooth random fields over the field of view."""


def head_phantom(
    seed: int, shape: Shape, spacing_mm: Spacing = (1.0, 1.0, 1.0)
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Make one head and its label map.

    Args:
        seed: Determines pose, lesions, texture, bias field and noise.
        shape: Voxels along X, Y, Z.
        spacing_mm: Distance of neighbouring voxels along X, Y, Z.

    Returns:
        The image, float32 ``(1, X, Y, Z)`` of whole numbers, and the labels, uint8 ``(X, Y, Z)``,
        valued as in ``LABEL_NAMES``.

    Raises:
        ConfigError: The shape is too small for a head, or no scan has such a spacing.
        VolumeError: The head does not fit in memory.
    """
    if min(shape) < MIN_VOXELS:
        raise ConfigError(
            f"phantom shape {shape} is too small for a head; use at least {MIN_VOXELS} voxels"
            " along each axis"
        )
    if not all(MIN_SPACING_MM <= spacing <= MAX_SPACING_MM for spacing in spacing_mm):
        raise ConfigError(
            f"phantom spacing {spacing_mm} mm: use numbers from {MIN_SPACING_MM} to "
            f"{MAX_SPACING_MM:.0f}"
        )
    plane_voxels = shape[1] * shape[2]
    slab_planes = min(shape[0], max(1, SLAB_VOXELS // plane_voxels) + 2)
    refuse_beyond_memory(
        VOXEL_BYTES * math.prod(shape) + WORK_BYTES * slab_planes * plane_voxels,
        f"a phantom of {times(shape)} voxels",
        "use a smaller data.phantom.shape",
    )
    rng = np.random.default_rng(seed)
    head = _random_head(rng, np.array(shape) * spacing_mm)
    image = np.empty((1, *shape), dtype=np.float32)
    labels = np.empty(shape, dtype=np.uint8)
    num_planes = max(1, SLAB_VOXELS // (shape[1] * shape[2]))
    for start in range(0, shape[0], num_planes):
        stop = min(start + num_planes, shape[0])
        # One more plane on each side gives the slope of the surfaces.
        first, last = max(start - 1, 0), min(stop + 1, shape[0])
        tissue, labels[start:stop] = _slab(
            head, shape, spacing_mm, (first, last), (start - first, stop - first)
        )
        image[0, start:stop] = _scanned(tissue, head.gain, rng)
    return image, labels


def _random_head(rng: np.random.Generator, extent_mm: npt.NDArray[np.float64]) -> _Head:
    bounds_mm = np.minimum(extent_mm, MAX_STRETCH * extent_mm.min())
    semi_axes = bounds_mm * (0.36, 0.43, 0.42) * rng.uniform(0.92, 1.06, 3)
    ventricle_size = float(rng.uniform(0.85, 1.35))
    fields = {
        name: rng.standard_normal((cells + 3,) * 3)
        for name, cells in (("folds", 18), ("texture", 30), ("lesion", 14), ("bias", 2))
    }
    mean_extent = float(np.prod(bounds_mm)) ** (1 / 3)
    num_small, num_large = rng.integers(0, 4), rng.integers(1, 4)
    radii = [
        *rng.uniform(0.055, 0.09, num_large) * mean_extent,
        *rng.uniform(0.03, 0.05, num_small) * mean_extent,
    ]
    lesions = []
    for radius in radii:
        position = _in_brain(rng, ventricle_size)
        in_head = np.array(BRAIN_CENTRE) + position * BRAIN_SCALE
        lesions.append((in_head * semi_axes, float(radius)))
    return _Head(
        centre=rng.uniform(-0.03, 0.03, 3) * bounds_mm,
        rotation=Rotation.from_euler("xyz", rng.uniform(-12, 12, 3), degrees=True).as_matrix(),
        semi_axes=(float(semi_axes[0]), float(semi_axes[1]), float(semi_axes[2])),
        ventricle_size=ventricle_size,
        lesions=lesions,
        gain=float(rng.uniform(700, 1300)),
        fields=fields,
    )


def _in_brain(rng: np.random.Generator, ventricle_size: float) -> npt.NDArray[np.float64]:
    while True:
        position = rng.uniform(-0.75, 0.75, 3)
        ventricles = _ventricles(position[0], position[1], position[2], ventricle_size)
        if np.linalg.norm(position) < 0.75 and ventricles > 0.3:
            return position


def _slab(
    head: _Head, shape: Shape, spacing_mm: Spacing, planes: tuple[int, int], core: tuple[int, int]
) -> tuple[Array, npt.NDArray[np.uint8]]:
    """Return tissue intensities and labels of some planes along X.

    Args:
        head: The head.
        shape: Voxels along X, Y, Z of the volume.
        spacing_mm: Their spacing.
        planes: First plane and end of those that are sampled.
        core: First plane and end of those that are returned, counted from ``planes[0]``.
    """
    x, y, z = _in_head_axes(head, shape, spacing_mm, planes)
    ex, ey, ez = (axis / size for axis, size in zip((x, y, z), head.semi_axes, strict=True))
    ex *= 1 + 0.14 * ey  # narrower in front
    surface = np.sqrt(ex * ex + ey * ey + ez * ez) - 1
    bx, by, bz = (
        (axis - centre) / size
        for axis, centre, size in zip((ex, ey, ez), BRAIN_CENTRE, BRAIN_SCALE, strict=True)
    )
    del ex, ey, ez
    depth = np.sqrt(bx * bx + by * by + bz * bz) - 1
    folds = np.clip(1 - np.abs(_smooth(head.fields["folds"], shape, planes)) / 0.4, 0, 1)
    furrows = np.maximum(folds, 1.4 * np.clip(1 - np.abs(bx) / 0.05, 0, 1))
    cortex = depth + 0.13 * furrows * np.clip((depth + 0.35) / 0.25, 0, 1)
    ventricles = _ventricles(bx, by, bz, head.ventricle_size)
    lesions = _lesions(head, (x, y, z), shape, spacing_mm, planes)

    tissue = np.full_like(surface, AIR)
    layers: tuple[tuple[Array, tuple[tuple[float, float], ...]], ...] = (
        (surface, ((0.0, SKIN), (-0.035, FAT), (-0.12, MUSCLE))),
        (depth, ((0.17, SKULL), (0.06, FLUID))),
        (cortex, ((0.0, GREY), (-0.17, WHITE))),
        (np.maximum(lesions, cortex), ((0.0, LESION),)),
        (ventricles, ((0.0, FLUID),)),
    )
    for function, levels in layers:  # inside its surface each replaces those before it
        slope = _change_per_voxel(function)
        for level, intensity in levels:
            tissue += (intensity - tissue) * np.clip(0.5 - (function - level) / slope, 0, 1)
    tissue *= 1 + 0.07 * _smooth(head.fields["texture"], shape, planes)
    tissue *= np.exp(0.2 * _smooth(head.fields["bias"], shape, planes))

    labels = (cortex < 0).astype(np.uint8)
    labels[(lesions < 0) & (cortex < 0)] = LABEL_NAMES.index("lesion")
    labels[ventricles < 0] = LABEL_NAMES.index("ventricles")
    return tissue[slice(*core)], labels[slice(*core)]


def _in_head_axes(
    head: _Head, shape: Shape, spacing_mm: Spacing, planes: tuple[int, int]
) -> tuple[Array, ...]:
    """Return the three coordinates of each voxel in mm, along the axes of the head."""
    x, y, z = (
        ((np.arange(size) + 0.5 - size / 2) * step - centre).astype(np.float32)
        for size, step, centre in zip(shape, spacing_mm, head.centre, strict=True)
    )
    turned = head.rotation.astype(np.float32)
    return tuple(
        (x[slice(*planes), None, None] * turned[0, axis] + y[:, None] * turned[1, axis])
        + z * turned[2, axis]
        for axis in range(3)
    )


def _ventricles(x: Any, y: Any, z: Any, size: float) -> Any:
    """Return a function below zero in two arcs, mirrored, in units of the brain's semi-axes."""
    bow = y * y
    across = (np.abs(x) - 0.17 - 0.15 * bow) / 0.115
    along = (y + 0.05) / 0.45
    upward = (z - 0.12 + 0.35 * bow) / 0.17
    return np.sqrt(across * across + along * along + upward * upward) / size - 1


def _lesions(
    head: _Head,
    coordinates: tuple[Array, ...],
    shape: Shape,
    spacing_mm: Spacing,
    planes: tuple[int, int],
) -> Array:
    """Return a function below zero in the lesions: spheres that a random field has dented."""
    result = np.full_like(coordinates[0], LESION_REACH - 1 - LESION_DENT)
    dents = LESION_DENT * np.clip(_smooth(head.fields["lesion"], shape, planes), -1, 1)
    for centre, radius in head.lesions:
        middle_mm = head.rotation @ centre + head.centre
        low, high = (
            np.array(shape) / 2 + (middle_mm + sign * LESION_REACH * radius) / spacing_mm
            for sign in (-1, 1)
        )
        low, high = np.maximum(low, 0).astype(int), np.ceil(np.maximum(high, 0)).astype(int)
        low[0], high[0] = (max(index - planes[0], 0) for index in (low[0], high[0]))
        box = tuple(slice(*ends) for ends in zip(low, high, strict=True))
        squares = [
            (axis[box] - np.float32(position)) ** 2
            for axis, position in zip(coordinates, centre, strict=True)
        ]
        distance = np.sqrt(sum(squares[1:], squares[0])) / np.float32(radius)
        result[box] = np.minimum(result[box], distance - 1 + dents[box])
    return result


def _smooth(coefficients: npt.NDArray[np.float64], shape: Shape, planes: tuple[int, int]) -> Array:
    """Sample a cubic B-spline that spans the field of view; its variance is 1."""
    num_cells = len(coefficients) - 3
    knots = np.arange(-3, num_cells + 4)
    x, y, z = (
        BSpline.design_matrix((np.arange(size) + 0.5) / size * num_cells, knots, 3)
        .toarray()
        .astype(np.float32)
        for size in shape
    )
    values = np.tensordot(x[slice(*planes)], coefficients.astype(np.float32) / SPLINE_STD, 1)
    sampled: Array = y @ (values.astype(np.float32) @ z.T)
    return sampled


def _change_per_voxel(function: Array) -> Array:
    """Return by how much a function changes across each voxel, corner to corner."""
    change = np.full_like(function, 1e-6)
    for axis in range(3):
        change += np.abs(np.gradient(function, axis=axis))
    return change


def _scanned(tissue: Array, gain: float, rng: np.random.Generator) -> Array:
    """Return whole numbers with Rician noise, which magnitude images of scanners have."""
    tissue += NOISE * rng.standard_normal(tissue.shape, dtype=np.float32)
    other = NOISE * rng.standard_normal(tissue.shape, dtype=np.float32)
    magnitude: Array = np.rint(np.hypot(tissue, other) * np.float32(gain))
    return magnitude
