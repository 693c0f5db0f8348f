"""``unet3d predict``."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.cli.checkpoints import newest_checkpoints, trained_inference
from unet3d.cli.command import Command, GivenSettings, Setting, examples, grouped
from unet3d.cli.dealing import from_plain, showing_left, to_plain
from unet3d.cli.options import (
    FILE,
    checkpoint_option,
    devices_option,
    folds_option,
    output_option,
    overwrite_option,
    parallel_option,
)
from unet3d.cli.output import begin_as_rank, imports_at_once
from unet3d.cli.segmentation import Segmentation

if TYPE_CHECKING:
    from unet3d.config import InferenceSettings
    from unet3d.inference.networks import Networks
    from unet3d.inference.scan_search import FoundScans
    from unet3d.inference.scans import Wanted
    from unet3d.parallel import ParallelDims

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a user asks for, besides network and devices."""

    images: tuple[Path, ...]
    output: Path | None
    inference: Mapping[str, Any]
    """Settings of prediction, dotted key to value."""
    statistics: bool
    preview: bool
    probabilities: bool
    skip_background: bool
    scratch: Path | None
    goes_on: bool
    overwrite: bool

    def wanted(self) -> "Wanted":
        """Return what is to be written."""
        from unet3d.inference.scans import Wanted

        return Wanted(
            statistics=self.statistics,
            preview=self.preview,
            probabilities=self.probabilities,
            overwrite=self.overwrite,
            goes_on=self.goes_on,
        )

    def arguments(self) -> list[str]:
        """Return the same as a command line."""
        window = self.inference.get("inference.window")
        options = {
            "--output": self.output,
            "--window": ",".join(map(str, window)) if isinstance(window, list) else window,
            "--overlap": self.inference.get("inference.overlap"),
            "--precision": self.inference.get("inference.precision"),
            "--scratch": self.scratch,
        }
        flags = {
            "--tta": self.inference.get("inference.tta") is True,
            "--no-tta": self.inference.get("inference.tta") is False,
            "--statistics": self.statistics,
            "--preview": self.preview,
            "--probabilities": self.probabilities,
            "--no-postprocessing": "inference.postprocessing" in self.inference,
            "--skip-background": self.skip_background,
            "--continue": self.goes_on,
            "--overwrite": self.overwrite,
        }
        return [
            *(f"{option}={value}" for option, value in options.items() if value is not None),
            *(flag for flag, is_given in flags.items() if is_given),
            "--",
            *map(str, self.images),
        ]


