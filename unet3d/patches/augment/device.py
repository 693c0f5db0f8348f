"""Augmentation on a GPU: whether it is made there, and what it takes."""

import math
from dataclasses import dataclass

import torch

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.patches.augment.draw import SCALING_RANGE, free_axes, largest_angle
from unet3d.patches.augment.filters import farthest_reach
from unet3d.patches.augment.recipe import number_together

WORK_ARRAYS = 2
"""Channels in float32 that a filter keeps beside the one that it changes; one more where several
are changed at a time, which are taken out of the others."""


@dataclass(frozen=True, kw_only=True)
class DeviceAugmentation:
    """Augmentation on the device that the network begins on, as far as its memory goes."""

    settings: AugmentationSettings
    """What can be drawn."""
    cases: tuple[tuple[Shape, Spacing], ...]
    """Shape and spacing of the cases that patches are cut from."""
    num_channels: int
    voxel_bytes: int
    """What one voxel of a channel takes in a cut."""
    label_bytes: int
    """What one voxel of the labels takes."""

    @staticmethod
    def on(
        device: torch.device,
        settings: AugmentationSettings,
        cases: tuple[tuple[Shape, Spacing], ...],
        voxel_bytes: int,
        num_channels: int,
        num_classes: int,
    ) -> "DeviceAugmentation | None":
        """Return what makes batches on a device; None where they are made on the host."""
        if device.type != "cuda":
            return None
        return DeviceAugmentation(
            settings=settings,
            cases=cases,
            num_channels=num_channels,
            voxel_bytes=voxel_bytes,
            label_bytes=1 if num_classes <= 256 else 8,
        )

    @property
    def multiplies(self) -> bool:
        """Whether matrices are multiplied, for which cuBLAS keeps memory for the stream."""
        settings = self.settings
        filters = (settings.blur_probability, settings.low_resolution_probability)
        return settings.enabled and max(filters) > 0

    def staging_bytes(
        self, size: Shape, num_patches: int, slab: range | None = None, *, gathers: bool = True
    ) -> int:
        """Return what making patches of a size, or slabs of them, takes at most, beside these.

        The boxes that they are cut from are freed before filters take memory of their own. Where
        the slabs do not gather statistics of the patch, it is made whole if it needs them.
        """
        made = size if slab is None else (self._made_planes(size[0], slab, gathers), *size[1:])
        largest = max(
            math.prod(
                min(reached, available)
                for reached, available in zip(
                    largest_reach(self.settings, size, spacing_mm, made[0]), shape, strict=True
                )
            )
            for shape, spacing_mm in self.cases
        )
        most = number_together(size)
        together = min(num_patches, most) if slab is None else 1
        cuts = together * largest * (self.num_channels * self.voxel_bytes + self.label_bytes)
        changed = min(together * self.num_channels, most) if self.settings.enabled else 0
        arrays = changed * (WORK_ARRAYS + (changed > 1)) * FLOAT32_BYTES
        in_place = slab is None or made[0] == len(slab)
        around = 0 if in_place else self.num_channels * FLOAT32_BYTES + self.label_bytes
        return around * math.prod(made) + max(cuts, arrays * math.prod(made))

    def _made_planes(self, planes: int, slab: range, gathers: bool) -> int:
        """Return how many planes of a patch are made at most where a slab is wanted."""
        settings = self.settings
        if not settings.enabled:
            return len(slab)
        is_measured = (
            settings.contrast_probability,
            settings.gamma_probability,
            settings.inverted_gamma_probability,
        )
        if not gathers and max(is_measured) > 0:
            return planes
        reach = farthest_reach(
            planes, settings.blur_probability > 0, settings.low_resolution_probability > 0
        )
        return min(planes, slab.stop + reach) - max(0, slab.start - reach)


def largest_reach(
    settings: AugmentationSettings, size: Shape, spacing_mm: Spacing, planes: int
) -> Shape:
    """Return the voxels along X, Y, Z of the largest box that planes of a patch are made from.

    However a box is turned, no corner leaves the ball around it.
    """
    made = (planes, *size[1:])
    if not settings.enabled:
        return made
    turning, scaling = free_axes(size, spacing_mm)
    turns = settings.rotation_probability > 0 and largest_angle(settings, turning) > 0
    scale = SCALING_RANGE[1] if settings.scaling_probability > 0 else 1.0
    half_mm = [(voxels - 1) / 2 * mm for voxels, mm in zip(made, spacing_mm, strict=True)]
    radius_mm = math.hypot(*(mm for mm, turned in zip(half_mm, turning, strict=True) if turned))
    reach = []
    for axis in range(3):
        is_turned = turns and turning[axis]
        mm = radius_mm if is_turned else half_mm[axis]
        grown = mm / spacing_mm[axis] * (scale if scaling[axis] else 1.0)
        reach.append(2 * math.ceil(grown) + 2 if is_turned or scale > 1 else made[axis])
    return (reach[0], reach[1], reach[2])
