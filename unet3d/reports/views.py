"""The three directions in which people look at a volume, and where they stand on a picture.

The coronal and the sagittal plane are above, the axial one and the legend below, all at one scale:
planes beside each other show the same heights, planes above each other the same widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WIDTH, MAX_HEIGHT = 7.6, 7.6
"""Inches for both columns and both rows of planes."""
MIN_PANEL, MIN_COLUMN = 0.15, 1.7
"""Inches of a plane, and of the place for its title."""
SIDE, ABOVE, BELOW = 0.32, 0.52, 0.3
"""Inches around a plane, for letters and a title."""
HEAD = 0.5
"""Inches above everything."""

Inches = tuple[float, float, float, float]
"""Left, bottom, width, height."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A direction of view."""

    name: str
    across: int
    """The axis across the plane."""
    horizontal: int
    vertical: int
    """The axis that runs to the top of the picture."""
    place: tuple[int, int]
    """Its column and row."""


CORONAL = View(name="coronal", across=1, horizontal=0, vertical=2, place=(0, 0))
SAGITTAL = View(name="sagittal", across=0, horizontal=1, vertical=2, place=(1, 0))
AXIAL = View(name="axial", across=2, horizontal=0, vertical=1, place=(0, 1))


VIEWS = (CORONAL, SAGITTAL, AXIAL)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything is."""

    size: tuple[float, float]
    """Width and height of the picture in inches."""
    panels: dict[View, Inches]
    """The planes."""
    legend: Inches
    inches_per_mm: float

    @classmethod
    def of(cls, extents_mm: Sequence[float], legend: tuple[float, float]) -> "Layout":
        """Return the largest arrangement that fits.

        What is shown along X, Y, Z is in mm, width and height of the legend in inches.
        """
        x, y, z = extents_mm
        width, height = legend
        scale = min(MAX_WIDTH / (x + y), MAX_HEIGHT / (y + z))
        columns, rows = (x * scale, y * scale), (z * scale, y * scale)
        second = SIDE + max(columns[0], MIN_COLUMN) + 2 * SIDE
        low = BELOW + max(rows[1], height)
        high = low + ABOVE + BELOW
        panels = {}
        for view in VIEWS:
            column, row = view.place
            size = max(MIN_PANEL, columns[column]), max(MIN_PANEL, rows[row])
            left, bottom = (SIDE, second)[column], (high, low - size[1])[row]
            panels[view] = (left, bottom, *size)
        return cls(
            size=(
                second + max(columns[1], MIN_COLUMN, width) + SIDE,
                high + max(rows[0], MIN_PANEL) + ABOVE + HEAD,
            ),
            panels=panels,
            legend=(second, low - height, width, height),
            inches_per_mm=scale,
        )

    def share(self, inches: Inches) -> Inches:
        """Return a place as shares of the picture."""
        left, bottom, width, height = inches
        across, up = self.size
        return left / across, bottom / up, width / across, height / up
