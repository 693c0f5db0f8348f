"""One scan after the other, from file to file: what ``unet3d predict`` shows, skips and refuses."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.cli.dealing import show_left
from unet3d.cli.output import show_error
from unet3d.distributed import is_launched
from unet3d.errors import (
    CheckpointError,
    DatasetError,
    RankError,
    ResultExistsError,
    Unet3dError,
    VolumeError,
    reason_of,
    some,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

    from unet3d.distributed.group import Group
    from unet3d.images.image import Image
    from unet3d.images.scratch import Scratch
    from unet3d.inference.predictor import Predictor
    from unet3d.inference.scan_search import FoundScans
    from unet3d.inference.scans import Scan, Wanted
    from unet3d.reports.scan_progress import ScanProgress

logger = logging.getLogger(__name__)


class Segmentation:
    """The scans of one command, or those of them that this rank has."""

    def __init__(
        self,
        scans: "FoundScans",
        checkpoints: Sequence[Path],
        wanted: "Wanted",
        scratch: "Scratch",
        dealt_to: "Group | None" = None,
    ) -> None:
        """Say which scans need nothing, and which cannot be segmented.

        Args:
            scans: What was asked for.
            checkpoints: What a user knows the networks by, for the statistics.
            wanted: What is to be written.
            scratch: Where scans and their labels are while they are worked on.
            dealt_to: The ranks that scans are dealt to; None: this process has them all.
        """
        from unet3d.inference.scans import ScansAhead

        ranks = dealt_to.ranks if dealt_to is not None else None
        self._group = dealt_to
        self._scans = (
            scans.to_segment[ranks.rank :: ranks.world_size] if ranks else scans.to_segment
        )
        self._checkpoints = checkpoints
        self._num_scans = len(scans.to_segment) + len(scans.kept) + len(scans.faults)
        self._failures: list[Path] = []
        self._error: Unet3dError | OSError | None = None
        self._wanted = wanted
        self._scratch = scratch
        self._ahead = ScansAhead(self._scans, scratch)
        if ranks is not None and not ranks.is_first:
            return
        for scan in scans.kept:
            _show_kept(scan)
        for scan, error in scans.faults:
            self._failures.append(scan.images[0])
            show_error(error, "Skipped")

    def begin(self) -> None:
        """Begin to read, while networks are placed on their devices."""
        self._ahead.begin()

    @property
    def has_work(self) -> bool:
        """Whether there is a scan to segment."""
        return bool(self._scans)

    @property
    def error(self) -> Unet3dError | OSError | None:
        """What the command ends with: why the only scan failed, or which ones did."""
        if self._error is None and self._failures:
            return DatasetError(
                f"{len(self._failures)} of {self._num_scans} scans could not be segmented: "
                f"{some(self._failures)}"
            )
        return self._error

    def gather(self) -> None:
        """Leave the failures of all ranks that scans are dealt to with the first one.

        Raises:
            RankError: Another rank hangs.
        """
        if self._group is not None:
            of_ranks = self._group.exchange([str(path) for path in self._failures])
            is_first = self._group.is_first
            self._failures = [Path(path) for paths in of_ranks for path in paths if is_first]

    def segment(self, predictor: "Predictor") -> None:
        """Segment one scan after the other, then let the ranks go that follow.

        Args:
            predictor: The network.

        Raises:
            CheckpointError: One of several networks cannot be used.
            RankError: Another rank died or hangs, so that nothing more can be segmented.
        """
        from rich.console import Console

        from unet3d.reports.scan_progress import ScanProgress

        predictor.warm_up()
        # Ranks would write their live lines into those of one another.
        is_terminal = None if self._group is None else False
        console = Console(stderr=True, force_terminal=is_terminal)
        progress = ScanProgress(console, len(self._scans))
        left = list(self._scans)
        is_alone = self._num_scans == 1
        try:
            for number, scan in enumerate(self._scans, start=1):
                began = time.monotonic()
                try:
                    with progress.shown(number, scan.images[0].name):
                        self._write(number - 1, predictor, progress)
                except (CheckpointError, RankError):
                    raise
                except (Unet3dError, OSError) as error:
                    left.remove(scan)
                    if is_alone:
                        self._error = error
                    else:
                        # One bad scan of a folder must not stop the others.
                        self._skip(scan, error)
                else:
                    left.remove(scan)
                    seconds = time.monotonic() - began
                    click.echo(f"{scan.images[0]} -> {scan.output} ({seconds:.1f} s)")
        finally:
            # Of the ranks that it has started, the command says what they leave.
            if not is_alone and (self._group is None or not is_launched()):
                show_left(left, self._wanted.overwrite)
        predictor.end()

    def _skip(self, scan: "Scan", error: Unet3dError | OSError) -> None:
        if isinstance(error, ResultExistsError):
            _show_kept(scan)
            return
        if isinstance(error, OSError):
            error = Unet3dError(f"{scan.images[0]}: {reason_of(error)}")
        show_error(error, "Skipped")
        self._failures.append(scan.images[0])

    def _write(self, number: int, predictor: "Predictor", progress: "ScanProgress") -> None:
        from unet3d.images.memory_limits import explaining_memory
        from unet3d.inference.scan_search import refuse_existing
        from unet3d.inference.scans import (
            label_statistics,
            result_file,
            stamps,
            write_segmentation,
            write_statistics,
        )

        scan, wanted = self._scans[number], self._wanted
        if not wanted.overwrite:
            # Another process may be at work in the same folder.
            refuse_existing(scan, wanted)
        # Of a scan that goes on some results may be there, which belong to another segmentation.
        is_begun = wanted.goes_on and any(map(os.path.lexists, scan.results(wanted)))
        replaces = wanted.overwrite or is_begun
        with explaining_memory(str(scan.images[0])), ExitStack() as results:
            npy = None
            if wanted.probabilities:
                npy = results.enter_context(result_file(scan.probabilities, replaces))
            progress.stage("reading")
            image, before = self._ahead.take(number)
            progress.stage("preparing")

            def windows_done(done: int, total: int) -> None:
                progress.windows_done(done, total)
                if self._group is not None:
                    self._group.note(done, f"window {done} of {scan.images[0]}")

            labels = predictor.segment(image, windows_done, self._scratch, npy)
            names = predictor.label_names
            found = label_statistics(labels, image, names) if wanted.statistics else None
            figure = _figure(scan, image, labels, names) if wanted.preview else None
            progress.stage("writing")
            if stamps(scan) != before:
                raise VolumeError(
                    f"{scan.images[0]} was changed while it was segmented, so nothing is written; "
                    "segment it again"
                )
            # A disk that is full leaves none: some of them alone would have to be replaced.
            if figure is not None:
                from unet3d.reports.format import save_figure

                save_figure(figure, results.enter_context(result_file(scan.preview, replaces)))
            if found is not None:
                path = results.enter_context(result_file(scan.statistics, replaces))
                write_statistics(path, scan, found, self._checkpoints)
            write_segmentation(scan, labels, image.geometry, names, replaces)
        for path, is_written, verb, option in (
            (scan.statistics, wanted.statistics, "describe", "--statistics"),
            (scan.preview, wanted.preview, "show", "--preview"),
            (scan.probabilities, wanted.probabilities, "belong to", "--probabilities"),
        ):
            if not is_written and os.path.lexists(path):
                logger.warning(
                    "%s was there before and may %s another segmentation; %s writes it",
                    path,
                    verb,
                    option,
                )


def _figure(
    scan: "Scan", image: "Image", labels: "npt.NDArray[Any]", label_names: dict[int, str]
) -> "Figure":
    from unet3d.images.geometry import voxel_mm3
    from unet3d.reports.planes import Structure
    from unet3d.reports.preview import Preview, preview_figure

    return preview_figure(
        Preview(
            title=scan.images[0].name,
            image=image,
            labels=labels,
            structures=[
                Structure(name=name, values=(value,)) for value, name in label_names.items()
            ],
            spacing_mm=image.geometry.spacing_mm,
            voxel_ml=voxel_mm3(image.geometry.affine) / 1000,
        )
    )


def _show_kept(scan: "Scan") -> None:
    click.echo(f"{scan.images[0]} -> {scan.output} (kept; --overwrite replaces it)")
