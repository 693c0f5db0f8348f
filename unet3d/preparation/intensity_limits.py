"""What the intensities of a normalised image, or of each of its slices, stay within."""

from collections.abc import Sequence

import numpy as np
import torch

from unet3d.images.image_voxels import ImageVoxels, Mask
from unet3d.preparation.normalization import ChannelScaling, extremes
from unet3d.preparation.plane_resampling import Limits


def limits_of(
    image: ImageVoxels,
    scalings: Sequence[ChannelScaling],
    inside: Mask | None,
    slice_axis: int | None,
) -> Limits:
    """Look at all intensities, some planes at a time.

    Args:
        image: The image.
        scalings: How each channel is normalised.
        inside: The voxels that are inside, shape (X, Y, Z); None: all.
        slice_axis: Of X, Y, Z, counted from 0, the one along which slices follow each other; None:
            one range for all voxels.
    """
    ranges = []
    for channel, scaling in enumerate(scalings):
        counted = inside if scaling.masks else None
        if slice_axis is None:
            found = np.array(extremes(image, channel, counted), np.float32)[:, None]
        else:
            found = np.stack(image.plane_extremes(channel, slice_axis, counted))
        normal = scaling.apply(found.astype(np.float32))
        if counted is not None:
            others = tuple(axis for axis in range(3) if axis != slice_axis)
            is_masked = ~counted.all(axis=others)
            normal[0] = np.where(is_masked, np.minimum(normal[0], 0), normal[0])
            normal[1] = np.where(is_masked, np.maximum(normal[1], 0), normal[1])
        ranges.append(normal)
    shape = [1, 1, 1] if slice_axis is None else [-1 if a == slice_axis else 1 for a in range(3)]
    lowest, highest = (
        torch.from_numpy(np.stack(one)).reshape(len(ranges), *shape)
        for one in zip(*ranges, strict=True)
    )
    return Limits(lowest=lowest, highest=highest, slice_axis=slice_axis)
