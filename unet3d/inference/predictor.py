"""Prediction: from the image of a scan to its label values."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import InferenceSettings, ParallelSettings, Shape, Spacing
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.inference.diagnosis import cause_of_non_finite, excess_of
from unet3d.inference.image_slab import Planes
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.postprocessing import common_rules, keep_largest, rules_in_words
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.sliding_window import NonFiniteLogitsError, WindowsDone
from unet3d.inference.volume_logits import VolumeLogits
from unet3d.inference.windows import longest_axis
from unet3d.parallel import Executor
from unet3d.volumes.cropping import Box
from unet3d.volumes.files import times
from unet3d.volumes.memory_limits import refuse_beyond_memory
from unet3d.volumes.nifti import Volume
from unet3d.volumes.restoring import restored_slabs
from unet3d.volumes.transform import PreparedImage, Preprocessing, classes_of, kept_box

logger = logging.getLogger(__name__)


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
        self._placed = placed or PlacedNetworks(networks, parallel, group)
        self._logits = VolumeLogits(networks, inference, self._placed, group.ranks.local_world_size)
        self._logits.check_weights()
        of_networks = [
            network.postprocessing if settings.postprocessing else ()
            for network, settings in zip(networks.described, inference, strict=True)
        ]
        self._rules = common_rules(of_networks)
        if group.is_first:
            self._logits.log_mirroring()
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
        prepared = self._prepared(image, box)
        refuse_beyond_memory(
            math.prod(image.header.shape) + math.prod(box.shape),
            f"{image.header.path}: the segmentation of {times(image.header.shape)} voxels",
            "use a machine with more, or cut the scan into pieces",
        )
        try:
            labels = self._labels(prepared, box.shape, windows_done)
        except NonFiniteLogitsError as error:
            cause = cause_of_non_finite(
                self.executor.module,
                self._logits.name,
                prepared.largest,
                self._placed.precision,
            )
            raise VolumeError(
                f"{image.header.path} cannot be segmented: {error}; {cause}"
            ) from error
        except VolumeError as error:
            raise VolumeError(f"{image.header.path}: {error}") from error
        del prepared  # components take memory, too
        keep_largest(labels, self._rules)
        if box.shape == image.header.shape:
            return labels
        background = self.preprocessing.label_values[0]
        whole = np.full(image.header.shape, background, labels.dtype)
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
        self._logits.join(self._prepared(image, kept_box(image.array, self.preprocessing)))

    def _prepared(self, image: Volume, box: Box) -> "_Prepared":
        array, spacing_mm = image.array[:, *box.slices], image.header.spacing_mm
        try:
            prepared = _Prepared(array, spacing_mm, self.preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{image.header.path}: {error}") from error
        excess = excess_of(prepared.largest)
        if excess is not None:
            raise VolumeError(
                f"{image.header.path} cannot be segmented: {excess}; look for voxels that are far "
                "from all others"
            )
        return prepared

    def _labels(
        self, image: Planes, shape: Shape, windows_done: WindowsDone
    ) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of a prepared image, on its grid before it was resampled.

        Where a window does not fit and may be smaller, all begins anew with a smaller one.
        """
        axis = longest_axis(image.shape)
        values = np.array(self.preprocessing.label_values)
        values = values.astype(np.min_scalar_type(values.max()))
        sizes = self._logits.sizes(image.shape)
        while True:
            labels: npt.NDArray[np.integer[Any]] = np.empty(shape, values.dtype)
            done = 0
            try:
                slabs = self._logits.slabs(image, sizes, windows_done)
                for logits in restored_slabs(slabs, axis, image.shape, shape):
                    classes = classes_of(logits, self.preprocessing).cpu().numpy()
                    planes = slice(done, done + classes.shape[axis])
                    labels[(slice(None),) * axis + (planes,)] = values[classes]
                    done = planes.stop
            except DoesNotFitError:
                smaller = self._logits.smaller(sizes)
                if smaller is None:
                    raise
                sizes = smaller
                continue
            return labels


class _Prepared:
    """A scan at the spacing of the networks, made plane by plane, once for all of them."""

    def __init__(
        self, array: npt.NDArray[np.float32], spacing_mm: Spacing, preprocessing: Preprocessing
    ) -> None:
        self._image = PreparedImage(array, spacing_mm, preprocessing)
        self.shape = self._image.shape
        self.num_channels = len(array)
        self.largest = self._image.largest
        self._last: tuple[tuple[int, int, int], torch.Tensor] | None = None

    def planes(self, axis: int, begin: int, end: int) -> torch.Tensor:
        asked = (axis, begin, end)
        if self._last is None or self._last[0] != asked:  # networks take turns
            self._last = None
            self._last = (asked, torch.from_numpy(self._image.planes(axis, begin, end)))
        return self._last[1]
