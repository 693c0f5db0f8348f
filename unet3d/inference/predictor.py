"""Prediction: from the image of a scan to its label values."""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.images.image import Image
from unet3d.images.scratch import Scratch
from unet3d.inference.diagnosis import cause_of_non_finite
from unet3d.inference.image_slab import CPU
from unet3d.inference.label_volume import LabelVolume, ProbabilityVolume
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.postprocessing import common_rules, keep_largest, rules_in_words
from unet3d.inference.shared_executor import SharedExecutor
from unet3d.inference.sliding_window import NonFiniteLogitsError, WindowsDone
from unet3d.inference.volume_logits import VolumeLogits
from unet3d.inference.windows import longest_axis
from unet3d.parallel import Executor
from unet3d.preparation.interpolation import restored_slabs
from unet3d.preparation.prepared_image import PreparedImage, kept_box
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

PLANES_KEPT = 2
"""Pieces of a prepared scan that stay where networks take turns, each of them one piece ahead."""


class Predictor:
    """A trained network, or several that are averaged, that segments volumes."""

    def __init__(
        self,
        networks: Networks,
        parallel: ParallelSettings,
        inference: Sequence[InferenceSettings],
        group: Group | None = None,
        placed: TrainedNetwork | None = None,
        *,
        skips_empty: bool = False,
    ) -> None:
        """Place the first network; of several ranks, one predicts and the others :meth:`follow`.

        Args:
            networks: Networks trained in any mode.
            parallel: Where to run; it need not be where they were trained.
            inference: Size and overlap of the windows of each network.
            group: The ranks that share each window; None: this process alone.
            placed: The only network as it is placed already; then ``parallel`` is not looked at,
                and ranks with other slabs of it :meth:`join` for each image.
            skips_empty: Whether windows are skipped in which each channel is one number; what no
                other window reaches becomes background.

        Raises:
            ConfigError: The mode needs ranks that are not there.
            DeviceError: A device does not exist, or has too little memory.
            CheckpointError: The parameters do not belong to the network, or nothing can be
                computed with them.
        """
        group = group or Group(Ranks())
        self._networks = networks
        self._placed = placed or PlacedNetworks(
            networks, parallel, group, [settings.precision for settings in inference]
        )
        self._logits = VolumeLogits(
            networks,
            inference,
            self._placed,
            group.ranks.local_world_size,
            skips_empty=skips_empty,
        )
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

    def warm_up(self) -> None:
        """Prepare a GPU for windows, while a scan is still read."""
        self._logits.warm_up()

    def segment(
        self,
        image: Image,
        windows_done: WindowsDone = lambda done, total: None,
        scratch: Scratch | None = None,
        probabilities: Path | None = None,
    ) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of an image.

        Args:
            image: As read from a file.
            windows_done: Called before the first window and after each forward pass; each network
                counts the same.
            scratch: Where the labels go; None: into memory.
            probabilities: Where to write a :class:`ProbabilityVolume`; None: nowhere.

        Returns:
            Shape (X, Y, Z), on the image's grid, after the post-processing of the network.

        Raises:
            CheckpointError: Another network than the first cannot be used.
            VolumeError: The image has other channels than the network was trained on, the host has
                too little memory for it, or the network's output for it is not finite.
            DoesNotFitError: A device has too little memory.
            RankError: Another rank died or hangs.
            OSError: The probabilities cannot be written.
        """
        wanted = len(self.preprocessing.channels)
        if image.num_channels != wanted:
            raise VolumeError(
                f"{image.geometry.path} has {image.num_channels} channel(s) but the network "
                f"was trained on {wanted} ({', '.join(self.preprocessing.channel_names)})"
                f"{'; name the files of a scan case_0000, case_0001, ...' if wanted > 1 else ''}"
            )
        seen = self._seen(image)
        box = kept_box(seen, self.preprocessing)
        kept = seen.cut(box)
        prepared = self._prepared(kept)
        labels = LabelVolume(seen.geometry, box, self.preprocessing, scratch or Scratch())
        results: list[LabelVolume | ProbabilityVolume] = [labels]
        if probabilities is not None:
            results.append(ProbabilityVolume(probabilities, seen.geometry, box, self.preprocessing))
        try:
            self._fill(results, prepared, kept.geometry.shape, windows_done)
        except NonFiniteLogitsError as error:
            cause = cause_of_non_finite(
                self.executor.module,
                self._logits.name,
                prepared.largest,
                self._placed.precision,
            )
            raise VolumeError(
                f"{image.geometry.path} cannot be segmented: {error}; {cause}"
            ) from error
        except VolumeError as error:
            raise VolumeError(f"{image.geometry.path}: {error}") from error
        del prepared  # components take memory, too
        keep_largest(labels.array[box], self._rules)
        return labels.array if seen is image else image.geometry.in_ras(labels.array)

    def join(self, image: Image) -> None:
        """Compute with other ranks what :meth:`segment` returns in one of them; keep nothing.

        The windows' size must be known, because only the other rank could look for one that fits.

        Args:
            image: The same as there.

        Raises:
            VolumeError: As there.
            DoesNotFitError: A device has too little memory.
            RuntimeError: The settings leave the windows' size open.
        """
        seen = self._seen(image)
        self._logits.join(self._prepared(seen.cut(kept_box(seen, self.preprocessing))))

    def _seen(self, image: Image) -> Image:
        """Return an image with its axes as the networks see them."""
        return image.as_stored() if self.preprocessing.orientation == "stored" else image

    def _prepared(self, image: Image) -> "_Prepared":
        try:
            found = PreparedImage(image, self.preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{image.geometry.path}: {error}") from error
        return _Prepared(found, PLANES_KEPT if self._logits.takes_turns(found.shape) else 0)

    def _fill(
        self,
        results: Sequence[LabelVolume | ProbabilityVolume],
        image: "_Prepared",
        shape: Shape,
        windows_done: WindowsDone,
    ) -> None:
        """Segment a prepared image, on its grid before it was resampled.

        Where windows do not fit and may be smaller or fewer, all begins anew with such.
        """
        axis = longest_axis(image.shape)
        sizes = self._logits.sizes(image.shape)
        while True:
            for result in results:
                result.begin()
            try:
                slabs = self._logits.slabs(image, sizes, windows_done)
                for logits in restored_slabs(slabs, axis, image.shape, shape, image.nearest_axis):
                    for result in results:
                        result.add(logits, axis)
                for result in results:
                    result.finish()
            except DoesNotFitError:
                smaller = self._logits.smaller(sizes)
                if smaller is None:
                    raise
                sizes = smaller
                continue
            return


class _Prepared:
    """A scan at the spacing of the networks, made plane by plane, once for all of them."""

    def __init__(self, image: PreparedImage, num_kept: int) -> None:
        self._image = image
        self._num_kept = num_kept
        self.shape = image.shape
        self.num_channels = image.num_channels
        self.largest = image.largest
        self.nearest_axis = image.nearest_axis
        self._lock = Lock()  # planes are made ahead, for several networks
        self._last: dict[tuple[int, int, int, torch.device], torch.Tensor] = {}

    def planes(self, axis: int, begin: int, end: int, device: torch.device = CPU) -> torch.Tensor:
        asked = (axis, begin, end, device)
        with self._lock:
            known = self._last.get(asked)
            if known is not None:
                return known
            while self._last and len(self._last) >= self._num_kept:
                del self._last[next(iter(self._last))]
            made = self._image.planes(axis, begin, end, device)
            if self._num_kept:
                self._last[asked] = made
            return made
