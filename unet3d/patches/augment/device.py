"""Augmentation on a GPU: whether it runs there, and the memory that it takes."""

import math
from dataclasses import dataclass

import torch

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.patches.augment.draw import SCALING_RANGE, free_axes
from unet3d.patches.augment.filters import farthest_reach
from unet3d.patches.augment.recipe import number_together

WORK_ARRAYS = 2
"""Temporary float32 copies of each channel that a filter changes; one more if several channels are
changed at once, because they are first copied out of the batch."""


@dataclass(frozen=True, kw_only=True)
class DeviceAugmentation:
    """Memory of augmentation on the device where the network begins."""

    settings: AugmentationSettings
    """The changes that can be drawn."""
    cases: tuple[tuple[Shape, Spacing], ...]
    """Shape and spacing of the cases that patches are cut from."""
    num_channels: int
    voxel_bytes: int
    """Bytes of one voxel of a channel in a cut."""
    label_bytes: int
    """Bytes of one voxel of the labels."""

    @staticmethod
    def on(
        device: torch.device,
        settings: AugmentationSettings,
        cases: tuple[tuple[Shape, Spacing], ...],
        voxel_bytes: int,
        num_channels: int,
        num_classes: int,
    ) -> "DeviceAugmentation | None":
        """Return the augmentation on a device; None if batches are made on the host."""
        if device.type != "cuda":
            return None
        return DeviceAugmentation(
            settings=settings,
            cases=cases,
            num_channels=num_channels,
            voxel_bytes=voxel_bytes,
            label_bytes=1 if num_classes <= 256 else 8,
        )

    def staging_bytes(self, size: Shape, num_patches: int, slab: range | None = None) -> int:
        """Return the peak temporary memory, in bytes, of making patches, or slabs of them.

        The boxes are freed before filters allocate memory.
        """
        made, in_place = size, True
        if slab is not None:
            reach = farthest_reach(size[0]) if self.settings.enabled else 0
            planes = min(size[0], slab.stop + reach) - max(0, slab.start - reach)
            made, in_place = (planes, *size[1:]), planes == len(slab)
        largest = max(
            math.prod(map(min, largest_reach(self.settings, size, spacing_mm, made[0]), shape))
            for shape, spacing_mm in self.cases
        )
        most = number_together(size)
        together = min(num_patches, most) if slab is None else 1
        cuts = together * largest * (self.num_channels * self.voxel_bytes + self.label_bytes)
        changed = min(together * self.num_channels, most) if self.settings.enabled else 0
        arrays = changed * (WORK_ARRAYS + (changed > 1)) * FLOAT32_BYTES
        around = 0 if in_place else self.num_channels * FLOAT32_BYTES + self.label_bytes
        return around * math.prod(made) + max(cuts, arrays * math.prod(made))


def largest_reach(
    settings: AugmentationSettings, size: Shape, spacing_mm: Spacing, planes: int
) -> Shape:
    """Return the size along X, Y, Z of the largest box that planes of a patch are made from.

    Whatever the rotation of a box, its corners stay in the ball around it.
    """
    made = (planes, *size[1:])
    if not settings.enabled:
        return made
    turning, scaling = free_axes(size, spacing_mm)
    half_mm = [(voxels - 1) / 2 * mm for voxels, mm in zip(made, spacing_mm, strict=True)]
    radius_mm = math.hypot(*(mm for mm, turned in zip(half_mm, turning, strict=True) if turned))
    x, y, z = (
        2 * math.ceil((radius_mm if turns else mm) / spacing * SCALING_RANGE[1] ** scales) + 2
        for mm, spacing, turns, scales in zip(half_mm, spacing_mm, turning, scaling, strict=True)
    )
    return (x, y, z)
