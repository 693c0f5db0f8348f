"""Random changes to a training patch: where it is sampled, and its intensities.

Position, rotation, scale and mirroring come from one NumPy generator for each patch; the intensity
transforms are MONAI's, seeded from it.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from monai.transforms import (
    Compose,
    RandAdjustContrast,
    RandGaussianNoise,
    RandGaussianSmooth,
    RandScaleIntensity,
    RandScaleIntensityFixedMean,
    RandSimulateLowResolution,
)
from scipy.spatial.transform import Rotation

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.volumes.resample import thick_axes

Matrix = npt.NDArray[np.float64]

# The strengths are those of nnU-Net's default training, for intensities of standard deviation 1.
MAX_NOISE_STD = 0.3
BLUR_SIGMA_VOXELS = (0.5, 1.0)
BRIGHTNESS_FACTOR = 0.25
CONTRAST_FACTOR = 0.25
GAMMA_RANGE = (0.7, 1.5)
LOW_RESOLUTION_ZOOM = (0.5, 1.0)


class Augmentation:
    """The random changes that the settings ask for."""

    def __init__(self, settings: AugmentationSettings) -> None:
        """Build the transforms.

        Args:
            settings: Probabilities and ranges.

        Raises:
            ConfigError: The scaling range begins with its larger number.
        """
        low, high = settings.scaling_range
        if low > high:
            raise ConfigError(
                f"patches.augmentation.scaling_range is {low:g},{high:g}; give the smaller "
                "number first"
            )
        self.settings = settings
        self.mirror_axes = tuple("xyz".index(axis) for axis in settings.mirror_axes)
        sigma = BLUR_SIGMA_VOXELS
        self._intensity = Compose(
            [
                RandGaussianNoise(prob=settings.noise_probability, std=MAX_NOISE_STD),
                RandGaussianSmooth(sigma, sigma, sigma, prob=settings.blur_probability),
                RandScaleIntensity(BRIGHTNESS_FACTOR, prob=settings.brightness_probability),
                RandScaleIntensityFixedMean(
                    prob=settings.contrast_probability,
                    factors=CONTRAST_FACTOR,
                    preserve_range=True,
                    channel_wise=True,
                ),
                RandSimulateLowResolution(
                    prob=settings.low_resolution_probability, zoom_range=LOW_RESOLUTION_ZOOM
                ),
                RandAdjustContrast(
                    prob=settings.gamma_probability, gamma=GAMMA_RANGE, retain_stats=True
                ),
            ]
        )

    def draw_affine(
        self, rng: np.random.Generator, size: Shape, spacing_mm: Spacing
    ) -> Matrix | None:
        """Draw a rotation and a scaling, each with its probability.

        They are drawn in millimetres, so that anatomy is rotated and not sheared where voxels are
        not cubes. Thick slices stay in their plane: between them there is nothing to interpolate.

        Args:
            rng: The patch's generator.
            size: Voxels of the patch along X, Y, Z.
            spacing_mm: Spacing of the case.

        Returns:
            (3, 3), from an offset in voxels from the centre of the patch to the offset in voxels at
            which the case is sampled; None if nothing changes.
        """
        rotates = rng.random() < self.settings.rotation_probability
        degrees = rng.uniform(-1, 1, 3) * self.settings.rotation_degrees
        scales = rng.random() < self.settings.scaling_probability
        low, high = self.settings.scaling_range
        scale = math.exp(rng.uniform(math.log(low), math.log(high)))
        if not (rotates or scales):
            return None
        thick = [
            is_thick or voxels == 1
            for is_thick, voxels in zip(thick_axes(spacing_mm), size, strict=True)
        ]
        for axis in range(3):
            # A rotation about an axis mixes the two others.
            if not rotates or any(thick[other] for other in range(3) if other != axis):
                degrees[axis] = 0
        zoom = [1.0 if is_thick or not scales else scale for is_thick in thick]
        turn = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix()
        spacing = np.array(spacing_mm)
        matrix: Matrix = turn * spacing / spacing[:, None] @ np.diag(zoom)
        return matrix

    def mirror(
        self, rng: np.random.Generator, image: torch.Tensor, label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flip each axis that may be flipped with a probability of one half.

        Args:
            rng: The patch's generator.
            image: Shape (C, X, Y, Z).
            label: Shape (X, Y, Z).
        """
        flips = [axis - 3 for axis in self.mirror_axes if rng.random() < 0.5]
        return (image.flip(flips), label.flip(flips)) if flips else (image, label)

    def change_intensities(self, rng: np.random.Generator, image: torch.Tensor) -> torch.Tensor:
        """Return the image with noise, blur and the like, each with its probability.

        Args:
            rng: The patch's generator.
            image: Shape (C, X, Y, Z), on the CPU.
        """
        self._intensity.set_random_state(seed=int(rng.integers(2**32)))
        return _plain(self._intensity(image))


