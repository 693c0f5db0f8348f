"""``unet3d convert``."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.options import FILE, files_of_checkpoints, folds_option
from unet3d.cli.output import check_writable, working
from unet3d.errors import ConfigError, ResultExistsError, reason_of

if TYPE_CHECKING:
    from unet3d.runs.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def _networks_of(
    context: click.Context, parameter: click.Parameter, path: Path
) -> tuple[Path, ...]:
    return files_of_checkpoints(context, parameter, (path,))


@click.command()
@click.argument("checkpoints", metavar="MODEL", type=FILE, callback=_networks_of)
@folds_option
@click.option(
    "--to",
    "format_",
    type=click.Choice(["unet3d", "nnunet"]),
    default="unet3d",
    show_default=True,
    help="What to write: a checkpoint, or a model that nnUNetv2_predict takes.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    required=True,
    help="File of a checkpoint, or a folder: of the checkpoints of several folds, or of nnU-Net's "
    "model.",
)
@click.option("--overwrite", is_flag=True, help="Replace existing checkpoints.")
def convert(
    *,
    checkpoints: tuple[Path, ...],
    folds: tuple[int | str, ...] | None,
    format_: str,
    output: Path,
    overwrite: bool,
) -> None:
    """Turn a trained model of nnU-Net into a checkpoint, or a checkpoint into such a model.

    MODEL is a folder or an archive of nnU-Net, or a checkpoint or a run of unet3d.
    """
    if format_ == "nnunet":
        _write_model(checkpoints, output)
        return
    targets = {path: output for path in checkpoints}
    if output.suffix != ".pt":
        targets = _targets(checkpoints, output)
        _make(output)
    elif len(checkpoints) > 1:
        raise ConfigError(
            f"it has {len(checkpoints)} folds, and {output} takes one network; name a fold with "
            "--folds, or a folder with --output"
        )
    for target in targets.values():
        if not overwrite and (target.is_symlink() or target.exists()):
            raise ResultExistsError(f"{target} exists; add --overwrite to replace it")
        check_writable(target)
    from unet3d.nnunet.layout import known_as
    from unet3d.runs.checkpoint import save_checkpoint

    for path, target in targets.items():
        with working(f"converting {path.parent.name}"):
            checkpoint = _read(path)
            save_checkpoint(checkpoint, target)
        click.echo(f"{known_as(path)} -> {target}")


def _targets(checkpoints: tuple[Path, ...], folder: Path) -> dict[Path, Path]:
    """Return a file for each network, named after the folder of its fold, or after its file."""
    are_folds = len({path.parent for path in checkpoints}) == len(checkpoints)
    return {
        path: folder / f"{path.parent.name if are_folds else path.stem}.pt" for path in checkpoints
    }


def _make(folder: Path) -> None:
    from unet3d.atomic import make_folder

    try:
        make_folder(folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {reason_of(error)}") from error


def _write_model(checkpoints: tuple[Path, ...], output: Path) -> None:
    from unet3d.nnunet.layout import known_as
    from unet3d.nnunet.writing import write_model

    with working("converting"):
        networks = [_read(path) for path in checkpoints]
        write_model(dict(enumerate(networks)), output)
    first = networks[0]
    if first.postprocessing:
        logger.warning(
            "nnU-Net keeps all components: it applies post-processing with a command of its own"
        )
    click.echo(f"{', '.join(str(known_as(path)) for path in checkpoints)} -> {output}")


def _read(path: Path) -> "Checkpoint":
    from unet3d.nnunet.reading import load_network

    return load_network(path)