@click.command(
    cls=Command,
    epilog=examples(
        "unet3d predict scan.nii.gz",
        "unet3d predict scans/ -c runs/mine -o segmentations/",
    ),
)
@click.argument("images", type=FILE, nargs=-1, required=True)
@grouped(
    "Prediction",
    checkpoint_option(
        "Checkpoint, run, or model of nnU-Net as a folder or an archive; repeatable: several are "
        "averaged. Default: the newest finished run.",
        for_ranks=True,
    ),
    folds_option,
    click.option(
        "--window",
        cls=Setting,
        setting="inference.window",
        metavar="X,Y,Z",
        help="Voxels of a window, or whole; default: as in training.",
    ),
    click.option(
        "--overlap",
        cls=Setting,
        setting="inference.overlap",
        metavar="SHARE",
        help="Share of a window that its neighbour covers too, 0 to 0.95; default: as in training.",
    ),
    click.option(
        "--precision",
        cls=Setting,
        setting="inference.precision",
        metavar="TYPE",
        help="bfloat16, float16 or float32; default: what suits training and device.",
    ),
    click.option(
        "--tta/--no-tta",
        cls=Setting,
        setting="inference.tta",
        default=None,
        help="Average over mirror images: up to 8 times the work; default: as in training.",
    ),
    click.option(
        "--no-postprocessing",
        cls=Setting,
        setting="inference.postprocessing",
        is_flag=True,
        flag_value=False,
        default=None,
        help="Keep all components, also where validation has shown that the largest is better.",
    ),
    click.option(
        "--skip-background",
        is_flag=True,
        help="Skip windows of constant intensity, such as air.",
    ),
)
@grouped(
    "Devices",
    devices_option,
    parallel_option,
    click.option(
        "--scratch",
        type=FILE,
        metavar="DIR",
        help="Keep unpacked scans and labels in files there, and not in memory.",
    ),
)
@grouped(
    "Output",
    output_option("File or folder; default: beside each image."),
    click.option(
        "--statistics", is_flag=True, help="Also write mL and intensity of each label, as JSON."
    ),
    click.option(
        "--preview", is_flag=True, help="Also draw three planes with outlines and mL, as PNG."
    ),
    click.option(
        "--probabilities",
        is_flag=True,
        help="Also write the probability of each class, as a NumPy file in float16.",
    ),
    click.option(
        "--continue",
        "goes_on",
        is_flag=True,
        help="Keep results that are complete, and make the others.",
    ),
    overwrite_option,
)
def predict(
    *,
    images: tuple[Path, ...],
    settings: GivenSettings,
    checkpoints: tuple[Path, ...],
    folds: tuple[int | str, ...] | None,
    output: Path | None,
    statistics: bool,
    preview: bool,
    probabilities: bool,
    skip_background: bool,
    scratch: Path | None,
    goes_on: bool,
    overwrite: bool,
) -> None:
    """Segment IMAGES: scan.nii.gz becomes scan_seg.nii.gz.

    IMAGES are files, folders of files, or folders of DICOM slices.
    """
    if goes_on and overwrite:
        raise click.UsageError("--continue keeps results and --overwrite replaces them; drop one")
    if scratch is not None and not os.path.isdir(scratch):
        raise click.BadParameter(
            f"{scratch} is no folder; name one on a disk with space", param_hint="'--scratch'"
        )
    settings.check()
    from unet3d.distributed import is_launched

    ranks = begin_as_rank()
    if not checkpoints and ranks.is_first:
        checkpoints = newest_checkpoints()
    if ranks.is_first and not is_launched():
        # What follows takes seconds before anything else can be seen.
        click.echo(f"using {_in_words(_known(checkpoints))}")

    with imports_at_once():
        from unet3d.config import load_config
        from unet3d.distributed.ranks import PREDICTION
        from unet3d.distributed.rendezvous import joined
        from unet3d.images.scratch import Scratch
        from unet3d.inference.mode_choice import choose_mode
        from unet3d.inference.networks import Networks
        from unet3d.inference.predictor import Predictor
        from unet3d.inference.scan_search import find_scans
        from unet3d.parallel import ParallelDims

    inference_changes = {
        key: value for key, value in settings.changes.items() if key.startswith("inference.")
    }
    request = _Request(
        images=images,
        output=output,
        inference=inference_changes,
        statistics=statistics,
        preview=preview,
        probabilities=probabilities,
        skip_background=skip_background,
        scratch=scratch,
        goes_on=goes_on,
        overwrite=overwrite,
    )
    # The devices of training say nothing about those of prediction.
    parallel_settings = settings.config.parallel
    with joined(ranks, PREDICTION) as group:
        group.open(parallel_settings.timeout_seconds)
        # The first rank alone has the files.
        known = [Path(name) for name in group.from_first(lambda: _known(checkpoints))]
        networks = Networks.read(checkpoints if group.is_first else known, group)
        inference = [
            load_config(None, {**trained_inference(network), **inference_changes}).inference
            for network in networks.described
        ]
        spread = choose_mode(parallel_settings, networks, inference, ranks)
        dims = ParallelDims.resolve(spread, ranks=ranks)
        if dims.num_shards > group.size:
            _start_ranks(request, checkpoints, dims)
            return
        num_channels = len(networks.preprocessing.channels)
        wanted = request.wanted()

        def found() -> "FoundScans":
            return find_scans(images, output, num_channels, wanted)

        is_dealt = dims.mode == "data" and group.size > 1
        job = None
        if is_dealt:
            scans = group.from_first(found, to_plain=to_plain, from_plain=from_plain)
            job = Segmentation(scans, known, wanted, Scratch(scratch), group)
            for room in ("unet3d.images", "unet3d.inference.scans"):  # which begin to be read
                _say_all_of(room)
        elif group.is_first:
            scans = found()
            if 1 < dims.num_replicas <= len(scans.to_segment):
                logger.info(
                    "%d scans dealt to %d devices", len(scans.to_segment), dims.num_replicas
                )
                with showing_left(scans.to_segment, overwrite):
                    _start_ranks(request, checkpoints, dims)
                return
            job = Segmentation(scans, known, wanted, Scratch(scratch))
        if job is not None:
            job.begin()
        if job is not None and is_dealt:
            _segment_share(job, networks, dims, inference, skips_empty=skip_background)
        elif group.from_first(lambda: job is not None and job.has_work):
            predictor = Predictor(networks, spread, inference, group, skips_empty=skip_background)
            if job is None:
                predictor.follow()
            else:
                job.segment(predictor)
    # Only now, because ranks that miss the first one would wait for it.
    if job is not None and job.error is not None:
        raise job.error


def _segment_share(
    job: Segmentation,
    networks: "Networks",
    dims: "ParallelDims",
    inference: "list[InferenceSettings]",
    *,
    skips_empty: bool,
) -> None:
    """Segment the scans that this rank has, on its own device; all ranks call it."""
    from unet3d.config import ParallelSettings
    from unet3d.inference.predictor import Predictor

    if job.has_work:
        alone = ParallelSettings(mode="none", devices=tuple(map(str, dims.devices)))
        predictor = Predictor(networks, alone, inference, skips_empty=skips_empty)
        _say_all_of("unet3d")
        job.segment(predictor)
    job.gather()


def _say_all_of(name: str) -> None:
    """Let this rank log there, too, because of its own scans no other rank says anything."""
    level = logging.getLogger("unet3d").level
    logging.getLogger(name).setLevel(min(level, logging.INFO))


def _start_ranks(request: _Request, checkpoints: tuple[Path, ...], dims: "ParallelDims") -> None:
    """Segment in a process for each device.

    Raises:
        Unet3dError: A rank failed; the reason of the first one that did.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after the ranks have ended.
    """
    from unet3d.distributed.launcher import launch, meeting_folder
    from unet3d.distributed.ranks import PREDICTION

    placement = {
        "--parallel": dims.mode,
        "--devices": ",".join(map(str, dims.all_devices)),
    }
    with meeting_folder() as folder:
        launch(
            [
                "predict",
                *(f"--checkpoint={path}" for path in checkpoints),
                *(f"{option}={value}" for option, value in placement.items()),
                *request.arguments(),
            ],
            folder,
            num_ranks=dims.num_processes,
            max_restarts=0,
            on_gpus=any(device.type == "cuda" for device in dims.all_devices),
            purpose=PREDICTION,
        )


def _known(checkpoints: tuple[Path, ...]) -> list[str]:
    """Return what a user knows networks by."""
    from unet3d.nnunet.model_files import known_as

    return [str(known_as(path)) for path in checkpoints]


def _in_words(networks: list[str]) -> str:
    names = ", ".join(networks)
    return names if len(networks) == 1 else f"the mean of {len(networks)} networks: {names}"
