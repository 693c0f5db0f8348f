"""Augmentation: drawn on the host, from the patch's own generator; applied on any device."""

from unet3d.patches.augment.apply import augment
from unet3d.patches.augment.cut import Cut, Slab
from unet3d.patches.augment.device import DeviceAugmentation, augments_on_device
from unet3d.patches.augment.draw import AugmentationDraw, DrawnChannel
from unet3d.patches.augment.intensity import Gather

__all__ = [
    "AugmentationDraw",
    "Cut",
    "DeviceAugmentation",
    "DrawnChannel",
    "Gather",
    "Slab",
    "augment",
    "augments_on_device",
]
