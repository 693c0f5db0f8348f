"""A segmentation as people look at it: three planes of the scan, outlines, names and volumes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from unet3d.images.geometry import voxel_mm3
from unet3d.images.image import Image
from unet3d.images.units import Units
from unet3d.reports.figures import LABELS, drawable, save_figure
from unet3d.reports.format import score
from unet3d.reports.planes import SIDE, Layout, Structure, Survey, View, survey, visible_box

PERCENTILES = (1.0, 99.0)
"""Intensities of the planes that are black and white."""
PATIENT_ENDS = (("L", "R"), ("P", "A"), ("I", "S"))
"""Where each axis begins and ends in a patient."""
ARRAY_ENDS = (("", "X"), ("", "Y"), ("", "Z"))
"""What is known of the axes of a file that does not say where left is."""
FILL, LINE = 0.15, 1.6
"""Opacity within an outline, and its width in points."""
DASHES = (0, (2.5, 1.5))
"""Of true outlines."""

MAX_ROWS = 12
"""Structures that the legend names."""
MAX_LETTERS, MAX_TITLE = 20, 60
"""Letters of a name in the legend, and of the title."""
LEGEND_WIDTH, TRUE_WIDTH, ROW = 3.6, 4.7, 0.26
"""Inches of the legend, with a truth, and between its lines."""
ONE_HEAD, HEADS = ("volume",), ("predicted", "true", "Dice")
TRUE_ENDS = (TRUE_WIDTH - 1.65, TRUE_WIDTH - 0.65, TRUE_WIDTH)
"""Heads of the legend's columns, and where they end with a truth."""
SWATCH = 0.2
"""Width of a structure's colour in the legend."""
EMPTY = "Nothing was segmented."
FONT, SMALL = 11, 9
DIM = "#6B6B6B"

Labels = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Preview:
    """What is drawn: planes of the image's first channel, and label maps (X, Y, Z) on its grid."""

    title: str
    image: Image
    labels: Labels
    structures: Sequence[Structure]
    """What is outlined, in the order of the colours."""
    truth: Labels | None = None
    """True label values, whose outlines are dashed, and through whose largest structure the planes
    go; None: they are not known."""
    dice: Sequence[float | None] = ()
    """With a truth: the score of each structure."""

    @property
    def units(self) -> Units:
        """In which lengths and volumes are written."""
        return Units.of(self.image.geometry.spacing_mm)

    def volume_text(self, num_voxels: int) -> str:
        """Return the volume of voxels."""
        return self.units.volume_text(num_voxels * voxel_mm3(self.image.geometry.affine) / 1000)


def preview_figure(preview: Preview) -> Figure:
    """Draw three planes through the largest structure, and a legend.

    The view of a patient is radiological: right is on the left of the picture, as is the front in
    the sagittal plane.
    """
    geometry = preview.image.geometry
    maps: list[tuple[Labels, Any]] = [(preview.labels, "-")]
    if preview.truth is not None:
        maps.append((preview.truth, DASHES))
    surveys = [survey(labels, preview.structures) for labels, _ in maps]
    guide = _guide(surveys)
    shown_mm = [
        (first * mm, last * mm)
        for (first, last), mm in zip(
            visible_box(surveys, geometry.shape), geometry.spacing_mm, strict=True
        )
    ]
    rows = _rows(preview, surveys)
    layout = Layout.of(
        [last - first for first, last in shown_mm],
        (LEGEND_WIDTH if preview.truth is None else TRUE_WIDTH, ROW * (len(rows) + 7)),
    )
    figure = Figure(figsize=layout.size)
    planes = {
        panel: preview.image.plane(panel.across, guide.position[panel.across])
        for panel in layout.panels
    }
    window = _window(list(planes.values()))
    seen: set[int] = set()
    for panel, place in layout.panels.items():
        axes = figure.add_axes(layout.share(place))
        index = guide.position[panel.across]
        _draw_image(axes, panel, planes[panel], geometry.spacing_mm, window)
        for labels, style in maps:
            plane = np.asarray(np.moveaxis(labels, panel.across, 0)[index])
            seen |= _outline(axes, panel, plane, preview, style)
        across = shown_mm[panel.horizontal]
        axes.set_xlim(across[::-1] if geometry.is_anatomical else across)
        axes.set_ylim(shown_mm[panel.vertical])
        _name_edges(axes, panel, geometry.is_anatomical)
        name = panel.name
        if not geometry.is_anatomical:
            name = "XYZ"[panel.horizontal] + "XYZ"[panel.vertical]
        title = f"{name}, {index + 1} of {geometry.shape[panel.across]}"
        axes.set_title(title, fontsize=FONT, loc="left", pad=18)
    legend = figure.add_axes(layout.share(layout.legend))
    down = _draw_legend(legend, rows, _notes(preview, surveys, rows, seen), seen, layout)
    _draw_scale(legend, down + 1.2 * ROW, layout, preview.units)
    figure.text(
        SIDE / layout.size[0],
        1 - 0.2 / layout.size[1],
        drawable(preview.title, MAX_TITLE),
        fontsize=FONT + 3,
        fontweight="bold",
        va="top",
    )
    return figure


