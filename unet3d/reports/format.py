"""Writing amounts and sizes, and saving figures: the same in every report."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unet3d.atomic import write_atomically

MIB = 1024**2
GIB = 1024**3
MIN_BYTES_IN_GIB = 8 * GIB
"""Peaks from this one on are shown in GiB; parts of a smaller one would read 0.00."""
NOTHING = "–"
PICTURE_WIDTH_INCHES = 9.0
DOTS_PER_INCH = 120


def unit_for(peak_bytes: int) -> tuple[str, int]:
    """Return the unit in which a peak is read best, and the bytes in it.

    Args:
        peak_bytes: The largest number that is shown.
    """
    return ("GiB", GIB) if peak_bytes >= MIN_BYTES_IN_GIB else ("MiB", MIB)


def amount(num_bytes: int, unit_bytes: int) -> str:
    """Return a number of bytes in a unit, with the digits that matter.

    Args:
        num_bytes: The number.
        unit_bytes: Bytes in the unit, such as :data:`GIB`.
    """
    amount = num_bytes / unit_bytes
    if amount >= 100:
        return f"{amount:,.0f}"
    if 0 < amount < 0.001:
        return "<0.001"
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def size_text(shape: Sequence[int]) -> str:
    """Return voxels along X, Y, Z as people write them.

    Args:
        shape: Voxels, such as (192, 192, 160).
    """
    return "x".join(map(str, shape))


def millilitres(volume_ml: float) -> str:
    """Return a volume with three digits or more, such as ``1,234 mL`` or ``0.0120 mL``.

    Args:
        volume_ml: The volume.
    """
    if volume_ml >= 99.95:
        return f"{volume_ml:,.0f} mL"
    return f"{volume_ml:#.3g} mL" if volume_ml else "0 mL"


def drawable(text: str, most: int | None = None) -> str:
    """Return a name as matplotlib draws it letter by letter.

    Args:
        text: From a file; it may hold anything.
        most: Letters that there is room for; None: any number.
    """
    if most is not None and len(text) > most:
        text = text[: most - 1].rstrip() + "…"
    text = text.encode(errors="replace").decode()  # no halves of characters
    return text.replace("$", r"\$")  # matplotlib would read a formula


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file.

    Args:
        figure: The drawn figure.
        path: The file; one of that name is replaced.
    """
    write_atomically(path, lambda file: save_figure(figure, file))


def save_figure(
    figure: Figure, file: IO[bytes] | Path, kind: Literal["png", "svg"] = "png"
) -> None:
    """Save a figure to a file that somebody else gives its name.

    Args:
        figure: The drawn figure.
        file: The file.
        kind: What to save it as.

    Raises:
        OSError: It cannot be written.
    """
    FigureCanvasAgg(figure)
    # Without a salt and a date, two SVG files of one figure would differ.
    metadata = {"Date": None} if kind == "svg" else None
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "unet3d"}):
        # Labels are named in any script; a letter that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
