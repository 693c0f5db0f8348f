"""One scan after the other, from file to file: what is read, skipped, written and refused."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from unet3d.distributed import is_launched
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
from unet3d.images.image import Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.scratch import Scratch
from unet3d.inference.predictor import Predictor
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scan_search import FoundScans, refuse_existing
from unet3d.inference.scans import (
    Scan,
    ScansAhead,
    label_statistics,
    result_file,
    write_segmentation,
    write_statistics,
)

logger = logging.getLogger(__name__)

DrawPreview = Callable[[Path, Image, npt.NDArray[Any], dict[int, str]], None]
"""Draws a segmentation over its scan into a file, with the names of label values."""


class Progress:
    """Is told how a prediction goes; here it becomes lines of the log."""

    def said(self, line: str) -> None:
        """Take what became of a scan."""
        logger.info("%s", line)

    def failed(self, error: Unet3dError) -> None:
        """Take why a scan is left out."""
        logger.warning("Skipped: %s", error)

    def left(self, line: str) -> None:
        """Take which scans remain where the work ends before its time."""
        logger.warning("%s", line)

    @contextmanager
    def scan(self, number: int, num_scans: int, name: str) -> Iterator[None]:
        """Return a context in which one of the scans, counted from 1, is segmented."""
        yield

    def stage(self, name: str) -> None:
        """Take what is done with the scan now, such as ``reading``."""

    def windows_done(self, done: int, total: int) -> None:
        """Take how many windows are done; 0 begins anew, such as with smaller ones."""


class Segmentation:
    """The scans of one command, or those that are dealt to this rank.

    Where each scan is dealt to one rank, ranks have no part in the scans of others. Else all ranks
    segment each scan together: the first one reads and writes, and where it cannot, all of them go
    on with the next scan.
    """

    def __init__(
        self,
        scans: FoundScans,
        request: PredictionRequest,
        known_as: Sequence[Path],
        group: Group,
        *,
        is_dealt: bool,
        progress: Progress,
        draw_preview: DrawPreview,
    ) -> None:
        """Say which scans need nothing, and which cannot be segmented.

        A user knows the networks by ``known_as``, which statistics name.
        """
        self._group = group
        self._is_dealt = is_dealt
        self._together = Group(Ranks()) if is_dealt else group
        """The ranks that segment each scan together."""
        own = slice(group.ranks.rank, None, group.size) if is_dealt else slice(None)
        self._scans = scans.to_segment[own]
        self._num_scans = len(scans.to_segment) + len(scans.kept) + len(scans.faults)
        self._request = request
        self._known_as = known_as
        self._progress = progress
        self._draw_preview = draw_preview
        self._failures: list[Path] = []
        self._error: Unet3dError | OSError | None = None
        self._scratch = Scratch(request.scratch)
        self._ahead = ScansAhead(self._scans, self._scratch)
        for scan in scans.kept if group.is_first else ():
            self._keep(scan)
        for scan, error in scans.faults if group.is_first else ():
            self._failures.append(scan.images[0])
            progress.failed(Unet3dError(error))

    def begin(self) -> None:
        """Begin to read, while networks are placed on their devices."""
        if self._together.is_first:
            self._ahead.begin()

    @property
    def has_work(self) -> bool:
        """Whether there is a scan to segment."""
        return bool(self._scans)

    def gather(self) -> None:
        """Leave the failures of all ranks that scans are dealt to with the first one."""
        if self._is_dealt:
            of_ranks = self._group.exchange([str(path) for path in self._failures])
            is_first = self._group.is_first
            self._failures = [Path(path) for paths in of_ranks for path in paths if is_first]

    @property
    def error(self) -> Unet3dError | OSError | None:
        """What the command ends with: why the only scan failed, or which ones did."""
        if self._error is None and self._failures:
            return DatasetError(
                f"{len(self._failures)} of {self._num_scans} scans could not be segmented: "
                f"{some(self._failures)}"
            )
        return self._error

    def segment(self, predictor: Predictor) -> None:
        """Segment one scan after the other.

        Raises CheckpointError, RankError or, in one of several ranks, DeviceError where the work
        cannot go on.
        """
        predictor.warm_up()
        left = list(self._scans)
        try:
            for number, scan in enumerate(self._scans, start=1):
                began = time.monotonic()
                try:
                    with self._progress.scan(number, len(self._scans), scan.images[0].name):
                        self._segment(number - 1, predictor)
                except (CheckpointError, RankError):
                    raise
                except (Unet3dError, OSError) as error:
                    if isinstance(error, DeviceError) and self._together.size > 1:
                        raise  # the other ranks wait for this one
                    left.remove(scan)
                    self._skip(scan, error)
                else:
                    left.remove(scan)
                    if self._together.is_first:
                        seconds = time.monotonic() - began
                        self._progress.said(f"{scan.images[0]} -> {scan.output} ({seconds:.1f} s)")
        finally:
            # Of the ranks that it has started, the command says what they leave.
            says = self._together.is_first and not (self._is_dealt and is_launched())
            if left and self._num_scans > 1 and says:
                self._progress.left(left_words(left, self._request.overwrite))

        self._together.from_first(lambda: None)  # which writes the last one, however long it takes

    def _skip(self, scan: Scan, error: Unet3dError | OSError) -> None:
        if not self._together.is_first:
            return
        if self._num_scans == 1:
            self._error = error
        elif isinstance(error, ResultExistsError):
            self._keep(scan)
        else:  # one bad scan of a folder must not stop the others
            if isinstance(error, OSError):
                error = Unet3dError(f"{scan.images[0]}: {reason_of(error)}")
            self._progress.failed(error)
            self._failures.append(scan.images[0])

    def _keep(self, scan: Scan) -> None:
        self._progress.said(f"{scan.images[0]} -> {scan.output} (kept; --overwrite replaces it)")

    def _segment(self, number: int, predictor: Predictor) -> None:
        scan, request = self._scans[number], self._request
        image: Image | None = None
        npy: Path | None = None
        with explaining_memory(str(scan.images[0])), ExitStack() as results:

            def begin() -> None:
                nonlocal image, npy
                if not request.overwrite:
                    # Another process may be at work in the same folder.
                    refuse_existing(scan, request)
                if request.probabilities:
                    npy = results.enter_context(
                        result_file(scan.probabilities, self._replaces(scan))
                    )
                self._progress.stage("reading")
                image = self._ahead.take(number)
                self._progress.stage("preparing")

            def windows_done(done: int, total: int) -> None:
                self._progress.windows_done(done, total)
                self._group.note(done, f"window {done} of {scan.images[0]}")

            self._together.from_first(begin, shares_errors=True)
            labels = predictor.segment(image, windows_done, self._scratch, npy)
            if image is None or labels is None:  # the first rank has them
                return
            self._write(scan, image, labels, predictor.label_names, results)
        for path in {scan.statistics, scan.preview, scan.probabilities} - {*scan.results(request)}:
            if os.path.lexists(path):
                logger.warning("%s was there before and may be of another segmentation", path)

    def _replaces(self, scan: Scan) -> bool:
        """Return whether results are replaced: of a scan that goes on, those of another network."""
        request = self._request
        is_begun = request.goes_on and any(map(os.path.lexists, scan.results(request)))
        return request.overwrite or is_begun

    def _write(
        self,
        scan: Scan,
        image: Image,
        labels: npt.NDArray[Any],
        names: dict[int, str],
        results: ExitStack,
    ) -> None:
        """Write all results, or none: some of them alone would have to be replaced."""
        request, replaces = self._request, self._replaces(scan)
        found = label_statistics(labels, image, names) if request.statistics else None
        self._progress.stage("writing")
        if request.preview:
            picture = results.enter_context(result_file(scan.preview, replaces))
            self._draw_preview(picture, image, labels, names)
        if found is not None:
            path = results.enter_context(result_file(scan.statistics, replaces))
            write_statistics(path, scan, found, self._known_as)
        write_segmentation(scan, labels, image.geometry, names, replaces)


def left_words(scans: Sequence[Scan], overwrite: bool) -> str:
    """Return which scans a command leaves that ends before its time."""
    # The same command would segment the others again where it replaces results.
    advice = "name these" if overwrite else "give the same command again"
    return f"Not segmented: {some([scan.images[0] for scan in scans])}; to go on, {advice}"