def affine_margin(matrix: Matrix, size: Shape) -> Shape:
    """Return by how many voxels the sampled points reach beyond a box of the patch's size.

    Args:
        matrix: From :meth:`Augmentation.draw_affine`.
        size: Voxels of the patch along X, Y, Z.

    Returns:
        Voxels on either side of X, Y, Z.
    """
    half = (np.array(size) - 1) / 2
    x, y, z = (max(0, math.ceil(excess - 1e-6)) for excess in np.abs(matrix) @ half - half)
    return (x, y, z)


def sample_affine(
    image: torch.Tensor, label: torch.Tensor, matrix: Matrix, size: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a patch out of a box with the same centre: the image linearly, labels by the nearest.

    Args:
        image: Shape (C, X, Y, Z).
        label: Class indices, shape (X, Y, Z).
        matrix: From :meth:`Augmentation.draw_affine`.
        size: Voxels of the patch along X, Y, Z.

    Returns:
        Image (C, *size), label map (*size) of the same types.
    """
    grid = _sampling_grid(matrix, size, label.shape)
    sampled = F.grid_sample(image[None], grid, mode="bilinear", align_corners=False)
    return sampled[0], torch.take(label, _nearest_voxels(matrix, size, label.shape))


def _sampling_grid(matrix: Matrix, size: Shape, box: torch.Size) -> torch.Tensor:
    """Return the sampled points (1, *size, 3) as ``grid_sample`` takes them.

    Their unit is half a box, counted from its centre, and Z comes first. Each coordinate is a sum
    of what X, Y and Z add to it, so one pass over the patch is enough.
    """
    in_halves = matrix * 2 / np.maximum(2, np.array(box))[:, None]
    x, y, z = (
        torch.from_numpy(np.outer(_offsets(voxels), column[::-1]))
        for voxels, column in zip(size, in_halves.T, strict=True)
    )
    in_plane = (x[:, None] + y).float()
    return (in_plane[:, :, None] + z.float())[None]


def _nearest_voxels(matrix: Matrix, size: Shape, box: torch.Size) -> torch.Tensor:
    """Return, for each voxel of the patch, the index in the flattened box that is nearest.

    This is twice as fast as ``grid_sample``, which takes only label maps of floats.
    """
    index = torch.zeros(size, dtype=torch.int32 if box.numel() < 2**31 else torch.int64)
    for row, voxels in zip(matrix, box, strict=True):
        x, y, z = (
            torch.from_numpy(_offsets(length) * factor)
            for length, factor in zip(size, row, strict=True)
        )
        in_plane = (x[:, None] + y + (voxels - 1) / 2).float()
        nearest = (in_plane[:, :, None] + z.float()).round_().clamp_(0, voxels - 1)
        index.mul_(voxels).add_(nearest.to(index.dtype))
    return index.long()


def _offsets(voxels: int) -> npt.NDArray[np.float64]:
    """Return the position of each voxel along one axis, from the centre."""
    return np.arange(voxels, dtype=np.float64) - (voxels - 1) / 2


def _plain(tensor: Any) -> torch.Tensor:
    """Remove MONAI's metadata from a tensor: it costs time in every operation that follows."""
    plain: torch.Tensor = tensor.as_tensor() if hasattr(tensor, "as_tensor") else tensor
    return plain
