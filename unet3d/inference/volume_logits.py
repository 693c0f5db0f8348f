"""The logits of a prepared image: of one network, or the mean of several."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.distributed.group import Group
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.images.image import Box
from unet3d.inference.image_slab import ImageSlab, Planes
from unet3d.inference.networks import Networks
from unet3d.inference.placing import Placed, TrainedNetwork
from unet3d.inference.sliding_window import WindowsDone, logit_slabs
from unet3d.inference.windows import (
    GPU_SHARE,
    Windows,
    bytes_of_image,
    bytes_of_voxel,
    longest_axis,
    refuse_beyond_host,
    window_of,
    with_room,
)
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

CERTAIN_LOGIT = 15.0
"""Logit of a certain class: its sigmoid is 1 to six digits, and every number type can hold it."""

PIECE_NUMBERS = 2**22
"""Most logits whose softmax is in memory at once before it replaces them."""


class AgreedError(VolumeError):
    """An image cannot be segmented; all ranks raise this before its first window."""


class VolumeLogits:
    """Computes the windows of an image with each network, and averages an ensemble's logits."""

    def __init__(
        self, networks: Networks, placed: Placed, group: Group, *, skips_empty: bool = False
    ) -> None:
        """Take placed networks; all ranks of the group compute the same image together."""
        self._networks = networks
        self._placed = placed
        self._group = group
        self._skips_empty = skips_empty
        self._takes_one = False
        """Whether each replica computes one window at a time, for lack of memory."""
        self._most_at_a_time = 1
        """Most windows in one forward pass of a replica, over all networks."""
        self._num_replicas = len(placed.executors)
        self._predicting = [
            placed.window_network(index, network.mirrored_axes)
            for index, network in enumerate(networks.described)
        ]
        self.input_device = self._predicting[0].input_device

    def warm_up(self) -> None:
        """Compute windows of zeros, so that the kernels of a GPU are ready before the first scan.

        A no-op if the size of windows depends on the scan, or no CUDA graphs can be used. Lack of
        memory is ignored.
        """
        index = self._placed.index
        network = self._networks.described[index]
        size = window_of(network)
        if size == "whole" or not self._placed.is_replayable:
            return
        enough = 4 * max(size)  # a volume with enough windows for the largest batch
        # A smaller scan may fit where this volume does not.
        with suppress(torch.OutOfMemoryError, DoesNotFitError, VolumeError):
            windows = self._windows(index, (enough, enough, enough))
            shape = (windows.batch_size, network.topology.in_channels, *windows.shape)
            nothing = torch.zeros(shape, dtype=network.dtype, device=self.input_device)
            self._predicting[index].predict(nothing)

    def takes_fewer(self) -> bool:
        """Return whether to retry with one window per forward pass, after windows did not fit.

        One of several ranks never retries, because the other ranks already wait for its message.
        """
        settings = self._networks.described[self._placed.index].config.inference
        if self._placed.is_shared or settings.batch_size != "auto" or self._most_at_a_time == 1:
            return False
        self._takes_one = True
        logger.info("%d windows per forward pass do not fit; trying one", self._most_at_a_time)
        return True

    def slabs(
        self, image: Planes, windows_done: WindowsDone, block: Box | None = None
    ) -> Iterator[Tensor]:
        """Yield logits (K, X, Y, Z), slab after slab along the longest axis of a prepared image.

        Logits of several networks are averaged, and ``windows_done`` counts all their windows.
        Planes of the image are requested in order. With a block, only the windows that reach into
        it are computed, and only its logits are returned. The first planes are prepared at once,
        in a thread. For errors, see :func:`logit_slabs`.
        """
        indices = range(len(self._networks))
        rounds = [list(indices)] if self._networks.add_up else [[index] for index in indices]
        windows = [self._windows(first, image.shape, block) for first, *_ in rounds]
        self._most_at_a_time = max(one.batch_size for one in windows) // self._num_replicas
        done = [0] * len(rounds)
        total = sum(len(one.starts) * len(some) for one, some in zip(windows, rounds, strict=True))

        def slabs_of(number: int) -> Iterator[Tensor]:
            def counted(windows_of_round: int, _: int) -> None:
                done[number] = windows_of_round
                if windows_of_round or number == 0:  # only the first round reports the start
                    windows_done(sum(done), total)

            some, cut = windows[number], image
            if block is not None and image.within is not None:
                cut = image.within(some.part)
            network = self._networks.described[rounds[number][0]]
            needed = bytes_of_image(network, some.slab)
            device = with_room(self.input_device, needed, GPU_SHARE)
            slab = ImageSlab(cut, some, network.dtype, device)
            slabs = self._slabs_of(rounds[number], some, slab, counted)
            return slabs if block is None else cropped(slabs, some, block)

        first = self._networks.described[0]
        return mean_slabs(
            [slabs_of(number) for number in range(len(rounds))],
            longest_axis(image.shape),
            first.config.inference.averaging,  # the same for all networks
            of_regions=bool(first.preprocessing.regions),
        )

    def _slabs_of(
        self, indices: Sequence[int], windows: Windows, image: ImageSlab, windows_done: WindowsDone
    ) -> Iterator[Tensor]:
        """Yield the mean logits of networks that have the same windows."""
        for index in indices:  # so that an unreadable one raises its error before the first window
            self._placed.use(index)
        network = self._networks.described[indices[0]]
        yield from logit_slabs(
            [self._predicting[index] for index in indices],
            image,
            windows,
            network.topology.num_classes,
            windows_done,
            empty_logits(network.preprocessing) if self._skips_empty else None,
        )

    def _windows(self, index: int, shape: Shape, block: Box | None = None) -> Windows:
        """Return the windows of a network, on which all ranks agree, or raise AgreedError."""
        network, devices = self._networks.described[index], self._predicting[index].devices
        settings, ranks = network.config.inference, self._group.ranks
        at_a_time: int | Literal["auto"] = settings.batch_size
        if at_a_time == "auto" and self._takes_one:
            at_a_time = 1
        # In training, shards do not know each other's free memory.
        is_in_training = isinstance(self._placed, TrainedNetwork)
        voxel_bytes = None if is_in_training else bytes_of_voxel(network, self._num_replicas)
        on_cpu = not any(device.type == "cuda" for device in devices)
        windows, fault = None, None
        try:
            size, overlap = window_of(network), settings.overlap
            windows = Windows.of(
                *(shape, network.topology, size, overlap, at_a_time, devices, voxel_bytes),
                block=block,
            )
            windows = replace(windows, batch_size=windows.batch_size * self._num_replicas)
            refuse_beyond_host(network, windows, ranks.local_world_size if on_cpu else 0)
        except (VolumeError, DoesNotFitError) as error:
            if self._group.size == 1:
                raise
            fault = str(error)
        answers = self._group.exchange([fault, windows and windows.batch_size])
        faults = [fault for fault, _ in answers if fault is not None]
        if windows is None or faults:
            raise AgreedError(faults[0])
        # The rank with the least memory decides.
        return replace(windows, batch_size=min(batch_size for _, batch_size in answers))


