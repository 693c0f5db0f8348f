"""Options that several commands share, each declared once."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from unet3d.cli.command import COMMON, grouped, setting

Function = TypeVar("Function", bound=Callable[..., Any])


FILE = click.Path(path_type=Path)


def checkpoint_option(help_: str, *, several: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that adds the option ``--checkpoint``, for one or several."""
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
    help="Folds to use, such as 0,2; default: all.",
)


class FiniteRange(click.FloatRange):
    """A finite number within bounds; bounds alone would let ``nan`` pass."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number; leave out units.", param, ctx)
        number = super().convert(number, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def _spacing_mm(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Return a spacing along Z, Y, X, as users of microscopes write it, in mm along X, Y, Z."""
    if value is None:
        return None
    from unet3d.images.microscopy import length_mm
    from unet3d.images.units import unit_mm

    numbers, unit = re.findall(r"^([-+.,\de]*(?<!e)) *(.*)$", value)[0]
    lengths_mm = [length_mm(number, unit_mm(unit or "mm")) for number in numbers.split(",")]
    found = [mm for mm in reversed(lengths_mm) if mm is not None]
    if len(found) != 3 or len(lengths_mm) != 3:
        raise click.BadParameter(f"{value!r} is no spacing along Z, Y, X; write 40,8,8nm.")
    return tuple(found)


reading_options = grouped(
    "Microscopy",
    setting(
        "data.reading.spacing_mm",
        "--spacing",
        "Z,Y,X",
        "Spacing of the voxels in mm, or with a unit, such as 40,8,8nm; default: as files state.",
        callback=_spacing_mm,
    ),
    setting(
        "data.reading.axes",
        "--axes",
        "LETTERS",
        "Axes of arrays, such as zyx or czyx; default: as files state.",
    ),
    setting(
        "data.reading.time", "--time", "K", "Point in time, counted from 0; default: the only one."
    ),
    setting(
        "data.reading.level",
        "--level",
        "K",
        "Level of pyramids, 0 for the finest; default: the finest, and in prediction the nearest "
        "to the network's spacing.",
    ),
)
"""Options for files of microscopes, which leave choices open or lack metadata."""

common_options = grouped(
    COMMON,
    click.option("--config", "config_path", type=FILE, help="YAML file of settings; see configs/."),
    click.option(
        "--preset",
        "presets",
        metavar="NAME",
        multiple=True,
        help="Group of settings, which overrides --config: quick (50 epochs), full "
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
"""Options that name a configuration; each overrides the options before it."""

devices_option = setting(
    "parallel.devices",
    "--devices",
    "LIST",
    "GPUs, such as 0,1, or cpu; default: GPU 0, several if --parallel needs them, or the CPU if "
    "there is no GPU.",
)

parallel_option = setting(
    "parallel.mode",
    "--parallel",
    "MODE",
    "What is on each device. data: a copy of the network; spatial: a slab of each volume; "
    "model: a part of the network; none: one device does everything; auto: the fastest that "
    "fits (default).",
)

replicas_option = setting(
    "parallel.replicas",
    "--replicas",
    "R",
    "Number of groups into which --devices are divided; each group computes its own share of the "
    "batch.",
)

batch_options = (
    setting(
        "training.batch_size",
        "--batch-size",
        "N",
        "Patches in a step; default: planned from data and memory.",
    ),
    setting(
        "training.micro_batches",
        "--micro-batches",
        "M",
        "Number of parts of a batch; they run one after another, or as a pipeline with --parallel "
        "model.",
    ),
)

overwrite_option = click.option("--overwrite", is_flag=True, help="Replace existing results.")


def output_option(
    help_: str, *, type_: click.Path = FILE, required: bool = False
) -> Callable[[Function], Function]:
    """Return a decorator that adds the option ``--output``."""
    return click.option("-o", "--output", type=type_, required=required, help=help_)


def json_option(what: str) -> Callable[[Function], Function]:
    """Return a decorator that adds the option ``--json``, a file of results for programs."""
    return click.option("--json", "json_path", type=FILE, help=f"Also write {what} to this file.")
