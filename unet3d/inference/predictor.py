"""Prediction: from the image of a scan to its label values."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.images.image import Box, Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch
from unet3d.inference.diagnosis import cause_of_non_finite, doubts
from unet3d.inference.image_slab import Planes, SharedPlanes
from unet3d.inference.label_volume import LabelVolume, ProbabilityVolume
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.postprocessing import common_rules, keep_largest, rules_in_words
from unet3d.inference.sliding_window import NonFiniteLogitsError, WindowsDone
from unet3d.inference.volume_logits import AgreedError, VolumeLogits
from unet3d.inference.windows import longest_axis
from unet3d.parallel import Executor
from unet3d.preparation.interpolation import restored_slabs
from unet3d.preparation.prepared_image import CPU, PreparedImage, kept_box
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

PLANES_KEPT = 2
"""Pieces of a prepared scan that stay where networks take turns, each of them one piece ahead."""

Labels = npt.NDArray[np.integer[Any]]


class _Prepared(Planes):
    """A scan at the spacing of the networks, made plane by plane, once for all of them."""

    def __init__(self, image: PreparedImage, num_kept: int) -> None:
        super().__init__(image.shape, image.num_channels)
        self._image = image
        self._num_kept = num_kept
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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """An image on its way to labels, in the rank that has it."""

    image: Image
    """With its axes as the networks see them."""
    box: Box
    """The part that is segmented."""
    found: PreparedImage
    planes: _Prepared
    labels: LabelVolume
    results: Sequence[LabelVolume | ProbabilityVolume]


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
        """Place the first network, or take the only one as a training has it.

        All ranks of the group compute slabs of the same windows, of images that the first one has.
        Windows in which each channel is one number may be skipped; what no other window reaches
        becomes background.
        """
        self._group = group or Group(Ranks())
        self._networks = networks
        self._warns = placed is None  # a training has looked at its cases
        self._placed = placed or PlacedNetworks(
            networks, parallel, self._group, [settings.precision for settings in inference]
        )
        self._logits = VolumeLogits(
            networks, inference, self._placed, self._group, skips_empty=skips_empty
        )
        device = self._logits.input_device
        self._messages = self._group.new_group(device) if self._group.size > 1 else None
        of_networks = [
            network.postprocessing if settings.postprocessing else ()
            for network, settings in zip(networks.described, inference, strict=True)
        ]
        self._rules = common_rules(of_networks)
        if not self._group.is_first:
            return
        self._logits.log_mirroring()
        if self._rules:
            logger.info("post-processing: %s", rules_in_words(self._rules, self.label_names))
        elif any(of_networks):
            logger.info("post-processing: none, because the networks have none in common")

    @property
    def executor(self) -> Executor:
        """What computes the network that is placed."""
        return self._placed.executors[0]

    @property
    def preprocessing(self) -> Preprocessing:
        """How every network prepares an image."""
        return self._networks.preprocessing

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label value without the background."""
        names = zip(self.preprocessing.label_values, self.preprocessing.label_names, strict=True)
        return dict(list(names)[1:])

    def warm_up(self) -> None:
        """Prepare a GPU for windows, while a scan is still read."""
        self._logits.warm_up()

    @overload
    def segment(
        self,
        image: Image,
        windows_done: WindowsDone = ...,
        scratch: Scratch | None = ...,
        probabilities: Path | None = ...,
    ) -> Labels: ...

    @overload
    def segment(
        self,
        image: Image | None,
        windows_done: WindowsDone = ...,
        scratch: Scratch | None = ...,
        probabilities: Path | None = ...,
    ) -> Labels | None: ...

    def segment(
        self,
        image: Image | None,
        windows_done: WindowsDone = lambda done, total: None,
        scratch: Scratch | None = None,
        probabilities: Path | None = None,
    ) -> Labels | None:
        """Return the label values (X, Y, Z) of an image on its grid, after post-processing.

        All ranks call it; those that do not have the image get no labels. Labels go to ``scratch``,
        by default into memory, and probabilities to a file that may be named.

        Raises:
            CheckpointError: Another network than the first cannot be used.
            VolumeError: The image has other channels than the network was trained on, the host has
                too little memory for it, or the network's output for it is not finite. All ranks
                have this error, and can go on with the next image.
            DoesNotFitError: A device has too little memory; other ranks may wait for this one.
            RankError: Another rank died or hangs.
            OSError: The probabilities cannot be written.
        """
        job: _Job | None = None

        def begun() -> list[int]:
            nonlocal job
            job = self._begun(image, scratch or Scratch(), probabilities)
            return [*job.planes.shape, job.planes.num_channels]

        x, y, z, num_channels = self._group.from_first(begun, shares_errors=True)
        own = job.planes if job is not None else None
        planes: Planes | SharedPlanes | None = own
        if self._messages is not None:
            device = self._logits.input_device
            planes = SharedPlanes(own, (x, y, z), num_channels, self._group, self._messages, device)
        assert planes is not None
        path = "the image" if image is None else image.geometry.path
        try:
            with explaining_memory("its segmentation"):
                self._fill(job, planes, windows_done)
        except NonFiniteLogitsError as error:  # which is so in all ranks
            largest = 0.0 if job is None else job.found.largest
            cause = cause_of_non_finite(largest, self._placed.precision)
            raise VolumeError(f"{path} cannot be segmented: {error}; {cause}") from error
        except AgreedError as error:
            raise VolumeError(f"{path}: {error}") from error
        except VolumeError as error:
            # Not so in all ranks, of which others wait for this one then.
            kind = DoesNotFitError if self._placed.is_shared else VolumeError
            raise kind(f"{path}: {error}") from error
        if job is None or image is None:
            return None
        labels, box, is_seen = job.labels.array, job.box, job.image is image
        del job, own, planes  # components take memory, too
        keep_largest(labels[box], self._rules)
        return labels if is_seen else image.geometry.in_ras(labels)

    def _begun(self, image: Image | None, scratch: Scratch, probabilities: Path | None) -> _Job:
        """Measure an image, and make room for its results."""
        preprocessing = self.preprocessing
        if image is None:
            raise RuntimeError("the first rank has no image")
        path, wanted = image.geometry.path, len(preprocessing.channels)
        if image.num_channels != wanted:
            raise VolumeError(
                f"{path} has {image.num_channels} channel(s) but the network "
                f"was trained on {wanted} ({', '.join(preprocessing.channel_names)})"
                f"{'; name the files of a scan case_0000, case_0001, ...' if wanted > 1 else ''}"
            )
        seen = image.as_stored() if preprocessing.orientation == "stored" else image
        box = kept_box(seen, preprocessing)
        try:
            found = PreparedImage(seen.cut(box), preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{path}: {error}") from error
        if self._warns:
            for doubt in doubts(seen, found.shape, self._logits.window):
                logger.warning("%s", doubt)
        labels = LabelVolume(seen.geometry, box, preprocessing, scratch)
        results: list[LabelVolume | ProbabilityVolume] = [labels]
        if probabilities is not None:
            results.append(ProbabilityVolume(probabilities, seen.geometry, box, preprocessing))
        num_kept = PLANES_KEPT if self._logits.takes_turns else 0
        planes = _Prepared(found, num_kept)
        return _Job(image=seen, box=box, found=found, planes=planes, labels=labels, results=results)

    def _fill(
        self, job: _Job | None, planes: Planes | SharedPlanes, windows_done: WindowsDone
    ) -> None:
        """Segment a prepared image, on its grid before it was resampled.

        Where windows do not fit together, all begins anew with one at a time.
        """
        axis = longest_axis(planes.shape)
        while True:
            try:
                slabs = self._logits.slabs(planes, windows_done)
                if job is None:
                    for _ in slabs:  # which the first rank writes
                        pass
                else:
                    _write(job, slabs, axis)
            except DoesNotFitError:
                if not self._logits.takes_fewer():
                    raise
                continue
            return


def _write(job: _Job, slabs: Iterator[torch.Tensor], axis: int) -> None:
    """Make results of the logits of an image, slab after slab along an axis."""
    found, x, y, z = job.found, *(part.stop - part.start for part in job.box)
    for result in job.results:
        result.begin()
    for logits in restored_slabs(slabs, axis, found.shape, (x, y, z), found.nearest_axis):
        for result in job.results:
            result.add(logits, axis)
    for result in job.results:
        result.finish()
