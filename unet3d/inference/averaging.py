"""The mean of several networks, of their probabilities or of their logits, slab after slab."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from unet3d.config import InferenceSettings
from unet3d.inference.windows import Window
from unet3d.runs.checkpoint import Checkpoint

Averaging: TypeAlias = Literal["probabilities", "logits"]
"""What of several networks is averaged."""

PIECE_NUMBERS = 2**22
"""Numbers whose exponentials are in memory at a time, beside the logits that they replace."""


def mean_of(slabs: Sequence[Tensor], averaging: Averaging, *, of_regions: bool) -> Tensor:
    """Return the mean of what networks say of each class, as logits (K, X, Y, Z).

    Every network counts the same, and each voxel is given to the class of the largest mean. Of
    probabilities, as in nnU-Net's ensembles (arXiv 1904.08128), it is returned as its logarithm:
    that is what the softmax of logits gives back, so it is resampled and compared as logits are,
    and several copies of a network segment as one of them does. The probabilities of regions, which
    overlap, are averaged each for itself, and returned as their logit. The mean of logits, as of
    nnU-Net's folds, is what it is. The memory of the slabs, on any devices, is taken over.
    """
    total, *others = slabs
    for logits in slabs:
        if averaging == "probabilities" and of_regions:
            logits.sigmoid_()
        elif averaging == "probabilities":
            _to_probabilities(logits)
    for logits in others:
        if logits.device.type == "cpu":  # where the device has too little memory for all of them
            total = total.cpu()
        dtype = torch.promote_types(total.dtype, logits.dtype)
        total = total.to(dtype).add_(logits.to(total.device))
    mean = total.div_(len(slabs))
    if averaging == "logits":
        return mean
    # A probability that has become 0, or 1 of a region, has none that could be resampled.
    number = torch.finfo(mean.dtype)
    if of_regions:
        return mean.clamp_(number.tiny, 1 - number.eps).logit_()
    return mean.clamp_min_(number.tiny).log_()


def adds_up_together(
    networks: Sequence[Checkpoint], settings: Sequence[InferenceSettings], sizes: Sequence[Window]
) -> bool:
    """Return whether the logits of networks can be added up as those of one: window by window.

    So it is where the mean is that of logits, and all networks have the same windows.
    """
    if len(networks) == 1:
        return True
    windows = [
        (network.topology, network.dtype, network.mirrored_axes(one))
        + (size, one.overlap, one.batch_size)
        for network, one, size in zip(networks, settings, sizes, strict=True)
    ]
    return settings[0].averaging == "logits" and all(one == windows[0] for one in windows)


def mean_slabs(
    networks: Sequence[Iterator[Tensor]], axis: int, averaging: Averaging, *, of_regions: bool
) -> Iterator[Tensor]:
    """Yield the mean of networks, as far as all of them have come."""
    dim = 1 + axis
    waiting: list[Tensor | None] = [None] * len(networks)
    while True:
        slabs = [
            slab if slab is not None else next(network, None)
            for slab, network in zip(waiting, networks, strict=True)
        ]
        known = [slab for slab in slabs if slab is not None]
        if not known:  # all of them cover the same volume
            return
        num_planes = min(slab.shape[dim] for slab in known)
        complete = [slab.narrow(dim, 0, num_planes) for slab in known]
        left = [slab.narrow(dim, num_planes, slab.shape[dim] - num_planes) for slab in known]
        waiting = [slab if slab.shape[dim] else None for slab in left]
        yield mean_of(complete, averaging, of_regions=of_regions)


def _to_probabilities(logits: Tensor) -> None:
    """Replace logits by their softmax, some planes at a time."""
    numbers_of_plane = max(1, math.prod(logits.shape) // logits.shape[1])
    num_planes = max(1, PIECE_NUMBERS // numbers_of_plane)
    for planes in torch.split(logits, num_planes, dim=1):
        planes.copy_(planes.softmax(0))
