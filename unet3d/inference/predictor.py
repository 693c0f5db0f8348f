"""Prediction: from the image of a scan to its label values."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.inference.averaging import ProbabilityMean
from unet3d.inference.diagnosis import cause_of_non_finite, excess_of, refuse_diverged
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.postprocessing import common_rules, keep_largest, rules_in_words
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.sliding_window import (
    NonFiniteLogitsError,
    WindowsDone,
    computed_window,
    join_windows,
    predict_logits,
)
from unet3d.memory.host import shortage
from unet3d.parallel import Executor, image_dtype
from unet3d.runs.checkpoint import Checkpoint
from unet3d.volumes.cropping import Box
from unet3d.volumes.files import times
from unet3d.volumes.memory_limits import refuse_beyond_memory
from unet3d.volumes.nifti import Volume
from unet3d.volumes.transform import (
    Preprocessing,
    classes_of,
    kept_box,
    prepare_image,
    restore_logits,
)

logger = logging.getLogger(__name__)

MAPS_OF_FINEST_LEVEL = 3
"""The skip, what is upsampled to it, and the result of both."""

BFLOAT16_BYTES = 2


class Predictor:
    """A trained network, or several whose probabilities are averaged, that segments volumes."""

    def __init__(
        self,
        networks: Networks,
        parallel: ParallelSettings,
        inference: Sequence[InferenceSettings],
        group: Group | None = None,
        placed: TrainedNetwork | None = None,
    ) -> None:
        """Place the first network; of several ranks, one predicts and the others :meth:`follow`.

        Args:
            networks: Networks trained in any mode.
            parallel: Where to run; it need not be where they were trained.
            inference: Size and overlap of the windows of each network.
            group: The ranks that share each window; None: this process alone.
            placed: The only network as it is placed already; then ``parallel`` is not looked at,
                and ranks with other slabs of it :meth:`join` for each image.

        Raises:
            ConfigError: The mode needs ranks that are not there.
            DeviceError: A device does not exist, or has too little memory.
            CheckpointError: The parameters do not belong to the network, or nothing can be
                computed with them.
        """
        group = group or Group(Ranks())
        self._networks = networks
        self._settings = inference
        self._placed = placed or PlacedNetworks(networks, parallel, group)
        self._num_ranks_here = group.ranks.local_world_size
        refuse_diverged(self.executor.module, self._name)
        of_networks = [
            network.postprocessing if settings.postprocessing else ()
            for network, settings in zip(networks.described, inference, strict=True)
        ]
        self._rules = common_rules(of_networks)
        if self._rules and group.is_first:
            logger.info("post-processing: %s", rules_in_words(self._rules, self.label_names))
        elif any(of_networks) and group.is_first:
            logger.info("post-processing: none, because the networks have none in common")

    @property
    def executor(self) -> Executor | SharedExecutor:
        """What computes the network that is placed."""
        return self._placed.executor

    @property
    def preprocessing(self) -> Preprocessing:
        """How every network prepares an image."""
        return self._networks.preprocessing

    @property
    def _network(self) -> Checkpoint:
        """What is known of the network that is placed, without its weights."""
        return self._networks.described[self._placed.index]

    @property
    def _inference(self) -> InferenceSettings:
        """Size and overlap of its windows."""
        return self._settings[self._placed.index]

    @property
    def _name(self) -> str:
        """Words for it."""
        is_alone = len(self._networks) == 1
        return "the network" if is_alone else self._networks.names[self._placed.index]

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label value without the background."""
        names = zip(self.preprocessing.label_values, self.preprocessing.label_names, strict=True)
        return dict(list(names)[1:])

    def follow(self) -> None:
        """Take part in what the first rank segments, until it ends; all other ranks call it.

        Raises:
            RankError: Another rank died or hangs.
            Interrupted: This rank was asked to stop, or another one.
        """
        self._placed.follow()

    def end(self) -> None:
        """Let the ranks go that follow, after the last image; only the first rank calls it.

        Raises:
            RankError: One of them died.
        """
        self._placed.end()

    def segment(
        self, image: Volume, windows_done: WindowsDone = lambda done, total: None
    ) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of an image.

        Args:
            image: Shape (C, X, Y, Z), as read from a file.
            windows_done: Called before the first window and after each forward pass; each network
                counts the same.

        Returns:
            Shape (X, Y, Z), on the image's grid, after the post-processing of the network.

        Raises:
            CheckpointError: Another network than the first cannot be used.
            VolumeError: The image has other channels than the network was trained on, the host has
                too little memory for it, or the network's output for it is not finite.
            DoesNotFitError: A device has too little memory.
            RankError: Another rank died or hangs.
        """
        wanted = len(self.preprocessing.channels)
        if image.header.num_channels != wanted:
            raise VolumeError(
                f"{image.header.path} has {image.header.num_channels} channel(s) but the network "
                f"was trained on {wanted} ({', '.join(self.preprocessing.channel_names)})"
                f"{'; name the files of a scan case_0000, case_0001, ...' if wanted > 1 else ''}"
            )
        box = kept_box(image.array, self.preprocessing)
        tensor = self._prepared(image, box)
        x, y, z = tensor.shape[1:]
        self._refuse_beyond_memory(image, box.shape, (x, y, z))
        try:
            logits = self._logits_of_all(tensor, windows_done)
        except NonFiniteLogitsError as error:
            cause = cause_of_non_finite(
                self.executor.module, self._name, tensor, self._placed.precision
            )
            raise VolumeError(
                f"{image.header.path} cannot be segmented: {error}; {cause}"
            ) from error
        classes = self._classes(logits, box.shape).numpy()
        values = self.preprocessing.label_values
        smallest = np.min_scalar_type(max(values))
        labels: npt.NDArray[np.integer[Any]] = np.array(values, smallest)[classes]
        del logits, classes  # components take memory, too
        keep_largest(labels, self._rules)
        if box.shape == image.header.shape:
            return labels
        whole = np.full(image.header.shape, values[0], smallest)  # outside is background
        whole[box.slices] = labels
        return whole

    def join(self, image: Volume) -> None:
        """Compute with other ranks what :meth:`segment` returns in one of them; keep nothing.

        The windows' size must be known, because only the other rank could look for one that fits.

        Args:
            image: The same as there.

        Raises:
            VolumeError: As there.
            DoesNotFitError: A device has too little memory.
            RuntimeError: The settings leave the windows' size open.
        """
        settings = self._inference
        window = self._network.patch_size if settings.window == "auto" else settings.window
        if window is None:
            raise RuntimeError("ranks that join must know the windows' size")
        join_windows(
            self.executor,
            self._prepared(image, kept_box(image.array, self.preprocessing)),
            self._network.topology,
            window,
            settings.overlap,
            settings.batch_size,
        )

    def _prepared(self, image: Volume, box: Box) -> torch.Tensor:
        array, spacing_mm = image.array[:, *box.slices], image.header.spacing_mm
        try:
            prepared = prepare_image(array, spacing_mm, self.preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{image.header.path}: {error}") from error
        tensor = torch.from_numpy(np.ascontiguousarray(prepared))
        excess = excess_of(tensor)
        if excess is not None:
            raise VolumeError(
                f"{image.header.path} cannot be segmented: {excess}; look for voxels that are far "
                "from all others"
            )
        return tensor

    def _refuse_beyond_memory(self, image: Volume, shape: Shape, grid: Shape) -> None:
        """Refuse logits that the host cannot hold; devices refuse for themselves."""
        if self.executor.output_device.type == "cuda":
            return
        num_classes = self._network.topology.num_classes
        on_grid, on_own = (num_classes * math.prod(voxels) for voxels in (grid, shape))
        beside = on_grid if len(self._networks) > 1 else 0  # the mean of the networks before
        if grid != shape:  # the mean, or the only logits, on the scan's own grid
            beside = max(beside, on_own)
        itemsize = max(network.dtype.itemsize for network in self._networks.described)
        refuse_beyond_memory(
            itemsize * (on_grid + beside),
            f"{image.header.path}: the network's answer for {times(grid)} voxels and {num_classes} "
            "classes",
            "use a machine with more, or cut the scan into pieces",
        )

    def _classes(self, logits: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return the class of each voxel of the scan's own spacing, on the CPU."""
        try:
            return classes_of(restore_logits(logits, shape), self.preprocessing).cpu()
        except torch.OutOfMemoryError:  # of a GPU
            # The scan's grid may be much finer than the network's.
            return classes_of(restore_logits(logits.cpu(), shape), self.preprocessing)

    def _logits_of_all(self, image: torch.Tensor, windows_done: WindowsDone) -> torch.Tensor:
        """Return the network's logits; of several, the logarithm of their mean probabilities."""
        number = len(self._networks)
        if number == 1:
            return self._logits(image, windows_done)
        mean = ProbabilityMean(of_regions=bool(self.preprocessing.regions))
        for index in range(number):
            self._placed.use(index)
            refuse_diverged(self.executor.module, self._name)
            mean.add(self._logits(image, _part(windows_done, index, number)))
        return mean.logits()

    def _logits(self, image: torch.Tensor, windows_done: WindowsDone) -> torch.Tensor:
        """Return the logits of the network that is placed."""
        settings, patch_size = self._inference, self._network.patch_size
        image = image.to(image_dtype(self.executor.module))
        if settings.window != "auto":
            return self._windows(image, settings.window, windows_done)
        if patch_size is not None:
            return self._windows(image, patch_size, windows_done)
        # Trained on whole volumes: the whole volume where it fits, else the largest windows.
        x, y, z = image.shape[1:]
        window: list[int] = [x, y, z]
        while True:
            try:
                # One at a time: several would need what has just turned out not to be there.
                shape = (window[0], window[1], window[2])
                return self._windows(image, shape, windows_done, alone=True)
            except DoesNotFitError:
                longest = max(range(3), key=lambda axis: window[axis])
                stride = self._network.topology.total_stride[longest]
                if window[longest] <= 4 * stride:
                    raise
                window[longest] = (window[longest] + 1) // 2
                logger.warning(
                    "the volume does not fit; trying windows of %s", "x".join(map(str, window))
                )

    def _windows(
        self,
        image: torch.Tensor,
        window: Shape | Literal["whole"],
        windows_done: WindowsDone,
        alone: bool = False,
    ) -> torch.Tensor:
        settings = self._inference
        self._refuse_beyond_host(image, image.shape[1:] if window == "whole" else window)
        batch_size = 1 if alone and settings.batch_size == "auto" else settings.batch_size
        return predict_logits(
            self.executor,
            image,
            self._network.topology,
            window,
            settings.overlap,
            batch_size,
            windows_done=windows_done,
        )

    def _refuse_beyond_host(self, image: torch.Tensor, wanted: Sequence[int]) -> None:
        """Refuse a window that the host cannot hold: the image padded to it, and on a CPU the rest.

        Linux would promise the memory, and end this process once it is used.
        """
        topology = self._network.topology
        window = computed_window(wanted, topology.total_stride)
        padded = tuple(max(w, n) for w, n in zip(window, image.shape[1:], strict=True))
        needed = 0
        if padded != image.shape[1:]:
            needed += topology.in_channels * math.prod(padded) * image.element_size()
        if not any(slot.device.type == "cuda" for slot in self.executor.slots):
            maps = MAPS_OF_FINEST_LEVEL * topology.channels[0] * BFLOAT16_BYTES
            # Each rank has all of them for a moment, of its maps a slab.
            logits = topology.num_classes * image.element_size() * self._num_ranks_here
            needed += (maps + logits) * math.prod(window)
        lacking = shortage(needed)
        if lacking is not None:
            raise DoesNotFitError(
                f"a window of {times(window)} voxels {lacking}, at least; use a smaller "
                "inference.window"
            )


def _part(windows_done: WindowsDone, index: int, number: int) -> WindowsDone:
    """Return what counts the windows of one of several networks as a part of all."""

    def done_of_all(done: int, total: int) -> None:
        windows_done(index * total + done, number * total)

    return done_of_all
