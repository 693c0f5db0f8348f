"""A configuration as YAML with the meaning of every setting."""

import textwrap
from typing import Any

import yaml

from unet3d.config.configuration import Config
from unet3d.config.explain import settings_of

_WIDTH = 96
_HEADER = """\
All settings of unet3d, each with its meaning and what it allows. A configuration needs only the
lines that differ from the defaults: delete the others."""


def commented_yaml(config: Config) -> str:
    """Return a configuration as YAML with a comment above every setting."""
    lines = _comment(_HEADER, "")
    for setting in settings_of(Config).values():
        *sections, name = setting.key.split(".")
        indent = "  " * len(sections)
        if not sections:
            lines.append("")
        lines += _comment(setting.meaning, indent)
        if setting.is_section:
            lines.append(f"{indent}{name}:")
            continue
        value = config.plain_value(setting.key)
        allowed = f"Allowed: {setting.allowed}."
        if value != setting.default:
            allowed += f" Default: {in_yaml(setting.default)}."
        lines += [*_comment(allowed, indent), f"{indent}{name}: {in_yaml(value)}"]
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
