"""Colours of pictures, text in them, and saving them: the same in every report."""

import warnings
from pathlib import Path
from typing import IO, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unet3d.atomic import write_atomically

# The palette of Okabe and Ito (Color Universal Design, 2008), for colour-blind people, too.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#C8C8C8"

LINES = tuple(zip((BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION), "osD^vP", strict=True))
"""Colours and markers of lines, in order; the markers distinguish lines without colour, too."""

LABELS = (SKY, ORANGE, GREEN, PURPLE, YELLOW, VERMILION, BLUE)
"""Colours of outlined labels: the most visible on grey come first."""

WIDTH_INCHES = 9.0
DOTS_PER_INCH = 120


def drawable(text: str, most: int | None = None) -> str:
    """Return a name from a file, cut to ``most`` letters and safe for matplotlib."""
    if most is not None and len(text) > most:
        text = text[: most - 1].rstrip() + "…"
    text = text.encode(errors="replace").decode()  # no lone surrogates
    return text.replace("$", r"\$")  # matplotlib would read a formula


def tidy(axes: Axes, has_grid: bool = True) -> None:
    """Remove the frame of axes, and put a grid behind their content."""
    axes.spines[["top", "right"]].set_visible(False)
    if has_grid:
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)


def legend_beside(axes: Axes, **how: object) -> None:
    """Put the legend to the right of axes."""
    where = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(**{**where, "fontsize": 10, **how})


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, which appears whole; an existing file is replaced."""
    write_atomically(path, lambda file: save_figure(figure, file))


def save_figure(
    figure: Figure, file: IO[bytes] | Path, kind: Literal["png", "svg"] = "png"
) -> None:
    """Save a figure to a file that the caller names."""
    FigureCanvasAgg(figure)
    # Without a salt and a date, two SVG files of one figure would differ.
    metadata = {"Date": None} if kind == "svg" else None
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "unet3d"}):
        # Labels are named in any script; a letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
