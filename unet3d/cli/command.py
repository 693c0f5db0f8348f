"""Commands: help in groups and with examples, and options that are settings.

Nothing heavy is imported before a command runs, so that ``--help`` is instant.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from unet3d.errors import Unet3dError

if TYPE_CHECKING:
    from unet3d.config import Config

Function = TypeVar("Function", bound=Callable[..., Any])
Option = Callable[[Callable[..., Any]], Callable[..., Any]]

COMMON = "Common"
"""Title of the options that many commands have; the last group."""

FIRST_COLUMN = 22
"""Width of the column of option names in help; longer names get a line of their own."""


@dataclass(frozen=True, kw_only=True)
class GivenSettings:
    """The settings that a command line gives."""

    path: Path | None
    """The file of ``--config``; None: the defaults."""
    changes: Mapping[str, Any]
    """Dotted key to value. Options of a setting override ``--set``, which overrides presets."""

    @cached_property
    def config(self) -> "Config":
        """All settings, with these changes."""
        from unet3d.config import load_config

        return load_config(self.path, self.changes)

    def check_devices(self) -> None:
        """Refuse devices that this machine cannot have, before PyTorch is imported."""
        from unet3d.distributed.ranks import Ranks
        from unet3d.memory.gpus import refuse_impossible

        parallel = self.config.parallel
        precisions = {"inference.precision": self.config.inference.precision}
        is_alone = Ranks.from_environment() == Ranks()
        named = (parallel.devices, parallel.mode, parallel.replicas)
        refuse_impossible(*named, precisions, is_alone)


class Command(click.Command):
    """A command whose function gets options that are settings as one argument, ``settings``."""

    def __init__(self, *names: Any, **more: Any) -> None:
        super().__init__(*names, **more)
        self.params.append(debug_option())
        self.of_settings: dict[str, str] = {
            parameter.name: parameter.setting
            for parameter in self.params
            if parameter.name and hasattr(parameter, "setting")
        }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; an error about extra arguments names the likely cause."""
        if "" in args:  # a shell's variable that is not set; as a path it would be this folder
            raise click.UsageError("an argument is empty; name what it stands for", ctx)
        flags = {name for option in self.params if _is_flag(option) for name in option.opts}
        after = {value: flag for flag, value in pairwise(args) if flag in flags}
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _, is_extra, extra = error.message.partition(" extra argument")
            if not is_extra:
                raise
            words = extra.partition("(")[2].removesuffix(")").split()
            flag = next((after[word] for word in words if word in after), None)
            if flag is not None:
                advice = f"{flag} takes no value"
            elif all(re.fullmatch(r"[\d.,\]]+", word) for word in words):
                advice = "join numbers with commas, without spaces"
            else:
                advice = "use quotes if a name has spaces"
            raise click.UsageError(f"{error.message}; {advice}", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Read the settings, and run the command; errors name options as they were typed."""
        try:
            ctx.params = self.with_settings(ctx.params)
            return super().invoke(ctx)
        except Unet3dError as error:
            error.args = (self._as_typed(str(error), ctx),)
            raise

    def with_settings(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's arguments: ``settings`` replaces all options that are settings."""
        if not self.of_settings and "overrides" not in parameters:
            return dict(parameters)
        others = dict(parameters)
        path, presets = others.pop("config_path", None), others.pop("presets", ())
        overrides = others.pop("overrides", ())
        named = {setting: others.pop(name) for name, setting in self.of_settings.items()}
        named = {setting: value for setting, value in named.items() if value is not None}
        changes: dict[str, Any] = {}
        if presets or overrides or named:  # else the command may need no settings
            from unet3d.config import parsed_changes, parsed_value, preset_changes

            changes = preset_changes(presets) | parsed_changes(overrides)
            changes |= {key: parsed_value(key, value) for key, value in named.items()}
        return {**others, "settings": GivenSettings(path=path, changes=changes)}

    def _as_typed(self, message: str, ctx: click.Context) -> str:
        """Return a message that names settings by the options that were typed."""
        for parameter in self.params:
            name, setting = parameter.name or "", self.of_settings.get(parameter.name or "")
            if setting and ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
                is_option = isinstance(parameter, click.Option)
                typed = parameter.opts[0] if is_option else parameter.human_readable_name
                key = rf"(?:--set )?(?<![\w.]){re.escape(setting)}(?![\w.]\w)"
                message = re.sub(key, typed, message)
        return message

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, with a common width of the first column."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                names, text = record
                title = getattr(parameter, "group", COMMON)
                groups.setdefault(title, []).append((names.ljust(FIRST_COLUMN), text))
        common = groups.pop(COMMON)
        for title, rows in (*groups.items(), (COMMON, common)):
            with formatter.section(title):
                formatter.write_dl(rows, col_max=FIRST_COLUMN)


class Commands(click.Group):
    """The program; its help lists commands in the order in which users need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)


def setting(key: str, name: str, metavar: str | None, text: str, **more: Any) -> Option:
    """Return a decorator that adds an option for the setting with a dotted key.

    Allowed values and the default come from the setting.
    """
    return _with(click.option(name, metavar=metavar, help=text, **more), "setting", key)


def dataset_argument() -> Option:
    """Return a decorator that adds the argument DATASET, for the setting ``data.dataset``."""
    path = click.Path(path_type=Path)
    return _with(click.argument("dataset", type=path, required=False), "setting", "data.dataset")


def grouped(title: str, *options: Option) -> Callable[[Function], Function]:
    """Return a decorator that adds options, which the help shows together under a title."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            _with(option, "group", title)(function)
        return function

    return add


def _with(option: Option, name: str, value: str) -> Option:
    """Return a decorator that adds an option, and gives it an extra attribute."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        option(function)
        setattr(function.__click_params__[-1], name, value)  # type: ignore[attr-defined]
        return function

    return add


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def command(*examples: str) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that makes a command of a function, with examples at the end of help."""
    lines = ("\b", "Examples:", *(f"  {example}" for example in examples))
    return click.command(cls=Command, epilog="\n".join(lines))


def debug_option() -> click.Option:
    """Return the option ``--debug`` of every command and of the program itself."""
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_log_more,
        help="Log more, and show tracebacks of errors.",
    )


def _log_more(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    if is_given:
        for name in (None, "unet3d"):
            logging.getLogger(name).setLevel(logging.DEBUG)


def is_debugging() -> bool:
    """Return whether ``--debug`` was given."""
    return logging.getLogger("unet3d").isEnabledFor(logging.DEBUG)
