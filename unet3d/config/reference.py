"""Every setting with its meaning: as a commented configuration, and as rows for the documents."""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from unet3d.config.configuration import Config
from unet3d.config.explain import hints_of, in_words, is_section
from unet3d.config.values import Section

_WIDTH = 96
_HEADER = """\
All settings of unet3d, each with its meaning and what it allows. A configuration needs only the
lines that differ from the defaults: delete the others."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, or the head of a section of settings."""

    key: str
    """Dotted, such as ``training.epochs``."""
    meaning: str
    """What it does, with its unit; names of commands stand in double backticks."""
    allowed: str
    """What it may be, in words; empty for a section."""
    default: Any
    """As YAML holds it; None for a section."""
    is_section: bool
    """Whether it holds settings."""


def settings(section: type[Section] = Config, prefix: str = "") -> Iterator[Setting]:
    """Yield every section, followed by its settings, in the order of a configuration."""
    hints = hints_of(section)
    defaults = section().model_dump(mode="json")
    for name, field in section.model_fields.items():
        key, hint = f"{prefix}{name}", hints[name]
        below = is_section(hint)
        meaning = inspect.getdoc(hint) if below else field.description
        yield Setting(
            key=key,
            meaning=" ".join((meaning or "").split()),
            allowed="" if below else in_words(hint),
            default=None if below else "auto" if section.may_be_open(name) else defaults[name],
            is_section=below,
        )
        if below:
            yield from settings(hint, f"{key}.")


def commented_yaml(config: Config) -> str:
    """Return a configuration as YAML with a comment above every setting."""
    values = config.model_dump(mode="json")
    lines = _comment(_HEADER, "")
    for setting in settings():
        *sections, name = setting.key.split(".")
        indent = "  " * len(sections)
        if not sections:
            lines.append("")
        if setting.is_section:
            lines += [*_comment(setting.meaning, indent), f"{indent}{name}:"]
            continue
        value: Any = values
        for part in setting.key.split("."):
            value = value[part]
        value = "auto" if config.is_open(setting.key) else value
        allowed = f"Allowed: {setting.allowed}."
        if value != setting.default:
            allowed += f" Default: {in_yaml(setting.default)}."
        lines += _comment(setting.meaning, indent) + _comment(allowed, indent)
        lines.append(f"{indent}{name}: {in_yaml(value)}")
    return "\n".join(lines) + "\n"


def in_yaml(value: Any) -> str:
    """Return a setting's plain value as it stands in a configuration, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(text: str, indent: str) -> list[str]:
    prefix = f"{indent}# "
    plain = text.replace("``", "")
    return textwrap.wrap(
        plain, _WIDTH, initial_indent=prefix, subsequent_indent=prefix, break_on_hyphens=False
    )
