"""The scans of a prediction, or a rank's share of them: each is read, segmented and written."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from unet3d.config import ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import (
    CheckpointError,
    DatasetError,
    DeviceError,
    RankError,
    ResultExistsError,
    Unet3dError,
    reason_of,
    some,
)
from unet3d.images.files import place_of
from unet3d.images.image import Image, open_image
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import LARGE_BYTES, Scratch
from unet3d.inference.measuring import Measured, measured
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import FoundScans, refuse_existing
from unet3d.inference.scans import (
    ENDINGS,
    Scan,
    ScansAhead,
    label_statistics,
    make_folder_of,
    result_file,
    write_segmentation,
    write_statistics,
)

logger = logging.getLogger(__name__)

DrawPreview = Callable[[Path, Image, npt.NDArray[Any], dict[int, str]], None]
"""Draws a segmentation over its scan into a file, with the names of label values."""


class Progress:
    """Receives the progress of a prediction, and logs it."""

    def said(self, line: str) -> None:
        """Receive a line about a finished scan: its files, and the time or why it was kept."""
        logger.info("%s", line)

    def warned(self, what: str, line: str) -> None:
        """Receive why a scan is ``Skipped``, or at the end which scans are ``Not segmented``."""
        logger.warning("%s: %s", what, line)

    @contextmanager
    def scan(self, number: int, num_scans: int, name: str) -> Iterator[None]:
        """Return a context in which one of the scans, counted from 1, is segmented."""
        yield

    def stage(self, name: str) -> None:
        """Receive the current stage of work on the scan, such as ``reading``."""

    def done(self, done: int, total: int, unit: str = "window") -> None:
        """Receive how many windows are done; 0 if the scan starts over, as in smaller batches.

        Of a large image, receive how many blocks are done, by all processes.
        """


class Job:
    """The scans of one command, or this rank's share of them.

    If scans are distributed, each rank claims one after another. Otherwise all segment each scan
    together: the first rank reads and writes, and if it fails, all ranks continue with the next
    scan.
    """

    def __init__(
        self,
        scans: FoundScans,
        request: PredictionRequest,
        group: Group,
        is_dealt: bool,
        progress: Progress,
        draw_preview: DrawPreview,
    ) -> None:
        """Report scans whose results are kept, and scans that cannot be segmented."""
        self._group = group
        self._is_dealt = is_dealt
        self._together = Group(Ranks()) if is_dealt else group
        """The ranks that segment each scan together."""
        self._scans = scans.to_segment
        self._num_scans = scans.number
        self._request = request
        self._progress = progress
        self._draw_preview = draw_preview
        self._failures: list[str] = []
        self._error: Unet3dError | OSError | None = None
        self._scratch = Scratch(request.scratch)
        for scan in scans.kept if group.is_first else ():
            self._keep(scan)
        for scan, reason in scans.faults if group.is_first else ():
            self._fail(scan, reason)

    def run(self, networks: Networks, parallel: ParallelSettings) -> None:
        """Place networks and segment one scan after the other.

        Raises CheckpointError, RankError or, in one of several ranks, DeviceError if work cannot
        continue.
        """
        if not self._scans:
            return
        if self._is_dealt:  # no other rank logs anything about the scans of this one
            _log_in_all_ranks("unet3d.images", "unet3d.inference.scans")
        preprocessing = networks.preprocessing
        ahead = ScansAhead(self._scans, self._scratch, lambda image: measured(image, preprocessing))
        turns = self._turns()
        number = next(turns, None)
        if self._together.is_first:
            ahead.begin(number)  # while networks are placed
        predictor = Predictor(
            networks, parallel, self._together, skips_empty=self._request.skip_background
        )
        if self._is_dealt:
            _log_in_all_ranks("unet3d")
        predictor.warm_up()
        while number is not None:
            scan, following = self._scans[number], next(turns, None)
            began = time.monotonic()
            try:
                with self._progress.scan(number + 1, len(self._scans), scan.images[0].name):
                    take = partial(ahead.take, number, following)
                    self._segment(scan, take, predictor, networks.names)
            except (CheckpointError, RankError):
                raise
            except (Unet3dError, OSError) as error:
                if isinstance(error, DeviceError) and self._together.size > 1:
                    raise  # the other ranks wait for this one
                if self._together.is_first:
                    self._skip(scan, error)
            else:
                # If scans are distributed, each rank reports its own; all share blocks.
                if self._together.is_first and (self._group.is_first or not scan.in_blocks):
                    seconds = time.monotonic() - began
                    self._progress.said(f"{scan.name} -> {place_of(scan.output)} ({seconds:.1f} s)")
            number = following
        self._together.from_first(lambda: None)  # wait while the first rank writes the last scan

    def end(self) -> Unet3dError | OSError | None:
        """Return the final error: why the only scan failed, or which scans failed.

        If scans are distributed, the first rank returns the error for all ranks.
        """
        failures = self._failures
        if self._is_dealt:
            of_ranks = self._group.exchange(failures)
            failures = [name for names in of_ranks for name in names if self._group.is_first]
        if self._error is None and failures:
            return DatasetError(
                f"{len(failures)} of {self._num_scans} scans could not be segmented: "
                f"{some(failures)}"
            )
        return self._error

    def _turns(self) -> Iterator[int]:
        """Yield the indices of this rank's scans; ranks claim distributed scans one by one."""
        numbers = range(len(self._scans))
        if not self._is_dealt:
            yield from numbers
            return
        claims = self._group.claiming()
        # Large scans come first, so that no rank begins one when the other ranks end.
        for number in sorted(numbers, key=lambda one: -_stored_bytes(self._scans[one])):
            if self._scans[number].in_blocks or claims(number):
                yield number

    def _skip(self, scan: Scan, error: Unet3dError | OSError) -> None:
        if self._num_scans == 1:
            self._error = error
        elif isinstance(error, ResultExistsError):
            self._keep(scan)
        elif isinstance(error, OSError):
            self._fail(scan, f"{scan.name}: {reason_of(error)}")
        else:  # one bad scan of a folder must not stop the others
            self._fail(scan, str(error))

    def _fail(self, scan: Scan, reason: str) -> None:
        self._progress.warned("Skipped", reason)
        self._failures.append(scan.name)

    def _keep(self, scan: Scan) -> None:
        self._progress.said(
            f"{scan.name} -> {place_of(scan.output)} (kept; --overwrite replaces it)"
        )

    def _segment(
        self,
        scan: Scan,
        take: Callable[[], Measured],
        predictor: Predictor,
        checkpoints: Sequence[str],
    ) -> None:
        """Write all results of a scan, or none."""
        request, names = self._request, predictor.label_names
        taken: Measured | None = None
        npy: Path | None = None
        replaces = request.overwrite
        with explaining_memory(scan.name), ExitStack() as results:

            def new(path: Path) -> Path:
                return results.enter_context(result_file(path, replaces))

            def begin() -> None:
                nonlocal taken, npy, replaces
                if not request.overwrite:
                    # Another process may be writing to the same folder.
                    refuse_existing(scan, request)
                    # With --continue, some results may exist, perhaps of another network.
                    replaces = any(map(os.path.lexists, scan.results(request)))
                make_folder_of(scan.output)
                if request.probabilities:
                    npy = new(scan.beside("probabilities"))
                self._progress.stage("reading")
                taken = take()
                self._progress.stage("preparing")

            def windows_done(done: int, total: int) -> None:
                self._progress.done(done, total)
                self._group.note(done, f"window {done} of {scan.name}")

            if scan.in_blocks:
                self._segment_blocks(scan, predictor)
                return
            self._together.from_first(begin, shares_errors=True)
            scratch = self._scratch
            if scratch.is_memory:
                scratch = Scratch(scan.output.absolute().parent, LARGE_BYTES)
            labels = predictor.segment(taken, windows_done, scratch, npy)
            if taken is None:  # only the first rank has it
                return
            image = taken.image
            found = label_statistics(labels, image, names) if request.statistics else None
            self._progress.stage("writing")
            if request.preview:
                self._draw_preview(new(scan.beside("preview")), image, labels, names)
            if found is not None:
                write_statistics(new(scan.beside("statistics")), scan, found, checkpoints)
            write_segmentation(scan, labels, image.geometry, names, replaces)
        for path in {scan.beside(one) for one in ENDINGS} - {*scan.results(request)}:
            if os.path.lexists(path):
                logger.warning("%s existed before and may belong to another segmentation", path)

    def _segment_blocks(self, scan: Scan, predictor: Predictor) -> None:
        """Take part in the segmentation of a large image."""
        from unet3d.inference.block_prediction import segment_in_blocks  # needs zarr
        from unet3d.inference.region import Region

        self._progress.stage("preparing")
        make_folder_of(scan.output)
        image = open_image(scan.images, self._scratch, scan.reading)
        is_complete = segment_in_blocks(
            image,
            Region(image, self._request, scan.reading, self._scratch),
            scan.output,
            predictor,
            self._request,
            lambda done, total: self._progress.done(done, total, "block"),
        )
        if not is_complete:
            self._progress.said(f"{place_of(scan.output)}: this part is done, but others are not")


def _stored_bytes(scan: Scan) -> int:
    try:
        return sum(os.path.getsize(image) for image in scan.images)
    except OSError:  # reading the scan will say why
        return 0


def _log_in_all_ranks(*names: str) -> None:
    """Let this rank use loggers that only the first rank uses otherwise."""
    level = logging.getLogger("unet3d").level
    for name in names:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