def empty_logits(preprocessing: Preprocessing) -> list[float]:
    """Return the logits of skipped voxels: background, or no region."""
    logits = [-CERTAIN_LOGIT] * preprocessing.num_outputs
    if not preprocessing.regions:
        logits[0] = CERTAIN_LOGIT
    return logits


def cropped(slabs: Iterator[Tensor], windows: Windows, block: Box) -> Iterator[Tensor]:
    """Yield the logits of a block from those of the part of the volume that its windows cover."""
    axis, done = windows.axis, windows.part[windows.axis].start
    others = [
        slice(None) if one == axis else slice(inner.start - part.start, inner.stop - part.start)
        for one, (inner, part) in enumerate(zip(block, windows.part, strict=True))
    ]
    for slab in slabs:
        begin, done = done, done + slab.shape[1 + axis]
        first, end = (
            min(max(end - begin, 0), done - begin) for end in (block[axis].start, block[axis].stop)
        )
        if first < end:
            others[axis] = slice(first, end)
            yield slab[(slice(None), *others)]


def mean_slabs(
    networks: Sequence[Iterator[Tensor]], axis: int, averaging: str, *, of_regions: bool
) -> Iterator[Tensor]:
    """Yield the mean over networks of the planes that all have computed so far.

    The slabs of a single network are yielded unchanged.
    """
    if len(networks) == 1:
        yield from networks[0]
        return
    dim = 1 + axis
    waiting: list[Tensor | None] = [None] * len(networks)
    while True:
        slabs = [
            slab if slab is not None else next(network, None)
            for slab, network in zip(waiting, networks, strict=True)
        ]
        known = [slab for slab in slabs if slab is not None]
        if not known:  # all end together, because they cover the same volume
            return
        num_planes = min(slab.shape[dim] for slab in known)
        complete = [slab.narrow(dim, 0, num_planes) for slab in known]
        left = [slab.narrow(dim, num_planes, slab.shape[dim] - num_planes) for slab in known]
        waiting = [slab if slab.shape[dim] else None for slab in left]
        yield mean_of(complete, averaging, of_regions=of_regions)


def mean_of(slabs: Sequence[Tensor], averaging: str, *, of_regions: bool) -> Tensor:
    """Return the mean prediction of networks for each class, as logits (K, X, Y, Z).

    Every network has the same weight. The mean of probabilities, as in nnU-Net's ensembles (arXiv
    1904.08128), is returned as its logarithm, and the softmax of the logarithm is the mean again.
    So the result can be resampled and compared like logits, and several copies of a network segment
    like one of them. Probabilities of regions, which overlap, are averaged separately, and returned
    as the logits of their mean. The mean of logits, as of nnU-Net's folds, is returned unchanged.
    The slabs, on any devices, are overwritten.
    """
    total, *others = slabs
    for logits in slabs:
        if averaging == "probabilities" and of_regions:
            logits.sigmoid_()
        elif averaging == "probabilities":
            _to_probabilities(logits)
    for logits in others:
        if logits.device.type == "cpu":  # if the device has too little memory for all of them
            total = total.cpu()
        dtype = torch.promote_types(total.dtype, logits.dtype)
        total = total.to(dtype).add_(logits.to(total.device))
    mean = total.div_(len(slabs))
    if averaging == "logits":
        return mean
    # A probability of 0 has no finite logarithm, and a region's of 0 or 1 no finite logit.
    number = torch.finfo(mean.dtype)
    if of_regions:
        return mean.clamp_(number.tiny, 1 - number.eps).logit_()
    return mean.clamp_min_(number.tiny).log_()


def _to_probabilities(logits: Tensor) -> None:
    """Replace logits by their softmax, some planes at a time."""
    numbers_of_plane = max(1, math.prod(logits.shape) // logits.shape[1])
    num_planes = max(1, PIECE_NUMBERS // numbers_of_plane)
    for planes in torch.split(logits, num_planes, dim=1):
        planes.copy_(planes.softmax(0))
