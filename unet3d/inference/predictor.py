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
from unet3d.errors import CheckpointError, DoesNotFitError, VolumeError
from unet3d.inference.placing import place_network
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.sliding_window import (
    NonFiniteLogitsError,
    WindowsDone,
    computed_window,
    predict_logits,
)
from unet3d.memory.host import shortage
from unet3d.model import BlockNetwork
from unet3d.parallel import image_dtype
from unet3d.runs.checkpoint import Checkpoint
from unet3d.volumes.files import times
from unet3d.volumes.memory_limits import refuse_beyond_memory
from unet3d.volumes.nifti import Volume
from unet3d.volumes.transform import classes_of, prepare_image, restore_logits

logger = logging.getLogger(__name__)

MAX_WEIGHT = 1e6
MAX_INTENSITY = 1e9
"""Beyond these a variance soon overflows in float32. What is normalised by it becomes 0, and the
segmentation empty, though no number in sight is NaN or infinite. Trained weights stay below 100;
the deviation of a normalised image is 1."""

LARGEST_USUAL = 1e4
"""Weights and intensities beyond this are named as the cause of an output that is not finite."""

MAX_FLOAT16 = 65504

MAPS_OF_FINEST_LEVEL = 3
"""The skip, what is upsampled to it, and the result of both."""

BFLOAT16_BYTES = 2


class Predictor:
    """A trained network, placed on devices, that segments volumes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parallel: ParallelSettings,
        inference: InferenceSettings,
        group: Group | None = None,
    ) -> None:
        """Place the network; of several ranks, the first predicts and the others :meth:`follow`.

        Args:
            checkpoint: A network trained in any mode.
            parallel: Where to run; it need not be where the network was trained.
            inference: Size and overlap of the windows.
            group: The ranks that share each window; None: this process alone.

        Raises:
            ConfigError: The mode needs ranks that are not there.
            DeviceError: A device does not exist, or has too little memory.
            CheckpointError: The parameters do not belong to the network, or nothing can be
                computed with them.
        """
        group = group or Group(Ranks())
        placed = place_network(checkpoint, parallel, group)
        self.executor, self._precision = placed.executor, placed.precision
        largest = _largest_of(self.executor.module)
        if not largest <= MAX_WEIGHT:
            raise CheckpointError(
                f"the network's weights {_reach(largest)}: its training has diverged; use another "
                "checkpoint"
            )
        self._num_ranks_here = group.ranks.local_world_size
        self._topology = checkpoint.topology
        self.preprocessing = checkpoint.preprocessing
        self._patch_size = checkpoint.patch_size
        self._inference = inference

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
        if isinstance(self.executor, SharedExecutor):
            self.executor.follow()

    def end(self) -> None:
        """Let the ranks go that follow, after the last image; only the first rank calls it.

        Raises:
            RankError: One of them died.
        """
        if isinstance(self.executor, SharedExecutor):
            self.executor.end()

    def segment(
        self, image: Volume, windows_done: WindowsDone = lambda done, total: None
    ) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of an image.

        Args:
            image: Shape (C, X, Y, Z), as read from a file.
            windows_done: Called before the first window and after each forward pass.

        Returns:
            Shape (X, Y, Z), on the image's grid.

        Raises:
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
        tensor = self._prepared(image)
        x, y, z = tensor.shape[1:]
        self._refuse_beyond_memory(image, (x, y, z))
        try:
            logits = self._logits(tensor, windows_done)
        except NonFiniteLogitsError as error:
            raise VolumeError(
                f"{image.header.path} cannot be segmented: {error}; {self._cause(tensor)}"
            ) from error
        classes = self._classes(logits, image.header.shape).numpy()
        values = self.preprocessing.label_values
        smallest = np.min_scalar_type(max(values))
        labels: npt.NDArray[np.integer[Any]] = np.array(values, smallest)[classes]
        return labels

    def _prepared(self, image: Volume) -> torch.Tensor:
        try:
            prepared = prepare_image(image.array, image.header.spacing_mm, self.preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{image.header.path}: {error}") from error
        tensor = torch.from_numpy(np.ascontiguousarray(prepared)).to(
            image_dtype(self.executor.module)
        )
        intensity = _largest(tensor)
        if not intensity <= MAX_INTENSITY:
            raise VolumeError(
                f"{image.header.path} cannot be segmented: its normalised intensities "
                f"{_reach(intensity)}; look for voxels that are far from all others"
            )
        return tensor

    def _refuse_beyond_memory(self, image: Volume, grid: Shape) -> None:
        """Refuse logits that the host cannot hold; devices refuse for themselves."""
        if self.executor.output_device.type == "cuda":
            return
        shape, num_classes = image.header.shape, self._topology.num_classes
        numbers = [num_classes * math.prod(grid)]  # of the network's grid, and of the scan's own
        if grid != shape:
            numbers.append(num_classes * math.prod(shape))
        itemsize = image_dtype(self.executor.module).itemsize
        refuse_beyond_memory(
            itemsize * sum(numbers),
            f"{image.header.path}: the network's answer for {times(grid)} voxels and {num_classes} "
            "classes",
            "use a machine with more, or cut the scan into pieces",
        )

    def _classes(self, logits: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return the class of each voxel of the scan's own grid, on the CPU."""
        try:
            return classes_of(restore_logits(logits, shape), self.preprocessing).cpu()
        except torch.OutOfMemoryError:  # of a GPU
            # The scan's grid may be much finer than the network's.
            return classes_of(restore_logits(logits.cpu(), shape), self.preprocessing)

    def _cause(self, image: torch.Tensor) -> str:
        """Return the likely cause of an output that is not finite, and what to do about it."""
        weight = _largest_of(self.executor.module)
        if not weight <= LARGEST_USUAL:
            return (
                f"the network's weights {_reach(weight)}: its training has diverged; use another "
                "checkpoint"
            )
        intensity = _largest(image)
        if not intensity <= LARGEST_USUAL:
            return (
                f"its normalised intensities {_reach(intensity)}; look for single voxels that are "
                "far from all others"
            )
        if self._precision == "float16":
            return (
                f"in float16, numbers beyond {MAX_FLOAT16} overflow; add --devices cpu, which "
                "computes in another precision"
            )
        return "its intensities are probably unlike those of the training; look at the image"

    def _logits(self, image: torch.Tensor, windows_done: WindowsDone) -> torch.Tensor:
        settings = self._inference
        if settings.window != "auto":
            return self._windows(image, settings.window, windows_done)
        if self._patch_size is not None:
            return self._windows(image, self._patch_size, windows_done)
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
                stride = self._topology.total_stride[longest]
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
            self._topology,
            window,
            settings.overlap,
            batch_size,
            windows_done=windows_done,
        )

    def _refuse_beyond_host(self, image: torch.Tensor, wanted: Sequence[int]) -> None:
        """Refuse a window that the host cannot hold: the image padded to it, and on a CPU the rest.

        Linux would promise the memory, and end this process once it is used.
        """
        topology = self._topology
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


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor; NaN if there is one."""
    if not tensor.numel():
        return 0.0
    return torch.stack(torch.aminmax(tensor)).abs().max().item()


def _largest_of(model: BlockNetwork) -> float:
    """Return the same of all parameters; running variances may be large and still be right."""
    each = [_largest(parameter.detach()) for parameter in model.parameters()]
    return float(np.max(each))  # Python's own max overlooks a NaN


def _reach(magnitude: float) -> str:
    return f"reach {magnitude:.3g}" if math.isfinite(magnitude) else "are NaN or infinite"
