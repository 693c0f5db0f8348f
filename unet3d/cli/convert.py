"""``unet3d convert``."""

import logging
from pathlib import Path

import click

from unet3d.atomic import make_folder
from unet3d.cli.checkpoints import named_checkpoints
from unet3d.cli.command import command, grouped
from unet3d.cli.options import FILE, folds_option, output_option, overwrite_option
from unet3d.cli.output import check_result, load_torch, refuse_input, working
from unet3d.errors import ConfigError, reason_of

logger = logging.getLogger(__name__)

FILES = {
    *(".pt", ".pth", ".ckpt", ".pkl", ".bin", ".h5", ".npz", ".safetensors", ".onnx"),
    *(".zip", ".tar", ".gz", ".tgz", ".json", ".yaml", ".txt"),
}
"""Endings of names of files; the name of a folder may have others, such as ``models.v2``."""


@command(
    "unet3d convert nnUNetTrainer__nnUNetPlans__3d_fullres -o model.pt --folds 0",
    "unet3d convert runs/mine -o my_model --to nnunet",
)
@click.argument("model", type=FILE)
@grouped(
    "Conversion",
    click.option(
        "--to",
        "format_",
        type=click.Choice(["unet3d", "nnunet"]),
        default="unet3d",
        show_default=True,
        help="Write a checkpoint, or a model that nnUNetv2_predict takes.",
    ),
    folds_option,
)
@grouped(
    "Output",
    output_option(
        "Checkpoint file, or a folder for a model of nnU-Net or for checkpoints of several folds.",
        required=True,
    ),
    overwrite_option,
)
def convert(
    *, model: Path, folds: tuple[int, ...] | None, format_: str, output: Path, overwrite: bool
) -> None:
    """Turn a model of nnU-Net into a checkpoint, or back.

    MODEL is a folder or an archive of nnU-Net, or a checkpoint or a run of unet3d.
    """
    checkpoints = named_checkpoints([model], folds)
    above = [folder for path in checkpoints for folder in path.absolute().parents]
    refuse_input(output, *checkpoints, *(above if format_ == "nnunet" else ()))
    is_file = output.suffix.lower() in FILES and not output.is_dir()
    if is_file and (format_ == "nnunet" or output.suffix != ".pt"):
        what = "a folder" if format_ == "nnunet" else "a file *.pt, or a folder"
        raise ConfigError(f"{output} ends in {output.suffix}; name {what} with --output")
    if format_ == "nnunet":
        _write_model(checkpoints, output, overwrite=overwrite)
        return
    targets = {path: output for path in checkpoints}
    if not is_file:
        targets = _targets(checkpoints, output)
        try:
            make_folder(output)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {output}: {reason_of(error)}; choose another --output"
            ) from error
    elif len(checkpoints) > 1:
        raise ConfigError(
            f"the model has {len(checkpoints)} folds, but {output} holds one network; name a "
            "fold with --folds, or a folder with --output"
        )
    for target in targets.values():
        check_result(target, *checkpoints, overwrite=overwrite)
    load_torch()
    from unet3d.nnunet.loading import load_network
    from unet3d.nnunet.model_files import known_as
    from unet3d.runs.checkpoint import save_checkpoint

    for path, target in targets.items():
        with working(f"converting {path.parent.name}"):
            save_checkpoint(load_network(path), target)
        click.echo(f"{known_as(path)} -> {target}")


def _targets(checkpoints: tuple[Path, ...], folder: Path) -> dict[Path, Path]:
    """Return the output file of each checkpoint, named after its fold's folder or its own file."""
    are_folds = len({path.parent for path in checkpoints}) == len(checkpoints)
    return {
        path: folder / f"{(are_folds and path.parent.name) or path.stem}.pt" for path in checkpoints
    }


def _folds(checkpoints: tuple[Path, ...]) -> list[int | str]:
    """Return the fold of each checkpoint; if folds are unknown or equal, count from 0 instead."""
    from unet3d.nnunet.model_files import fold_of

    found = [fold for path in checkpoints if (fold := fold_of(path)) is not None]
    is_clear = len(set(found)) == len(checkpoints)
    return found if is_clear else [*range(len(checkpoints))]


def _write_model(checkpoints: tuple[Path, ...], output: Path, *, overwrite: bool) -> None:
    from unet3d.nnunet.loading import load_network
    from unet3d.nnunet.model_files import known_as
    from unet3d.nnunet.writing import write_model

    with working("converting"):
        networks = [load_network(path) for path in checkpoints]
        folds = dict(zip(_folds(checkpoints), networks, strict=True))
        write_model(folds, output, overwrite=overwrite)
    if networks[0].postprocessing:
        logger.warning(
            "nnU-Net keeps all components: it has a separate command for post-processing"
        )
    click.echo(f"{', '.join(str(known_as(path)) for path in checkpoints)} -> {output}")
