"""Prediction: from the image of a scan to its label values."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy.typing as npt
import torch

from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, VolumeError, naming
from unet3d.images.image import Box, Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch
from unet3d.inference.doubts import cause_of_non_finite, doubts
from unet3d.inference.image_slab import Make, Planes, sharing
from unet3d.inference.label_volume import LabelVolume, ProbabilityVolume
from unet3d.inference.measuring import Measured, measured
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, TrainedNetwork
from unet3d.inference.postprocessing import keep_largest, rules_in_words
from unet3d.inference.sliding_window import NonFiniteLogitsError, WindowsDone
from unet3d.inference.volume_logits import AgreedError, VolumeLogits
from unet3d.inference.windows import longest_axis, window_of
from unet3d.parallel import Executor
from unet3d.preparation.interpolation import Resampling, restored_slabs
from unet3d.preparation.prepared_image import PreparedImage, whole_box
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

PLANES_KEPT = 2
"""Pieces of a prepared scan to keep while networks take turns, each preparing one piece ahead."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """An image that is being segmented, in the rank that has it."""

    measured: Measured
    restoring: Resampling
    """How its logits become those of the part."""
    labels: LabelVolume
    results: Sequence[LabelVolume | ProbabilityVolume]

    def write(self, slabs: Iterator[torch.Tensor], axis: int) -> None:
        """Turn logits into results, slab by slab along an axis."""
        for result in self.results:
            result.begin()
        for logits in restored_slabs(slabs, axis, self.restoring):
            for result in self.results:
                result.add(logits, axis)
        for result in self.results:
            result.finish()


class Predictor:
    """A trained network, or several that are averaged, that segments volumes."""

    def __init__(
        self,
        networks: Networks,
        where: ParallelSettings | TrainedNetwork,
        group: Group | None = None,
        *,
        skips_empty: bool = False,
    ) -> None:
        """Place the first network, or use a training run's network on its own devices.

        All ranks of the group compute slabs of the same windows; only the first rank has the
        images. With ``skips_empty``, windows of constant intensity are skipped, and voxels in no
        other window become background.
        """
        self._group = group = group or Group(Ranks())
        self._networks = networks
        self._warns = not isinstance(where, TrainedNetwork)  # training has checked its cases
        self._placed = (
            where
            if isinstance(where, TrainedNetwork)
            else PlacedNetworks(networks, where, self._group)
        )
        self._logits = VolumeLogits(networks, self._placed, group, skips_empty=skips_empty)
        self._share = None
        if group.size > 1:
            device = self._logits.input_device
            self._share = sharing(group, group.new_group(device), device)
        of_networks = [
            network.postprocessing if network.config.inference.postprocessing else ()
            for network in networks.described
        ]
        first, *others = of_networks
        self._rules = [rule for rule in first if all(rule in other for other in others)]
        if not group.is_first:
            return
        _log_mirroring(networks)
        if self._rules:
            logger.info("post-processing: %s", rules_in_words(self._rules, self.label_names))
        elif any(of_networks):
            logger.info("post-processing: none, because the networks have none in common")

    @property
    def executor(self) -> Executor:
        """The executor of the placed network, or of its first replica."""
        return self._placed.executors[0]

    @property
    def preprocessing(self) -> Preprocessing:
        """How every network prepares an image."""
        return self._networks.preprocessing

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label value except the background."""
        names = zip(self.preprocessing.label_values, self.preprocessing.label_names, strict=True)
        return dict(list(names)[1:])

    def warm_up(self) -> None:
        """Warm up a GPU while a scan is read."""
        self._logits.warm_up()

    def segment(
        self,
        image: Image | Measured | None,
        windows_done: WindowsDone = lambda done, total: None,
        scratch: Scratch | None = None,
        probabilities: Path | None = None,
    ) -> Any:
        """Return the label values (X, Y, Z) of an image on its grid, after post-processing.

        An image that was measured ahead of its turn is not measured again.

        A collective call; ranks without the image get None. Labels go to ``scratch``, by default in
        memory, and probabilities to an optional file.

        Raises:
            CheckpointError: A network other than the first cannot be used.
            VolumeError: The image has other channels than the network was trained on, the host has
                too little memory for it, or the network's output for it is not finite. All ranks
                raise this error, and can continue with the next image.
            DoesNotFitError: A device has too little memory; other ranks may wait for this one.
            RankError: Another rank died or hangs.
            OSError: The probabilities cannot be written.
        """
        job: _Job | None = None

        def begun() -> list[int]:
            nonlocal job
            assert image is not None  # the first rank has it
            job = self._begun(image, scratch or Scratch(), probabilities)
            found = job.measured.found
            return [*found.shape, found.num_channels]

        x, y, z, num_channels = self._group.from_first(begun, shares_errors=True)
        make = None if job is None else self._kept(job.measured.found.planes)
        planes = Planes(shape=(x, y, z), num_channels=num_channels, make=make, share=self._share)
        self._fill(job, planes, windows_done)
        if job is None:
            return None
        labels, of = job.labels.array, job.measured
        box, given, is_seen = of.box, of.image, of.seen is of.image
        del job, make, of, planes  # frees memory for finding components
        if self._rules:
            keep_largest(labels[box], self._rules)
        return labels if is_seen else given.geometry.in_ras(labels)

    def identity(self) -> dict[str, Any]:
        """Return what the labels of an image depend on, for a comparison with other processes."""
        weights = sha256()
        for index in range(len(self._networks)):
            for name, tensor in sorted(self._networks[index].model.items()):
                weights.update(name.encode())
                weights.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        described = self._networks.described
        return {
            "network": weights.hexdigest(),
            "preparation": self.preprocessing.to_dict(),
            "settings": [
                [
                    *(window_of(one), one.mirrored_axes),
                    *(one.config.inference.overlap, one.config.inference.averaging),
                ]
                for one in described
            ],
            "precision": self._placed.precision,
        }

    def prepared(self, image: Image) -> PreparedImage:
        """Return a large image, of which only statistics are read, for :meth:`begin_block`."""
        if self._rules:
            raise VolumeError(
                f"{image.geometry.path} cannot be segmented in blocks: the network keeps only the "
                "largest component, for which it needs the whole; add --no-postprocessing"
            )
        if any(one.kind == "z-score-inside" for one in self.preprocessing.channels):
            raise VolumeError(
                f"{image.geometry.path} cannot be segmented in blocks: the network normalises "
                "intensities by a mask of the whole image; write to another format, such as .nii.gz"
            )
        whole = measured(image, self.preprocessing, crops=False)
        self._warn(whole)
        return whole.found

    def begin_block(
        self,
        found: PreparedImage,
        block: Box,
        windows_done: WindowsDone = lambda done, total: None,
    ) -> Callable[[], npt.NDArray[Any]]:
        """Begin to read a block of a large image, and return a function that segments it.

        The function returns the label values (X, Y, Z), without post-processing, or raises the
        errors of :meth:`segment`. They are the same however the image is divided into blocks.
        """
        image = found.image.cut(block)
        needed, restoring = found.restoring().within(block)
        labels = LabelVolume(
            image.geometry, whole_box(image.geometry.shape), self.preprocessing, Scratch()
        )
        job = _Job(
            measured=Measured(image=image, seen=image, box=block, found=found),
            restoring=restoring,
            labels=labels,
            results=[labels],
        )

        def planes_of(part: PreparedImage) -> Planes:
            return Planes(
                shape=part.shape,
                num_channels=part.num_channels,
                make=self._kept(part.planes),
                within=lambda box: planes_of(part.within(box)),
            )

        planes, slabs = planes_of(found), None
        with suppress(VolumeError, DoesNotFitError):  # raised again when the block is segmented
            slabs = self._logits.slabs(planes, windows_done, needed)

        def segment() -> npt.NDArray[Any]:
            self._fill(job, planes, windows_done, needed, slabs)
            return labels.array

        return segment

    def _kept(self, make: Make) -> Make:
        """Keep the last planes if several networks, each with a thread of its own, request them."""
        if self._networks.add_up:
            return make
        kept, lock = lru_cache(PLANES_KEPT)(make), Lock()

        def make_once(axis: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
            with lock:
                return kept(axis, begin, end, device)

        return make_once

    def _begun(self, image: Image | Measured, scratch: Scratch, probabilities: Path | None) -> _Job:
        """Measure an image, unless that was done, and allocate its results."""
        preprocessing = self.preprocessing
        of = image if isinstance(image, Measured) else measured(image, preprocessing)
        self._warn(of)
        geometry = of.seen.geometry
        labels = LabelVolume(geometry, of.box, preprocessing, scratch)
        results: list[LabelVolume | ProbabilityVolume] = [labels]
        if probabilities is not None:
            results.append(ProbabilityVolume(probabilities, geometry, of.box, preprocessing))
        restoring = of.found.restoring()
        return _Job(measured=of, restoring=restoring, labels=labels, results=results)

    def _warn(self, of: Measured) -> None:
        """Warn if the networks probably expect another image."""
        if self._warns:
            window = window_of(self._networks.described[0])
            for doubt in doubts(of.seen, of.found.shape, window):
                logger.warning("%s", doubt)

    def _fill(
        self,
        job: _Job | None,
        planes: Planes,
        windows_done: WindowsDone,
        block: Box | None = None,
        slabs: Iterator[torch.Tensor] | None = None,
    ) -> None:
        """Compute the logits of a prepared image, and write its results on the original grid.

        The logits may have been begun.
        """
        path = "the image" if job is None else job.measured.seen.geometry.path
        try:
            with explaining_memory("its segmentation"):
                self._computed(job, planes, windows_done, block, slabs)
        except NonFiniteLogitsError as error:  # all ranks raise it
            largest = 0.0 if job is None else job.measured.found.largest
            cause = cause_of_non_finite(largest, self._placed.precision)
            raise VolumeError(f"{path} cannot be segmented: {error}; {cause}") from error
        except VolumeError as error:
            # If this rank alone raises it, the others wait for this rank.
            can_go_on = isinstance(error, AgreedError) or not self._placed.is_shared
            raise (VolumeError if can_go_on else DoesNotFitError)(naming(path, error)) from error

    def _computed(
        self,
        job: _Job | None,
        planes: Planes,
        windows_done: WindowsDone,
        block: Box | None,
        slabs: Iterator[torch.Tensor] | None,
    ) -> None:
        """Compute windows; if several do not fit, start over with one per forward pass."""
        while True:
            try:
                slabs = slabs or self._logits.slabs(planes, windows_done, block)
                if job is not None:
                    job.write(slabs, longest_axis(planes.shape))
                for _ in slabs:  # other ranks compute without writing
                    pass
                return
            except DoesNotFitError:
                slabs = None
                if not self._logits.takes_fewer():
                    raise


def _log_mirroring(networks: Networks) -> None:
    """Log the number of forward passes per window, if mirror images are used."""
    letters = "XYZ" if networks.preprocessing.orientation == "ras" else "IJK"
    mirrored = [one.mirror_axes for one in networks.described if one.config.inference.tta]
    for axes in dict.fromkeys(mirrored):
        if axes:
            words = ", ".join(letters[axis] for axis in axes)
            logger.info(
                "each window is predicted %d times, mirrored along %s", 2 ** len(axes), words
            )
        else:
            logger.warning("training used no mirror images, so --tta changes nothing")
