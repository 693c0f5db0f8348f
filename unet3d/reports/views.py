"""The three directions in which people look at a volume, and where they stand on a picture.

The coronal and the sagittal plane are above, the axial one and the legend below, all at one scale:
planes beside each other show the same heights, planes above each other the same widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WIDTH, MAX_HEIGHT = 7.6, 7.6
"""Inches for both columns and both rows of planes."""
MAX_ALONE = 5.0
"""Inches of a plane that is the only one."""
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


def views_of(shape: Sequence[int]) -> list[View]:
    """Return the views in which a volume is more than a row of voxels; at least one."""
    views = [CORONAL, SAGITTAL, AXIAL]
    planes = [one for one in views if min(shape[one.horizontal], shape[one.vertical]) > 1]
    return planes or [max(views, key=lambda one: shape[one.horizontal] * shape[one.vertical])]


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
    def of(
        cls, views: Sequence[View], extents_mm: Sequence[float], legend: tuple[float, float]
    ) -> "Layout":
        """Return the largest arrangement of one or three views that fits.

        What is shown along X, Y, Z is in mm, width and height of the legend in inches.
        """
        width, height = legend
        if len(views) == 1:
            (alone,) = views
            mm = extents_mm[alone.horizontal], extents_mm[alone.vertical]
            scale = MAX_ALONE / max(mm)
            columns, rows = (mm[0] * scale, 0.0), (0.0, mm[1] * scale)
            places = {alone: (0, 1)}
        else:
            x, y, z = extents_mm
            scale = min(MAX_WIDTH / (x + y), MAX_HEIGHT / (y + z))
            columns, rows = (x * scale, y * scale), (z * scale, y * scale)
            places = {one: one.place for one in views}
        second = SIDE + max(columns[0], MIN_COLUMN) + 2 * SIDE
        low = BELOW + max(rows[1], height)
        high = low + ABOVE + BELOW
        panels = {}
        for one, (column, row) in places.items():
            size = max(MIN_PANEL, columns[column]), max(MIN_PANEL, rows[row])
            left, bottom = (SIDE, second)[column], (high, low - size[1])[row]
            panels[one] = (left, bottom, *size)
        top = low + ABOVE if len(views) == 1 else high + rows[0] + ABOVE
        return cls(
            size=(second + max(columns[1], MIN_COLUMN, width) + SIDE, top + HEAD),
            panels=panels,
            legend=(second, low - height, width, height),
            inches_per_mm=scale,
        )

    def share(self, inches: Inches) -> Inches:
        """Return a place as shares of the picture."""
        left, bottom, width, height = inches
        across, up = self.size
        return left / across, bottom / up, width / across, height / up
