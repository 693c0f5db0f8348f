"""``unet3d predict``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import CHECKPOINT, FILE, changes_of, placement_options
from unet3d.cli.output import begin_as_rank
from unet3d.cli.segmentation import Segmentation
from unet3d.errors import ConfigError

if TYPE_CHECKING:
    from unet3d.parallel import ParallelDims


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a user asks for, besides network and devices."""

    images: tuple[Path, ...]
    output: Path | None
    window: str | None
    overlap: float | None
    statistics: bool
    overwrite: bool

    def arguments(self) -> list[str]:
        """Return the same as a command line."""
        options = {"--output": self.output, "--window": self.window, "--overlap": self.overlap}
        flags = {"--statistics": self.statistics, "--overwrite": self.overwrite}
        return [
            *(f"{option}={value}" for option, value in options.items() if value is not None),
            *(flag for flag, is_given in flags.items() if is_given),
            "--",
            *map(str, self.images),
        ]


@click.command()
@click.argument("images", type=FILE, nargs=-1, required=True)
@click.option(
    "--checkpoint",
    "checkpoint_path",
    type=CHECKPOINT,
    help="A file, or the folder of a run; default: the newest finished run.",
)
@click.option("-o", "--output", type=FILE, help="File or folder; default: beside each image.")
@placement_options("auto", "none", "spatial", "model")
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
    from unet3d.distributed.launched import is_launched

    ranks = begin_as_rank()
    if checkpoint_path is None and ranks.is_first:
        checkpoint_path = _newest_checkpoint()
    if ranks.is_first and not is_launched():
        # What follows takes seconds before anything else can be seen.
        click.echo(f"using {checkpoint_path}")

    from unet3d.distributed.purpose import PREDICTION
    from unet3d.distributed.rendezvous import joined
    from unet3d.inference.placing import choose_mode
    from unet3d.inference.predictor import Predictor
    from unet3d.parallel import ParallelDims
    from unet3d.runs.checkpoint import load_checkpoint
    from unet3d.volumes.scan_search import find_scans

    request = _Request(
        images=images,
        output=output,
        window=window,
        overlap=overlap,
        statistics=statistics,
        overwrite=overwrite,
    )
    # The devices of training say nothing about those of prediction.
    placement = changes_of({"parallel.mode": parallel, "parallel.devices": devices})
    timeout_seconds = load_config(None, placement).parallel.timeout_seconds
    with joined(ranks, PREDICTION) as group:
        group.open(timeout_seconds)
        path = checkpoint_path or Path()  # only the first rank needs it
        checkpoint = group.file_from_first(path, load_checkpoint)
        trained = checkpoint.config.inference
        windows = changes_of(
            {
                "inference.window": window or trained.window,
                "inference.overlap": trained.overlap if overlap is None else overlap,
                "inference.batch_size": trained.batch_size,
            }
        )
        settings = load_config(None, [*placement, *windows])
        spread = choose_mode(settings.parallel, checkpoint, settings.inference.window, ranks)
        dims = ParallelDims.resolve(spread, ranks=ranks)
        if dims.num_processes > group.size:
            _start_ranks(request, path, dims)
            return
        job = None
        if group.is_first:
            num_channels = len(checkpoint.preprocessing.channels)
            scans = find_scans(images, output, num_channels, overwrite, statistics)
            job = Segmentation(scans, statistics=statistics, overwrite=overwrite)
        if group.from_first(lambda: job is not None and job.has_work):
            predictor = Predictor(checkpoint, spread, settings.inference, group)
            if job is None:
                predictor.follow()
            else:
                job.segment(predictor)
    # Only now, because ranks that miss the first one would wait for it.
    if job is not None and job.error is not None:
        raise job.error


def _start_ranks(request: _Request, checkpoint: Path, dims: "ParallelDims") -> None:
    """Segment in a process for each device.

    Raises:
        Unet3dError: A rank failed; the reason of the first one that did.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the ranks have ended.
    """
    from unet3d.distributed.launcher import launch, meeting_folder
    from unet3d.distributed.purpose import PREDICTION

    placement = {
        "--checkpoint": checkpoint,
        "--parallel": dims.mode,
        "--devices": ",".join(map(str, dims.all_devices)),
    }
    with meeting_folder() as folder:
        launch(
            [
                "predict",
                *(f"{option}={value}" for option, value in placement.items()),
                *request.arguments(),
            ],
            folder,
            num_ranks=dims.num_processes,
            max_restarts=0,
            on_gpus=any(device.type == "cuda" for device in dims.all_devices),
            purpose=PREDICTION,
        )


def _newest_checkpoint() -> Path:
    from unet3d.runs.run_folder import RUNS, newest_run

    run = newest_run(finished=True)
    if run is None:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    return run.latest
