"""``unet3d predict``."""

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.cli.checkpoints import wanted_checkpoints
from unet3d.cli.command import GivenSettings, command, grouped, setting
from unet3d.cli.options import (
    FILE,
    checkpoint_option,
    devices_option,
    folds_option,
    output_option,
    overwrite_option,
    parallel_option,
    reading_options,
)
from unet3d.cli.output import begin_as_rank, load_torch
from unet3d.errors import counted

if TYPE_CHECKING:
    from unet3d.distributed.ranks import Ranks


WAITING_COMMAND = "predict-when-told"
"""The command of a rank that is started before it is known what to do."""


def _part(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """Return number and total of a part, such as 3/32."""
    if value is None:
        return None
    number, _, total = value.partition("/")
    if not (number.isdecimal() and total.isdecimal()):
        raise click.BadParameter(f"{value!r} is no part such as 3/32.")
    return int(number), int(total)


def _crop(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> list[tuple[int | None, int | None]] | None:
    """Return the ends along X, Y, Z of a part along Z, Y, X, such as 0:50,:,100:."""
    if value is None:
        return None
    found = re.fullmatch(",".join([r"\s*(\d*):(\d*)\s*"] * 3), value, re.ASCII)
    if found is None:
        raise click.BadParameter(f"{value!r} is no part along Z, Y, X such as 0:50,:,100:400.")
    ends = [int(end) if end else None for end in found.groups()]
    return [(ends[4], ends[5]), (ends[2], ends[3]), (ends[0], ends[1])]


@command("unet3d predict scan.nii.gz", "unet3d predict scans/ -c runs/mine -o segmentations/")
@click.argument("images", type=FILE, nargs=-1, required=True)
@grouped(
    "Prediction",
    checkpoint_option(
        "Checkpoint, run, or model of nnU-Net as a folder or an archive; repeatable: several are "
        "averaged. Default: the newest finished run.",
        several=True,
    ),
    folds_option,
    setting(
        "inference.window",
        "--window",
        "X,Y,Z",
        "Voxels of a window, or whole; default: as in training.",
    ),
    setting(
        "inference.overlap",
        "--overlap",
        "SHARE",
        "Overlap of neighbouring windows, 0 to 0.95; default: as in training.",
    ),
    setting(
        "inference.precision",
        "--precision",
        "TYPE",
        "bfloat16, float16 or float32; default: depends on training and device.",
    ),
    setting(
        "inference.tta",
        "--tta/--no-tta",
        None,
        "Average over mirror images: up to 8 times the work; default: as in training.",
        default=None,
    ),
    setting(
        "inference.postprocessing",
        "--no-postprocessing",
        None,
        "Keep all components, even if validation chose to keep only the largest.",
        is_flag=True,
        flag_value=False,
        default=None,
    ),
    click.option(
        "--skip-background", is_flag=True, help="Skip windows of constant intensity, such as air."
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
        help="Folder for unpacked scans and labels, to save memory.",
    ),
)
@reading_options
@grouped(
    "Output",
    # Text, because a path does not keep the / at the end of a folder.
    output_option("File or folder; default: beside each image.", type_=click.Path()),
    click.option(
        "--statistics", is_flag=True, help="Also write volume and intensity of each label, as JSON."
    ),
    click.option(
        "--preview",
        is_flag=True,
        help="Also draw three planes, with outlines and volumes of labels, as PNG.",
    ),
    click.option(
        "--probabilities",
        is_flag=True,
        help="Also write the probability of each class, as a NumPy file in float16.",
    ),
    click.option(
        "--block",
        type=int,
        metavar="SIDE",
        help="Voxels along a side of the blocks of a large OME-Zarr; default: 512.",
    ),
    click.option(
        "--crop",
        callback=_crop,
        metavar="Z:Z,Y:Y,X:X",
        help="Segment only this part of an image into an OME-Zarr, such as 0:50,:,100:400; windows "
        "and statistics are those of the whole.",
    ),
    click.option(
        "--mask",
        type=FILE,
        help="Volume of the image's extent, in any resolution: where it is 0, voxels become "
        "background in the OME-Zarr, and blocks are not computed.",
    ),
    click.option(
        "--part",
        callback=_part,
        metavar="K/N",
        help="Segment only every N-th block, beginning with the K-th; default: any that are left.",
    ),
    click.option(
        "--status",
        is_flag=True,
        help="Only show how far the blocks of the store --output are.",
    ),
    click.option(
        "--continue",
        "goes_on",
        is_flag=True,
        help="Keep complete results, and write only the missing ones.",
    ),
    overwrite_option,
)
def predict(
    *,
    settings: GivenSettings,
    checkpoints: tuple[Path, ...],
    folds: tuple[int, ...] | None,
    status: bool,
    **asked: Any,
) -> None:
    """Segment IMAGES: scan.nii.gz becomes scan_seg.nii.gz.

    IMAGES are files, folders of files, or folders of DICOM or TIFF slices.
    """
    if status:
        _show_status(asked["output"])
        return
    if asked["goes_on"] and asked["overwrite"]:
        raise click.UsageError("--continue keeps results and --overwrite replaces them; drop one")
    if asked["scratch"] is not None and not os.path.isdir(asked["scratch"]):
        raise click.BadParameter(
            f"{asked['scratch']} is not a folder; name one on a disk with space",
            param_hint="'--scratch'",
        )
    settings.check_devices()
    from unet3d.inference.request import PredictionRequest
    from unet3d.inference.scan_search import refuse_early

    asked["settings"] = settings.changes
    ranks = begin_as_rank()
    if ranks.is_first:
        refuse_early(PredictionRequest.of(asked))
        checkpoints = wanted_checkpoints(checkpoints, folds)
        # Shown now, because loading takes seconds before anything else is shown.
        click.echo(f"using {_in_words(checkpoints)}")
    else:
        checkpoints = ()  # the first rank names the files
    with _ranks_ahead(settings, asked["images"], ranks):
        _run({**asked, "checkpoints": checkpoints}, ranks)


def _ranks_ahead(
    settings: GivenSettings, images: Sequence[Path], ranks: "Ranks"
) -> AbstractContextManager[None]:
    """Return a context in which ranks load PyTorch at once, if the command will probably need them.

    Otherwise they would begin to load it, which takes seconds, once this process has loaded it.
    """
    parallel = settings.config.parallel
    devices = parallel.devices or ()
    are_many = len(images) > 1 or os.path.isdir(images[0])
    suits = parallel.mode == "spatial" or (parallel.mode in ("auto", "data") and are_many)
    if len(devices) < 2 or not suits or ranks.world_size > 1:
        return nullcontext()
    from unet3d.distributed.commands import loading_ahead
    from unet3d.distributed.launcher import variables_of_ranks

    variables = variables_of_ranks(len(devices), on_gpus="cpu" not in devices)
    return loading_ahead(WAITING_COMMAND, len(devices), variables)


def _show_status(output: str | None) -> None:
    if output is None:
        raise click.UsageError("--status needs the store: -o result.ome.zarr")
    load_torch()
    from unet3d.inference.block_prediction import status
    from unet3d.reports.tables import duration

    found = status(Path(output))
    words = [f"{found.done} of {counted(found.num_blocks, 'block')} done"]
    if found.at_work:
        words.append(f"{found.at_work} at work")
    if found.given_up:
        words.append(f"{found.given_up} given up by processes that died")
    if found.done == found.num_blocks:
        words.append("complete" if found.is_complete else "coarser levels are not")
    elif found.seconds_left is not None:
        words.append(f"{duration(found.seconds_left)} left")
    click.echo(f"{output}: {', '.join(words)}")


@click.command("predict-as-rank", hidden=True)
@click.argument("request", type=FILE)
@click.option("--log", "logs", is_flag=True)
def predict_as_rank(request: Path, logs: bool) -> None:
    """Run as one rank of the prediction that a file describes."""
    from unet3d.inputs.reading import read_json

    _run(read_json(request), begin_as_rank(), logs)


@click.command(WAITING_COMMAND, hidden=True)
@click.pass_context
def predict_when_told(context: click.Context) -> None:
    """Load what a rank needs, then run the command that a line of stdin says, if one comes."""
    from unet3d.distributed.ranks import silence_torch

    silence_torch()
    load_torch()
    import unet3d.inference.prediction  # noqa: F401

    line = sys.stdin.readline()
    if line:
        arguments, variables = json.loads(line)
        os.environ |= variables
        context.find_root().command.main(arguments, "unet3d", standalone_mode=False)


def _run(asked: dict[str, Any], ranks: "Ranks", logs: bool = False) -> None:
    """Segment scans; progress goes to the log if ``logs``, otherwise to the terminal."""
    load_torch()
    from unet3d.api import draw_preview
    from unet3d.cli.terminal_progress import TerminalProgress
    from unet3d.inference import prediction
    from unet3d.inference.job import Progress
    from unet3d.inference.request import PredictionRequest

    request = PredictionRequest.of(asked)
    is_dealt = request.settings.get("parallel.mode") == "data"
    is_live = ranks.is_first and not is_dealt
    progress = Progress() if logs else TerminalProgress(is_live=is_live)
    prediction.predict(request, ranks, progress, draw_preview)


def _in_words(checkpoints: tuple[Path, ...]) -> str:
    from unet3d.nnunet.model_files import known_as

    names = ", ".join(str(known_as(path)) for path in checkpoints)
    several = len(checkpoints) > 1
    return f"the mean of {len(checkpoints)} networks: {names}" if several else names
