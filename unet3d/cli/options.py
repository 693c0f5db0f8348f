"""Options that several commands share, and what they mean as settings."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


FILE = click.Path(path_type=Path)


def files_of_checkpoints(
    context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Return the checkpoints that paths stand for, each of them once.

    Args:
        context: Of click; an archive is unpacked as long as it lasts.
        parameter: The option, or the argument.
        paths: Files and folders; see :func:`~unet3d.nnunet.model_files.networks_in`.

    Raises:
        CheckpointError: A folder has none.
    """
    folds = context.params.get("folds")
    if not paths:
        if folds is not None:
            raise click.UsageError("--folds needs the network whose folds are meant: --checkpoint")
        return ()
    from unet3d.nnunet.model_files import networks_in

    unpacked = context.with_resource(ExitStack())
    files = [file for path in dict.fromkeys(paths) for file in networks_in(path, folds, unpacked)]
    return tuple(dict.fromkeys(files))


def _files_of_first_rank(
    context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Return the checkpoints in the first rank, and none in others: they need no files."""
    from unet3d.distributed.ranks import Ranks

    if paths and not Ranks.from_environment().is_first:
        return ()
    return files_of_checkpoints(context, parameter, paths)


def checkpoint_option(what: str, *, for_ranks: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that adds the option which names networks.

    Args:
        what: What they are for.
        for_ranks: Whether the first rank gives what it has of them to the others, so that one
            archive is unpacked once.
    """
    return click.option(
        "-c",
        "--checkpoint",
        "checkpoints",
        type=FILE,
        multiple=True,
        callback=_files_of_first_rank if for_ranks else files_of_checkpoints,
        help=what,
    )


class Folds(click.ParamType[tuple[int, ...] | None]):
    """Folds of a network: ``0,2``, or ``all``."""

    name = "folds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | None:
        """Return numbers, or None for all."""
        from unet3d.runs.finding import chosen_folds

        try:
            return chosen_folds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class OneFold(click.ParamType[int | str]):
    """The fold that validates, or ``none``."""

    name = "fold"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return a number, or ``none``."""
        if value == "none":
            return "none"
        if not (str(value).isdecimal() and len(str(value)) <= 4):
            self.fail(f"{value} is no fold; give a number from 0, or none", param, ctx)
        return int(value)


folds_option = click.option(
    "--folds",
    type=Folds(),
    metavar="LIST",
    is_eager=True,  # before the networks are looked for
    help="Which folds of the network, such as 0,2; default: all that it has.",
)


PARALLEL_HELP = {
    "none": "one device",
    "data": "a replica on each",
    "spatial": "a slab of each volume on each",
    "model": "encoder on one device, decoder on the next",
    "auto": "the fastest that fits (default)",
}
"""What each mode means on several devices."""


def placement_options(*modes: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the options which say where the network runs.

    Args:
        modes: The modes that the command knows.
    """

    def add(function: Function) -> Function:
        for option in _placement_options(modes):
            function = option(function)
        return function

    return add


def _placement_options(modes: Sequence[str]) -> tuple[Callable[[Function], Function], ...]:
    return (
        click.option(
            "--devices",
            metavar="LIST",
            help="For example 0,1 or cuda:0 or cpu,cpu; --parallel says what is on each.",
        ),
        click.option(
            "--parallel",
            type=click.Choice(modes),
            help="; ".join(f"{mode}: {PARALLEL_HELP[mode]}" for mode in modes) + ".",
        ),
    )


class FiniteRange(click.FloatRange):
    """A number within bounds; a bound says nothing of ``nan``, which is refused, too."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


overwrite_option = click.option(
    "--overwrite", is_flag=True, help="Replace existing files that options name."
)


replicas_option = click.option(
    "--replicas",
    type=click.IntRange(min=1),
    help="Groups that --devices are divided into, each with a network on several of them.",
)


def config_options(function: Function) -> Function:
    """Add the options that name a configuration; each overrides what is named before it."""
    for option in (
        click.option(
            "--set",
            "overrides",
            metavar="KEY=VALUE",
            multiple=True,
            help="Override one setting, for example training.batch_size=4; repeatable.",
        ),
        click.option(
            "--preset",
            "presets",
            type=click.Choice(["quick", "full", "resenc-m", "resenc-l"]),
            multiple=True,
            help="Settings that belong together, over those of --config; repeatable.",
        ),
        click.option(
            "--config", "config_path", type=FILE, help="YAML file of settings; see configs/."
        ),
    ):
        function = option(function)
    return function


OPTION_OF_SETTING = {
    "patches.size": "--shape",
    "parallel.mode": "--parallel",
    "parallel.devices": "--devices",
    "parallel.replicas": "--replicas",
    "parallel.max_restarts": "--max-restarts",
    "training.batch_size": "--batch-size",
    "training.micro_batches": "--micro-batches",
    "training.epochs": "--epochs",
    "training.seed": "--seed",
    "training.init": "--init",
    "data.fold": "--fold",
    "inference.window": "--window",
    "inference.overlap": "--overlap",
}
"""Settings that have an option of their own in some commands."""


def named_as_typed(message: str, arguments: Sequence[str]) -> str:
    """Return an error's message with the options that were typed, where it names their settings.

    Args:
        message: Of any error.
        arguments: The command line.
    """
    typed = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    named = message
    for setting, option in OPTION_OF_SETTING.items():
        if option in typed:
            named = re.sub(rf"(?:--set )?(?<![\w.]){re.escape(setting)}(?![\w.]\w)", option, named)
    return named if named == message else named.removeprefix("settings: ")


def changes_of(values: dict[str, Any]) -> list[str]:
    """Return the options that were given as overrides of settings.

    Args:
        values: Dotted key to value; None where the option was not given.
    """
    given = {key: value for key, value in values.items() if value is not None}
    return [
        f"{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in given.items()
    ]
