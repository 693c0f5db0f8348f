"""``unet3d predict``."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import CHECKPOINT, FILE, changes_of, mode_for, placement_options
from unet3d.cli.output import show_error
from unet3d.errors import (
    ConfigError,
    DatasetError,
    ResultExistsError,
    Unet3dError,
    VolumeError,
    reason_of,
    some,
)

if TYPE_CHECKING:
    from unet3d.inference.predictor import Predictor
    from unet3d.reports.scan_progress import ScanProgress
    from unet3d.volumes.scans import Scan

logger = logging.getLogger(__name__)


@click.command()
@click.argument("images", type=FILE, nargs=-1, required=True)
@click.option(
    "--checkpoint",
    "checkpoint_path",
    type=CHECKPOINT,
    help="A file, or the folder of a run; default: the newest finished run.",
)
@click.option("-o", "--output", type=FILE, help="File or folder; default: beside each image.")
@placement_options("none", "model")
@click.option(
    "--overlap",
    type=click.FloatRange(0, 1, max_open=True),
    help="Share of a window that its neighbour covers too.",
)
@click.option(
    "--window", metavar="X,Y,Z", help="Voxels of a window, or whole; default: as in training."
)
@click.option("--statistics", is_flag=True, help="Also write mL and intensity of each label.")
@click.option("--overwrite", is_flag=True, help="Replace existing segmentations.")
def predict(
    *,
    images: tuple[Path, ...],
    checkpoint_path: Path | None,
    output: Path | None,
    parallel: str | None,
    devices: str | None,
    overlap: float | None,
    window: str | None,
    statistics: bool,
    overwrite: bool,
) -> None:
    """Segment IMAGES, files or folders: scan.nii.gz becomes scan_seg.nii.gz."""
    from unet3d.config import load_config

    if checkpoint_path is None:
        checkpoint_path = _newest_checkpoint()
    # What follows takes seconds before anything else can be seen.
    click.echo(f"using {checkpoint_path}")

    from unet3d.inference.predictor import Predictor
    from unet3d.runs.checkpoint import load_checkpoint
    from unet3d.volumes.scan_search import find_scans

    checkpoint = load_checkpoint(checkpoint_path)
    settings = load_config(
        None,
        changes_of(
            {
                # The devices of training say nothing about those of prediction.
                "parallel.mode": parallel or mode_for(devices),
                "parallel.devices": devices,
                "inference.window": window or checkpoint.config.inference.window,
                "inference.overlap": (
                    checkpoint.config.inference.overlap if overlap is None else overlap
                ),
                "inference.batch_size": checkpoint.config.inference.batch_size,
            }
        ),
    )
    num_channels = len(checkpoint.preprocessing.channels)
    found = find_scans(images, output, num_channels, overwrite, statistics)
    for scan in found.kept:
        _show_kept(scan)
    for _, error in found.faults:
        show_error(error, "Skipped")
    failures = [scan for scan, _ in found.faults]
    if found.to_segment:
        predictor = Predictor(checkpoint, settings.parallel, settings.inference)
        is_alone = len(found.to_segment) + len(found.kept) + len(failures) == 1
        failures += _segment_all(
            found.to_segment, predictor, statistics=statistics, overwrite=overwrite, alone=is_alone
        )
    if failures:
        num_scans = len(found.to_segment) + len(found.kept) + len(found.faults)
        raise DatasetError(
            f"{len(failures)} of {num_scans} scans could not be segmented: {_names(failures)}"
        )


def _segment_all(
    scans: Sequence["Scan"],
    predictor: "Predictor",
    *,
    statistics: bool,
    overwrite: bool,
    alone: bool,
) -> list["Scan"]:
    """Segment one scan after the other, and return those that could not be."""
    from rich.console import Console

    from unet3d.reports.scan_progress import ScanProgress

    progress = ScanProgress(Console(stderr=True), len(scans))
    failures = []
    left = list(scans)
    try:
        for number, scan in enumerate(scans, start=1):
            began = time.monotonic()
            try:
                with progress.shown(number, scan.images[0].name):
                    _segment(scan, predictor, progress, statistics=statistics, overwrite=overwrite)
            except (Unet3dError, OSError) as error:
                if alone:
                    raise
                left.remove(scan)
                if isinstance(error, ResultExistsError):
                    _show_kept(scan)
                    continue
                # One bad scan of a folder must not stop the others.
                if isinstance(error, OSError):
                    error = Unet3dError(f"{scan.images[0]}: {reason_of(error)}")
                show_error(error, "Skipped")
                failures.append(scan)
            else:
                left.remove(scan)
                seconds = time.monotonic() - began
                click.echo(f"{scan.images[0]} -> {scan.output} ({seconds:.1f} s)")
    finally:
        if left and not alone:
            advice = "name these" if overwrite else "give the same command again"
            click.echo(f"Not segmented: {_names(left)}; to go on, {advice}", err=True)
    return failures


def _segment(
    scan: "Scan",
    predictor: "Predictor",
    progress: "ScanProgress",
    *,
    statistics: bool,
    overwrite: bool,
) -> None:
    from unet3d.volumes.memory_limits import explaining_memory
    from unet3d.volumes.scan_search import refuse_existing
    from unet3d.volumes.scans import (
        label_statistics,
        read_scan,
        stamps,
        write_segmentation,
        write_statistics,
    )

    if not overwrite:
        refuse_existing(scan, statistics)  # another process may be at work in the same folder
    before = stamps(scan)
    with explaining_memory(str(scan.images[0])):
        progress.stage("reading")
        image = read_scan(scan)
        progress.stage("preparing")
        labels = predictor.segment(image, progress.windows_done)
        found = label_statistics(labels, image, predictor.label_names) if statistics else None
        progress.stage("writing")
        if stamps(scan) != before:
            raise VolumeError(
                f"{scan.images[0]} was changed while it was segmented, so nothing is written; "
                "segment it again"
            )
        write_segmentation(scan, labels, image.header, overwrite)
        if found is not None:
            write_statistics(scan, found, overwrite)
    if not statistics and os.path.lexists(scan.statistics):
        logger.warning(
            "%s was there before and may describe another segmentation; --statistics writes it",
            scan.statistics,
        )


def _show_kept(scan: "Scan") -> None:
    click.echo(f"{scan.images[0]} -> {scan.output} (kept; --overwrite replaces it)")


def _names(scans: Sequence["Scan"]) -> str:
    return some([scan.images[0] for scan in scans])


def _newest_checkpoint() -> Path:
    from unet3d.runs.run_folder import RUNS, newest_run

    run = newest_run(finished=True)
    if run is None:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    return run.best if run.best.exists() else run.latest
