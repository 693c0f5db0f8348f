"""Options that several commands share, each declared once."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from unet3d.cli.command import COMMON, grouped, setting

Function = TypeVar("Function", bound=Callable[..., Any])


FILE = click.Path(path_type=Path)


def checkpoint_option(help_: str, *, several: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that adds the option which names networks."""
    names = ("-c", "--checkpoint", "checkpoints" if several else "checkpoint")
    return click.option(*names, type=FILE, multiple=several, help=help_)


def _folds(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    from unet3d.runs.finding import chosen_folds

    try:
        return chosen_folds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


folds_option = click.option(
    "--folds",
    metavar="LIST",
    callback=_folds,
    help="Which folds of the network, such as 0,2; default: all that it has.",
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


common_options = grouped(
    COMMON,
    click.option("--config", "config_path", type=FILE, help="YAML file of settings; see configs/."),
    click.option(
        "--preset",
        "presets",
        metavar="NAME",
        multiple=True,
        help="Settings that belong together, over those of --config: quick (50 epochs), full "
        "(1000), resenc-m or resenc-l (nnU-Net's residual encoders); repeatable.",
    ),
    click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="One setting, such as training.batch_size=4; repeatable. unet3d config lists all.",
    ),
)
"""Options that name a configuration; each counts more than those before it."""

devices_option = setting(
    "parallel.devices",
    "--devices",
    "LIST",
    "GPUs such as 0,1, or cpu; default: GPU 0, or the CPU where there is none.",
)

parallel_option = setting(
    "parallel.mode",
    "--parallel",
    "MODE",
    "What is on each device. data: a copy of the network; spatial: a slab of each volume; "
    "model: a part of the network; none: there is one device; auto: the fastest that fits "
    "(default).",
)

replicas_option = setting(
    "parallel.replicas",
    "--replicas",
    "R",
    "Groups that --devices are divided into, each with a network on several of them.",
)

batch_options = (
    setting(
        "training.batch_size",
        "--batch-size",
        "N",
        "Patches in a step; default: as many as suit the data.",
    ),
    setting(
        "training.micro_batches",
        "--micro-batches",
        "M",
        "Portions of a batch, which keep all devices of --parallel model busy.",
    ),
)

overwrite_option = click.option("--overwrite", is_flag=True, help="Replace existing results.")


def output_option(help_: str, *, required: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that adds the option which says where results go."""
    return click.option("-o", "--output", type=FILE, required=required, help=help_)


def json_option(what: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the option which names a file of results for programs."""
    return click.option("--json", "json_path", type=FILE, help=f"Write {what} here, too.")
