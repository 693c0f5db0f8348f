"""The random choices of a patch's augmentation, as plain numbers.

Transforms, their order and their ranges are those of nnU-Net's default training (Isensee et al.,
Nature Methods 2021; nnunetv2 2.8) for intensities of standard deviation 1. Scales are drawn evenly
in their logarithm.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.preparation.resample import THICK_SLICE_RATIO, thick_axes

Matrix = npt.NDArray[np.float64]
Axes = tuple[float, float, float]
"""A number for each of X, Y, Z."""

SCALING_RANGE = (0.7, 1.4)
"""Factors of the distance between sampled voxels: below 1, structures become larger."""
MAX_NOISE_STD = 0.1
BLUR_SIGMA_VOXELS = (0.5, 1.0)
BRIGHTNESS_RANGE = (0.75, 1.25)
CONTRAST_RANGE = (0.75, 1.25)
GAMMA_RANGE = (0.7, 1.5)
LOW_RESOLUTION_RANGE = (0.5, 1.0)
CHANNEL_PROBABILITY = 0.5
"""If a patch is blurred or loses resolution, the probability for each of its channels."""

STILL: Axes = (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class DrawnChannel:
    """Changes of the intensities of one channel, in this order; by default none."""

    noise_std: float = 0.0
    """Standard deviation of Gaussian noise that is added."""
    noise_seed: tuple[int, int] = (0, 0)
    """Two numbers below 2^32 that the noise is made from."""
    blur_sigma: Axes | None = None
    """Standard deviations of a Gaussian blur along X, Y, Z, in voxels."""
    brightness: float = 1.0
    """Factor of all intensities."""
    contrast: float = 1.0
    """Factor of the distance from the mean; the range is kept."""
    resolution: Axes = STILL
    """Factors of the number of voxels along X, Y, Z, for downsampling before enlarging again."""
    inverted_gamma: float = 1.0
    """Exponent of a gamma curve over the inverted intensities."""
    gamma: float = 1.0
    """Exponent of a gamma curve over the intensities."""

    @property
    def sampled(self) -> tuple[float, float, float, float]:
        """Changes during sampling: noise and brightness, which commutes with the blur before it."""
        return (self.noise_std, *self.noise_seed, self.brightness)

    @property
    def is_measured(self) -> bool:
        """Whether the changes depend on the intensities of the whole patch."""
        return (self.contrast, self.inverted_gamma, self.gamma) != (1, 1, 1)


class AugmentationDraw:
    """Draws the augmentation that the settings ask for."""

    def __init__(self, settings: AugmentationSettings) -> None:
        self.settings = settings
        self.mirror_axes = tuple("xyz".index(axis) for axis in settings.known_mirror_axes)

    def matrix(self, rng: np.random.Generator, size: Shape, spacing_mm: Spacing) -> Matrix | None:
        """Draw a rotation, a scaling and mirroring of a patch; None if nothing changes.

        The matrix (3, 3) maps an offset in voxels from the centre of the patch to the offset in
        voxels at which the case is sampled. The rotation is drawn in millimetres, so it does not
        shear anatomy if voxels are not cubes.
        """
        matrix = self._affine(rng, size, spacing_mm)
        signs = np.ones(3)
        for axis in self.mirror_axes:
            if rng.random() < 0.5:
                signs[axis] = -1
        if matrix is None and signs.min() > 0:
            return None
        mirrored: Matrix = (np.eye(3) if matrix is None else matrix) * signs
        return mirrored

    def _affine(self, rng: np.random.Generator, size: Shape, spacing_mm: Spacing) -> Matrix | None:
        rotates = rng.random() < self.settings.rotation_probability
        angles = rng.uniform(-1, 1, 3)
        scales = rng.random() < self.settings.scaling_probability
        low, high = SCALING_RANGE
        scale = math.exp(rng.uniform(math.log(low), math.log(high)))
        if not (rotates or scales):
            return None
        turning, scaling = free_axes(size, spacing_mm)
        degrees = angles * largest_angle(self.settings, turning)
        for axis in range(3):
            # A rotation about an axis mixes the two others.
            if not (rotates and all(turning[other] for other in range(3) if other != axis)):
                degrees[axis] = 0
        zoom = [scale if scales and is_free else 1.0 for is_free in scaling]
        turn = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix()
        spacing = np.array(spacing_mm)
        matrix: Matrix = turn * spacing / spacing[:, None] @ np.diag(zoom)
        return matrix

    def channels(
        self, rng: np.random.Generator, num_channels: int, spacing_mm: Spacing
    ) -> tuple[DrawnChannel, ...]:
        """Draw the changes of the intensities of each channel."""
        settings = self.settings

        def happens(probability: float) -> bool:
            return bool(rng.random() < probability)

        # All numbers are always drawn, so that changing one probability changes nothing else.
        noise_std = float(rng.uniform(0, MAX_NOISE_STD))
        is_noisy = happens(settings.noise_probability)
        blurs = happens(settings.blur_probability)
        brightens = happens(settings.brightness_probability)
        contrasts = happens(settings.contrast_probability)
        coarsens = happens(settings.low_resolution_probability)
        inverts = happens(settings.inverted_gamma_probability)
        bends = happens(settings.gamma_probability)
        thick = thick_axes(spacing_mm)
        drawn = []
        for _ in range(num_channels):
            seed = rng.integers(2**32, size=2)
            a, b, c = rng.uniform(*BLUR_SIGMA_VOXELS, size=3).tolist()
            blurs_this = happens(CHANNEL_PROBABILITY)
            resolution = float(rng.uniform(*LOW_RESOLUTION_RANGE))
            coarsens_this = happens(CHANNEL_PROBABILITY)
            brightness = _around_one(rng, BRIGHTNESS_RANGE)
            contrast = _around_one(rng, CONTRAST_RANGE)
            inverted, gamma = _around_one(rng, GAMMA_RANGE), _around_one(rng, GAMMA_RANGE)
            x, y, z = (1.0 if is_thick else resolution for is_thick in thick)
            drawn.append(
                DrawnChannel(
                    noise_std=noise_std if is_noisy else 0.0,
                    noise_seed=(int(seed[0]), int(seed[1])),
                    blur_sigma=(a, b, c) if blurs and blurs_this else None,
                    brightness=brightness if brightens else 1.0,
                    contrast=contrast if contrasts else 1.0,
                    resolution=(x, y, z) if coarsens and coarsens_this else STILL,
                    inverted_gamma=inverted if inverts else 1.0,
                    gamma=gamma if bends else 1.0,
                )
            )
        return tuple(drawn)


def free_axes(
    size: Shape, spacing_mm: Spacing
) -> tuple[tuple[bool, bool, bool], tuple[bool, bool, bool]]:
    """Return the axes that a rotation may mix, and the axes that scaling changes.

    Thick slices cannot be interpolated across, so rotation and scaling stay in their plane. If two
    axes are thick and alike, as in a stack of long voxels, these two are the plane. If no two axes
    are alike, nothing is rotated and all axes scale, which keeps shapes. An axis of one voxel is in
    no plane.
    """
    thick = thick_axes(spacing_mm)
    plane = [not is_thick for is_thick in thick]
    if sum(thick) == 2:
        fine, coarse = sorted(s for s, is_thick in zip(spacing_mm, thick, strict=True) if is_thick)
        alike = coarse <= THICK_SLICE_RATIO * fine
        plane = list(thick) if alike else [False] * 3
    scaling = plane if any(plane) else [True] * 3
    turning = [is_in and voxels > 1 for is_in, voxels in zip(plane, size, strict=True)]
    scaling = [is_in and voxels > 1 for is_in, voxels in zip(scaling, size, strict=True)]
    return (turning[0], turning[1], turning[2]), (scaling[0], scaling[1], scaling[2])


def largest_angle(settings: AugmentationSettings, turning: tuple[bool, bool, bool]) -> float:
    """Return the largest angle of a rotation that mixes these axes.

    Two axes are rotated in their plane; a single axis is not rotated.
    """
    if sum(turning) < 2:
        return 0.0
    is_plane = sum(turning) == 2
    return settings.in_plane_rotation_degrees if is_plane else settings.rotation_degrees


def _around_one(rng: np.random.Generator, limits: tuple[float, float]) -> float:
    """Draw a factor: below 1 as often as above, and evenly on either side."""
    low, high = limits
    return float(rng.uniform(low, 1) if rng.random() < 0.5 else rng.uniform(1, high))
