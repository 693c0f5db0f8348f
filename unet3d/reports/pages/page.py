"""Common parts of all pages: template, Content-Security-Policy, embedded pictures.

All text is escaped by jinja2, and unprintable characters, such as a lone surrogate in a file name,
are written as their code. The Content-Security-Policy of a page forbids all loading, and names the
digest of each of the page's own scripts and styles, so nothing else in it can run.
"""

import base64
import hashlib
import io
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from unet3d import __version__
from unet3d.inputs.plain_data import printable
from unet3d.reports.figures import save_figure
from unet3d.reports.tables import score

QUOTED_NONE = "'none'"
GENERATOR = b'<meta name="generator" content="unet3d '
"""Marks the head of every page."""


def render(template: str, *, styles: Sequence[str], scripts: Sequence[str], **content: Any) -> str:
    """Return a page as HTML: a template with files of CSS and JavaScript of this package.

    The content is escaped.
    """
    style = "\n".join(map(resource, styles))
    sources = [resource(script) for script in scripts]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_digest(style)}",
            f"script-src {' '.join(map(_digest, sources)) or QUOTED_NONE}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return _ENVIRONMENT.get_template(template).render(
        policy=Markup(policy),  # contains only digests
        style=Markup(style),
        scripts=[Markup(source) for source in sources],
        version=__version__,
        **{"lead": "", "figures": (), **content},
    )


def is_page(path: Path) -> bool:
    """Tell whether a file is a page that was made here, and not a link to one."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR in file.read(4096)


def resource(name: str) -> str:
    """Return a text file of this package by its path from the folder of this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def picture_of(path: Path) -> str | None:
    """Return a PNG file as a data URL; None: there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return _url("image/png", content) if content.startswith(b"\x89PNG\r\n\x1a\n") else None


def drawing_of(figure: Figure, kind: Literal["png", "svg"] = "svg") -> str:
    """Return a figure as a data URL: as SVG, which is sharp at any size, or as PNG."""
    file = io.BytesIO()
    save_figure(figure, file, kind)
    return _url({"png": "image/png", "svg": "image/svg+xml"}[kind], file.getvalue())


def shade(dice: float | None) -> int | None:
    """Return which of the style sheet's shades, 0 to 9, a Dice gets; None: no shade."""
    return None if dice is None else int(min(9.0, max(0.0, dice * 10)))


def _finalize(value: Any) -> Any:
    """Return a value as a template shows it: text without unprintable characters."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, max_length=len(value))
    return value


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _digest(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_finalize,
)
_ENVIRONMENT.filters["score"] = score
_ENVIRONMENT.filters["shade"] = shade
