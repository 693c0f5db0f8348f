"""Every setting with its meaning: as a commented configuration, and as rows for the documents."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from unet3d.config.configuration import Config
from unet3d.config.explain import hints_of, in_words, is_section, settings_of

_WIDTH = 96
_HEADER = """\
All settings of unet3d, each with its meaning and what it allows. A configuration needs only the
lines that differ from the defaults: delete the others."""


class Setting(NamedTuple):
    """One setting, or the head of a section of settings, for which the last fields are empty."""

    key: str
    """Dotted, such as ``training.epochs``."""
    meaning: str
    """What it does, with its unit; names of commands stand in double backticks."""
    allowed: str = ""
    """What it may be, in words."""
    default: Any = None
    """As YAML holds it."""

    @property
    def is_section(self) -> bool:
        """Whether it holds settings."""
        return not self.allowed


def settings() -> Iterator[Setting]:
    """Yield every section, followed by its settings, in the order of a configuration."""
    for key, section, name in settings_of(Config):
        hint, field = hints_of(section)[name], section.model_fields[name]
        meaning = inspect.getdoc(hint) if is_section(hint) else field.description
        found = Setting(key, " ".join((meaning or "").split()))
        if not is_section(hint):
            default = "auto" if Config().is_open(key) else value_of(Config(), key)
            found = found._replace(allowed=in_words(hint), default=default)
        yield found


def value_of(config: Config, key: str) -> Any:
    """Return a setting as YAML holds it, by its dotted key."""
    tree: Any = config.model_dump(mode="json")
    for name in key.split("."):
        tree = tree[name]
    return tree


def commented_yaml(config: Config) -> str:
    """Return a configuration as YAML with a comment above every setting."""
    lines = _comment(_HEADER, "")
    for setting in settings():
        *sections, name = setting.key.split(".")
        indent = "  " * len(sections)
        if not sections:
            lines.append("")
        if setting.is_section:
            lines += [*_comment(setting.meaning, indent), f"{indent}{name}:"]
            continue
        value = "auto" if config.is_open(setting.key) else value_of(config, setting.key)
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
