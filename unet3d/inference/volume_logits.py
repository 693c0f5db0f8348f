"""The logits of a prepared image: of one network, or the mean of several."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from unet3d.config import InferenceSettings, Shape
from unet3d.distributed.group import Group
from unet3d.errors import DoesNotFitError
from unet3d.images.files import times
from unet3d.inference.averaging import adds_up_together, mean_slabs
from unet3d.inference.image_slab import ImageSlab, Planes, SharedPlanes
from unet3d.inference.networks import Networks
from unet3d.inference.placing import Placed, TrainedNetwork, window_network
from unet3d.inference.sliding_window import WindowsDone, logit_slabs
from unet3d.inference.window_memory import bytes_of_voxel, refuse_beyond_host, slab_device
from unet3d.inference.windows import Window, Windows, longest_axis
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

CERTAIN_LOGIT = 15.0
"""A sigmoid of it is 1 to six digits, and it is a finite number in every type."""


class VolumeLogits:
    """Computes the windows of an image with each network, and averages where there are several."""

    def __init__(
        self,
        networks: Networks,
        settings: Sequence[InferenceSettings],
        placed: Placed,
        group: Group,
        *,
        skips_empty: bool = False,
    ) -> None:
        """Take networks that are placed, one at a time, with the windows of each.

        All ranks of the group compute the same image together.
        """
        self._networks = networks
        self._settings = settings
        self._placed = placed
        self._group = group
        self._skips_empty = skips_empty
        self._most_at_a_time: int | None = None
        """Windows of a replica, where that is less than would be fastest, for lack of memory."""
        self._num_at_a_time = [1] * len(networks)
        """Windows of a replica of each network."""
        self._num_replicas = len(placed.executors)
        self._predicting = [
            window_network(placed, index, network.mirrored_axes(one))
            for index, (network, one) in enumerate(zip(networks.described, settings, strict=True))
        ]
        self.input_device = self._predicting[0].input_device

    def warm_up(self) -> None:
        """Compute windows of nothing, so that a GPU's kernels are there when a scan is.

        Not where their size depends on the scan, and nothing is said of memory that is too small.
        """
        size = self._size(self._placed.index)
        if size is None or size == "whole" or not self._placed.is_replayable:
            return
        network = self._networks.described[self._placed.index]
        enough = 4 * max(size)  # of them there are as many as at any time
        windows = self._windows(self._placed.index, (enough, enough, enough), size)
        shape = (windows.batch_size, network.topology.in_channels, *windows.shape)
        with suppress(torch.OutOfMemoryError, DoesNotFitError):
            nothing = torch.zeros(shape, dtype=network.dtype, device=self.input_device)
            self._predicting[self._placed.index].predict(nothing)

    def log_mirroring(self) -> None:
        """Say how many forward passes a window takes, where mirror images are asked for."""
        described = zip(self._networks.described, self._settings, strict=True)
        letters = "XYZ" if self._networks.preprocessing.orientation == "ras" else "IJK"
        for axes in dict.fromkeys(network.mirror_axes for network, one in described if one.tta):
            if axes:
                words = ", ".join(letters[axis] for axis in axes)
                logger.info(
                    "each window is predicted %d times, mirrored along %s", 2 ** len(axes), words
                )
            else:
                logger.warning("no mirror images: training had none, so --tta changes nothing")

    def sizes(self, shape: Shape) -> list[Window]:
        """Return the windows' size for each network on an image of a shape; begin with these."""
        return [self._size(index) or shape for index in range(len(self._networks))]

    def takes_turns(self, shape: Shape) -> bool:
        """Return whether several networks ask for the planes of an image, each for itself."""
        return not self._adds_up_together(self.sizes(shape))

    def smaller(self, sizes: Sequence[Window]) -> list[Window] | None:
        """Return what to try next, after windows did not fit; None: nothing.

        First they are computed one at a time. A network that was trained on whole volumes takes
        smaller and smaller windows then, where the settings leave their size open. Ranks try
        nothing else, because those where there was room wait for a message.
        """
        index = self._placed.index
        window = sizes[index]
        if self._placed.is_shared:
            return None
        if self._most_at_a_time is None and self._settings[index].batch_size == "auto":
            self._most_at_a_time = 1
            num = self._num_at_a_time[index]
            if num > 1:
                logger.info("%d windows at a time do not fit; trying one", num)
                return list(sizes)
        if self._size(index) is not None or window == "whole":
            return None
        longest = longest_axis(window)
        stride = self._networks.described[index].topology.total_stride[longest]
        if window[longest] <= 4 * stride:
            return None
        halved = [(n + 1) // 2 if axis == longest else n for axis, n in enumerate(window)]
        logger.warning("the volume does not fit; trying windows of %s", times(halved))
        x, y, z = halved
        return [*sizes[:index], (x, y, z), *sizes[index + 1 :]]

    def slabs(
        self, image: Planes | SharedPlanes, sizes: Sequence[Window], windows_done: WindowsDone
    ) -> Iterator[Tensor]:
        """Yield logits (K, X, Y, Z), slab after slab along the longest axis of a prepared image.

        Of several networks it is their mean, and their windows count together. Its planes are asked
        for in their order. For errors, see :func:`logit_slabs`.
        """
        indices = range(len(sizes))
        if self._adds_up_together(sizes):
            return self._slabs_of(indices, image, sizes[0], windows_done)
        done = [0] * len(sizes)
        total = sum(
            Windows.count(image.shape, network.topology, size, one.overlap)
            for network, size, one in zip(
                self._networks.described, sizes, self._settings, strict=True
            )
        )

        def counted(index: int) -> WindowsDone:
            def windows_of_one(number: int, _: int) -> None:
                done[index] = number
                if number or index == 0:  # a volume begins once
                    windows_done(sum(done), total)

            return windows_of_one

        return mean_slabs(
            [self._slabs_of([index], image, sizes[index], counted(index)) for index in indices],
            longest_axis(image.shape),
            self._settings[0].averaging,  # the others have the same
            of_regions=bool(self._networks.preprocessing.regions),
        )

    def _slabs_of(
        self,
        indices: Sequence[int],
        image: Planes | SharedPlanes,
        size: Window,
        windows_done: WindowsDone,
    ) -> Iterator[Tensor]:
        """Yield the logits of networks that have the same windows: the mean of several."""
        for index in indices:  # so that one that cannot be read ends it before the first window
            self._placed.use(index)
        first = indices[0]
        windows = self._windows(first, image.shape, size)
        for index in indices:
            self._num_at_a_time[index] = self._num_at_a_time[first]
        network = self._networks.described[first]
        predicting = [self._predicting[index] for index in indices]
        on_cpu = not any(device.type == "cuda" for device in predicting[0].devices)
        num_computing = self._group.ranks.local_world_size if on_cpu else 0
        refuse_beyond_host(network, windows.slab, windows.shape, num_computing)
        device = slab_device(network, windows.slab, self.input_device)
        yield from logit_slabs(
            predicting,
            ImageSlab(image, windows, network.dtype, device),
            windows,
            network.topology.num_classes,
            windows_done,
            empty_logits(network.preprocessing) if self._skips_empty else None,
        )

    def _adds_up_together(self, sizes: Sequence[Window]) -> bool:
        return adds_up_together(self._networks.described, self._settings, sizes)

    def _windows(self, index: int, shape: Shape, size: Window) -> Windows:
        settings, network = self._settings[index], self._networks.described[index]
        batch_size: int | Literal["auto"] = settings.batch_size
        if batch_size == "auto":
            # Several would need what has just turned out not to be there.
            batch_size = 1 if self._size(index) is None else self._most_at_a_time or "auto"
        is_in_training = isinstance(self._placed, TrainedNetwork)
        windows = Windows.of(
            shape,
            network.topology,
            size,
            settings.overlap,
            batch_size,
            self._predicting[index].devices,
            # The shards of a training know of no other's memory.
            None
            if is_in_training
            else bytes_of_voxel(
                network.topology,
                network.dtype,
                self._num_replicas,
                is_mirrored=bool(network.mirrored_axes(settings)),
            ),
        )
        # The rank with the least memory decides.
        self._num_at_a_time[index] = num = min(self._group.exchange(windows.batch_size))
        return replace(windows, batch_size=num * self._num_replicas)

    def _size(self, index: int) -> Window | None:
        """Return the size of a network's windows; None: the whole volume, or what of it fits."""
        window = self._settings[index].window
        return self._networks.described[index].patch_size if window == "auto" else window


def empty_logits(preprocessing: Preprocessing) -> list[float]:
    """Return logits of voxels that nobody looked at: of the background, or of no region."""
    logits = [-CERTAIN_LOGIT] * preprocessing.num_outputs
    if not preprocessing.regions:
        logits[0] = CERTAIN_LOGIT
    return logits
