"""The logits of a volume from all windows, in memory, in float64."""

import torch

from unet3d.inference.windows import gaussian_weight
from unet3d.model import Topology

STRIDES = ((1, 1, 1), (2, 2, 1), (2, 2, 2))  # strides are 4, 4, 2 in all
TOPOLOGY = Topology(in_channels=2, num_classes=2, channels=(4, 4, 4), strides=STRIDES)


def is_empty(window):
    """Return whether each channel has one constant value."""
    return all(len(channel.unique()) == 1 for channel in window)


def blended(predict, image, windows, empty_logits=None):
    """Return the weighted mean of the windows' logits for each voxel; shape (K, X, Y, Z).

    If logits of empty voxels are given, empty windows are skipped, and voxels in no other window
    get these logits.
    """
    padded = torch.zeros(len(image), *windows.size, dtype=image.dtype)
    padded[(slice(None), *windows.inside)] = image
    weight = gaussian_weight(windows.shape).double()
    weights = torch.zeros(windows.size, dtype=torch.float64)
    total = torch.zeros(1, dtype=torch.float64)
    for start in windows.starts:
        place = (slice(None), *windows.place(start))
        if empty_logits is not None and is_empty(padded[place]):
            continue
        logits = predict(padded[place][None])[0].double()
        if total.dim() == 1:
            total = torch.zeros(len(logits), *windows.size, dtype=torch.float64)
        total[place] += weight * logits
        weights[place[1:]] += weight
    means = total / weights
    if empty_logits is not None:
        empty = torch.tensor(empty_logits, dtype=torch.float64)[:, None, None, None]
        means = torch.where(weights > 0, means, empty)
    return means[(slice(None), *windows.inside)]