def _guide(surveys: Sequence[Survey]) -> Survey:
    """Return the survey that says which planes are drawn: of the truth, unless it is empty."""
    return next((found for found in reversed(surveys) if found.largest is not None), surveys[0])


def _window(planes: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """Return the intensities that are drawn black and white."""
    values = np.concatenate([plane.ravel() for plane in planes])
    black, white = np.percentile(values, PERCENTILES).tolist()
    if black == white:  # nearly everything is background
        black, white = float(values.min()), float(values.max())
    return black, white


def _draw_image(
    axes: Axes,
    panel: View,
    plane: npt.NDArray[Any],
    spacing_mm: Sequence[float],
    window: tuple[float, float],
) -> None:
    width, height = (
        size * spacing_mm[axis]
        for size, axis in zip(plane.shape, (panel.horizontal, panel.vertical), strict=True)
    )
    axes.imshow(
        plane.T,
        cmap="gray",
        vmin=window[0],
        vmax=window[1],
        origin="lower",
        extent=(0, width, 0, height),
        interpolation="bilinear",
    )
    axes.set_facecolor("black")


def _outline(axes: Axes, panel: View, plane: Labels, preview: Preview, style: Any) -> set[int]:
    """Draw the outlines of all structures in a plane, and return which ones there are."""
    x_mm, y_mm = (
        (np.arange(size + 2) - 0.5) * preview.image.geometry.spacing_mm[axis]
        for size, axis in zip(plane.shape, (panel.horizontal, panel.vertical), strict=True)
    )
    there = set(np.unique(plane).tolist())
    found = set()
    for index, structure in enumerate(preview.structures):
        if there.isdisjoint(structure.values):
            continue
        found.add(index)
        # Padded, so that outlines are closed at the edge of the volume.
        mask = np.pad(np.isin(plane, structure.values), 1)
        rows, columns = (_around(np.flatnonzero(mask.any(axis=axis))) for axis in (1, 0))
        where = x_mm[rows], y_mm[columns], mask[rows, columns].T.astype(np.float32)
        colour = LABELS[index % len(LABELS)]
        if style == "-":
            axes.contourf(*where, levels=[0.5, 1.5], colors=[colour], alpha=FILL)
        axes.contour(*where, levels=[0.5], colors=[colour], linewidths=LINE, linestyles=[style])
    return found


def _around(found: npt.NDArray[np.int64]) -> slice:
    """Return the part of an axis from the first to the last place, and one more on either side."""
    return slice(int(found[0]) - 1, int(found[-1]) + 2)


def _name_edges(axes: Axes, panel: View, is_anatomical: bool) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    ends = PATIENT_ENDS if is_anatomical else ARRAY_ENDS
    (first, last), (low, high) = ends[panel.horizontal], ends[panel.vertical]
    left, right = (last, first) if is_anatomical else (first, last)
    for letter, where, offset, across, up in (
        (left, (0, 0.5), (-6, 0), "right", "center"),
        (right, (1, 0.5), (6, 0), "left", "center"),
        (high, (0.5, 1), (0, 4), "center", "bottom"),
        (low, (0.5, 0), (0, -4), "center", "top"),
    ):
        axes.annotate(
            letter,
            where,
            xycoords="axes fraction",
            xytext=offset,
            textcoords="offset points",
            ha=across,
            va=up,
            fontsize=FONT,
            fontweight="bold",
            color=DIM,
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A line of the legend."""

    index: int | None
    """Of the structure; None: of several."""
    name: str
    cells: tuple[str, ...]


def _rows(preview: Preview, surveys: Sequence[Survey]) -> list[_Row]:
    """Return the structures of the legend: all, or the largest ones and how many more there are."""
    structures, last = preview.structures, surveys[-1].num_voxels
    named = list(range(len(structures)))
    if len(named) > MAX_ROWS:
        named = sorted(named, key=lambda index: -last[index])[:MAX_ROWS]
    rows = []
    for index in named:
        cells = [preview.volume_text(found.num_voxels[index]) for found in surveys]
        if preview.truth is not None:
            cells.append(score(preview.dice[index]))
        rows.append(_Row(index=index, name=structures[index].name, cells=tuple(cells)))
    left = set(range(len(structures))) - set(named)
    if left:
        num_left = sum(last[index] > 0 for index in left)
        counts = (sum(found.num_voxels[index] for index in left) for found in surveys)
        cells = [preview.volume_text(count) for count in counts]
        rows.append(_Row(index=None, name=f"and {num_left} more", cells=tuple(cells)))
    return rows


def _draw_legend(
    axes: Axes, rows: Sequence[_Row], notes: Sequence[str], seen: set[int], layout: Layout
) -> float:
    """Write names and volumes below each other, and return how far down that goes.

    The axes count inches from their upper left.
    """
    _, _, width, height = layout.legend
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    has_truth = any(len(row.cells) > 1 for row in rows)
    heads, ends = (HEADS, TRUE_ENDS) if has_truth else (ONE_HEAD, (width,))
    down = ROW / 2
    for head, end in zip(heads, ends, strict=True):
        axes.text(end, down, head, ha="right", va="center", fontsize=SMALL, color=DIM)
    for row in rows:
        down += ROW
        is_seen = row.index is None or row.index in seen
        colour = "black" if is_seen else DIM
        if row.index is not None:
            swatch = LABELS[row.index % len(LABELS)]
            face = (swatch, 0.6) if is_seen else "none"
            place = (0, down - SWATCH / 3)
            axes.add_patch(
                Rectangle(place, SWATCH, SWATCH * 2 / 3, facecolor=face, edgecolor=swatch, lw=LINE)
            )
        name = drawable(row.name, MAX_LETTERS)
        axes.text(0.3, down, name, va="center", fontsize=FONT, color=colour)
        for cell, end in zip(row.cells, ends, strict=False):
            axes.text(end, down, cell, ha="right", va="center", fontsize=FONT, color=colour)
    down += 0.4 * ROW
    for note in notes:
        down += 0.75 * ROW
        is_warning = note == EMPTY
        axes.text(
            0,
            down,
            note,
            va="center",
            fontsize=FONT if is_warning else SMALL,
            fontweight="bold" if is_warning else "normal",
            color="black" if is_warning else DIM,
        )
    return down


def _notes(
    preview: Preview, surveys: Sequence[Survey], rows: Sequence[_Row], seen: set[int]
) -> list[str]:
    """Return what a reader of the picture must know, a line each."""
    notes = []
    if surveys[0].largest is None:
        notes.append(EMPTY)
    if preview.truth is not None:
        notes.append("Solid: predicted; dashed: true.")
    if seen and any(row.index is not None and row.index not in seen for row in rows):
        notes.append("Grey names are not in these planes.")
    largest = _guide(surveys).largest
    planes = "Planes: the middle ones,"
    if largest is not None:
        name = drawable(preview.structures[largest].name, MAX_LETTERS)
        planes = f"Planes: those with the largest area of {name},"
    if preview.image.geometry.is_anatomical:
        return [
            *notes,
            planes,
            "counted from the left, the back and below.",
            "Radiological view: the patient's right is on the left.",
        ]
    return [
        *notes,
        planes,
        "counted from the first voxel.",
        "The file does not say where left and right are.",
    ]


def _draw_scale(axes: Axes, down: float, layout: Layout, units: Units) -> None:
    """Draw a bar of a round length, the largest of a third of the width."""
    most = layout.legend[2] / 3 / layout.inches_per_mm / units.mm
    power = 10.0 ** math.floor(math.log10(most))
    length = max(step * power for step in (1, 2, 5) if step * power <= most)
    inches = length * units.mm * layout.inches_per_mm
    axes.plot([0, inches], [down, down], color="black", linewidth=2.5, solid_capstyle="butt")
    axes.text(inches + 0.1, down, f"{length:g} {units.length}", va="center", fontsize=SMALL)


def write_preview(path: Path, image: Image, labels: Labels, label_names: Mapping[int, str]) -> None:
    """Draw a segmentation (X, Y, Z) over its scan into a file."""
    structures = [Structure(name=name, values=(value,)) for value, name in label_names.items()]
    title = image.geometry.path.name
    preview = Preview(title=title, image=image, labels=labels, structures=structures)
    save_figure(preview_figure(preview), path)
