"""``unet3d predict``."""

import time
from pathlib import Path

import click

from unet3d.cli.options import FILE, changes_of, mode_for, placement_options
from unet3d.cli.output import show_error
from unet3d.errors import ConfigError, DatasetError, Unet3dError


@click.command()
@click.argument("images", type=FILE, nargs=-1, required=True)
@click.option(
    "--checkpoint", "checkpoint_path", type=FILE, help="Default: the one of the newest run."
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

    from unet3d.inference.predictor import Predictor
    from unet3d.runs.checkpoint import load_checkpoint
    from unet3d.volumes.scans import (
        find_scans,
        label_statistics,
        read_scan,
        write_segmentation,
        write_statistics,
    )

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
    preprocessing = checkpoint.preprocessing
    scans = find_scans(images, output, len(preprocessing.channels), overwrite, statistics)
    predictor = Predictor(checkpoint, settings.parallel, settings.inference)
    names = dict(zip(preprocessing.label_values, preprocessing.label_names, strict=True))
    del names[preprocessing.label_values[0]]
    failures: list[str] = []
    for scan in scans:
        began = time.monotonic()
        try:
            image = read_scan(scan)
            labels = predictor.segment(image)
            write_segmentation(scan, labels, image.header)
            if statistics:
                write_statistics(scan, label_statistics(labels, image, names))
        except Unet3dError as error:
            # One bad scan of a folder must not stop the others.
            if len(scans) == 1:
                raise
            show_error(error, "Skipped")
            failures.append(str(scan.images[0]))
            continue
        click.echo(f"{scan.images[0]} -> {scan.output} ({time.monotonic() - began:.1f} s)")
    if failures:
        raise DatasetError(f"{len(failures)} of {len(scans)} scans could not be segmented")


def _newest_checkpoint() -> Path:
    from unet3d.runs.run_folder import RUNS, newest_run

    run = newest_run(finished=True)
    if run is None:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    path = run.best if run.best.exists() else run.latest
    click.echo(f"using {path}")
    return path
