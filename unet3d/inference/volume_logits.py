"""The logits of a prepared image: of one network, or the mean of several."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from unet3d.config import InferenceSettings, Shape
from unet3d.distributed.group import Group
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.inference.averaging import adds_up_together, mean_slabs
from unet3d.inference.image_slab import ImageSlab, Planes, SharedPlanes
from unet3d.inference.networks import Networks
from unet3d.inference.placing import Placed, TrainedNetwork, window_network
from unet3d.inference.sliding_window import WindowsDone, logit_slabs
from unet3d.inference.window_memory import bytes_of_voxel, refuse_beyond_host, slab_device
from unet3d.inference.windows import Window, Windows, longest_axis, window_of
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

CERTAIN_LOGIT = 15.0
"""A sigmoid of it is 1 to six digits, and it is a finite number in every type."""


Result = TypeVar("Result")


class AgreedError(VolumeError):
    """An image cannot be segmented, which all ranks know before the first window of it."""


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
        self._sizes: list[Window] = [
            window_of(network, one)
            for network, one in zip(networks.described, settings, strict=True)
        ]
        self._adds_up_together = adds_up_together(networks.described, settings, self._sizes)
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
        size = self._sizes[self._placed.index]
        if size == "whole" or not self._placed.is_replayable:
            return
        network = self._networks.described[self._placed.index]
        enough = 4 * max(size)  # of them there are as many as at any time
        windows = self._windows(self._placed.index, (enough, enough, enough))
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

    @property
    def window(self) -> Window:
        """The size of the first network's windows."""
        return self._sizes[0]

    @property
    def takes_turns(self) -> bool:
        """Whether several networks ask for the planes of an image, each for itself."""
        return not self._adds_up_together

    def takes_fewer(self) -> bool:
        """Return whether windows that did not fit are computed one at a time from now on.

        Ranks try nothing else, because those where there was room wait for a message.
        """
        index = self._placed.index
        num = self._num_at_a_time[index]
        is_open = self._settings[index].batch_size == "auto" and self._most_at_a_time is None
        if self._placed.is_shared or not is_open or num == 1:
            return False
        self._most_at_a_time = 1
        logger.info("%d windows at a time do not fit; trying one", num)
        return True

    def slabs(self, image: Planes | SharedPlanes, windows_done: WindowsDone) -> Iterator[Tensor]:
        """Yield logits (K, X, Y, Z), slab after slab along the longest axis of a prepared image.

        Of several networks it is their mean, and their windows count together. Its planes are asked
        for in their order. For errors, see :func:`logit_slabs`.
        """
        indices = range(len(self._networks))
        if self._adds_up_together:
            return self._slabs_of(indices, image, windows_done)
        done = [0] * len(self._networks)
        total = sum(
            Windows.count(image.shape, network.topology, size, one.overlap)
            for network, size, one in zip(
                self._networks.described, self._sizes, self._settings, strict=True
            )
        )

        def counted(index: int) -> WindowsDone:
            def windows_of_one(number: int, _: int) -> None:
                done[index] = number
                if number or index == 0:  # a volume begins once
                    windows_done(sum(done), total)

            return windows_of_one

        return mean_slabs(
            [self._slabs_of([index], image, counted(index)) for index in indices],
            longest_axis(image.shape),
            self._settings[0].averaging,  # the others have the same
            of_regions=bool(self._networks.preprocessing.regions),
        )

    def _slabs_of(
        self, indices: Sequence[int], image: Planes | SharedPlanes, windows_done: WindowsDone
    ) -> Iterator[Tensor]:
        """Yield the logits of networks that have the same windows: the mean of several."""
        for index in indices:  # so that one that cannot be read ends it before the first window
            self._placed.use(index)
        first = indices[0]
        windows = self._windows(first, image.shape)
        for index in indices:
            self._num_at_a_time[index] = self._num_at_a_time[first]
        network = self._networks.described[first]
        predicting = [self._predicting[index] for index in indices]
        on_cpu = not any(device.type == "cuda" for device in predicting[0].devices)
        num_computing = self._group.ranks.local_world_size if on_cpu else 0
        self._agreed(
            lambda: refuse_beyond_host(network, windows.slab, windows.shape, num_computing)
        )
        device = slab_device(network, windows.slab, self.input_device)
        yield from logit_slabs(
            predicting,
            ImageSlab(image, windows, network.dtype, device),
            windows,
            network.topology.num_classes,
            windows_done,
            empty_logits(network.preprocessing) if self._skips_empty else None,
        )

    def _windows(self, index: int, shape: Shape) -> Windows:
        settings, network = self._settings[index], self._networks.described[index]
        batch_size: int | Literal["auto"] = settings.batch_size
        if batch_size == "auto":
            batch_size = self._most_at_a_time or "auto"
        is_in_training = isinstance(self._placed, TrainedNetwork)
        windows = self._agreed(
            lambda: Windows.of(
                shape,
                network.topology,
                self._sizes[index],
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
        )
        # The rank with the least memory decides.
        self._num_at_a_time[index] = num = min(self._group.exchange(windows.batch_size))
        return replace(windows, batch_size=num * self._num_replicas)

    def _agreed(self, make: Callable[[], Result]) -> Result:
        """Return what this rank makes; where one of several cannot, all raise AgreedError."""
        if self._group.size == 1:
            return make()
        made, fault = [], None
        try:
            made.append(make())
        except (VolumeError, DoesNotFitError) as error:
            fault = str(error)
        faults = [one for one in self._group.exchange(fault) if one is not None]
        if faults:
            raise AgreedError(faults[0])
        return made[0]


def empty_logits(preprocessing: Preprocessing) -> list[float]:
    """Return logits of voxels that nobody looked at: of the background, or of no region."""
    logits = [-CERTAIN_LOGIT] * preprocessing.num_outputs
    if not preprocessing.regions:
        logits[0] = CERTAIN_LOGIT
    return logits
