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
from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

from unet3d.images.geometry import Geometry, voxel_mm3
from unet3d.images.image import Image
from unet3d.images.units import MILLIMETRES, Units
from unet3d.reports.figures import LABELS, drawable, save_figure
from unet3d.reports.planes import VIEWS, Structure, Survey, View, plane_of, survey, visible_box
from unet3d.reports.tables import score

PERCENTILES = (1.0, 99.0)
"""Percentiles of intensities in the planes that are drawn as black and as white."""
PATIENT_ENDS = (("L", "R"), ("P", "A"), ("I", "S"))
"""Anatomical directions of the start and end of each axis."""
ARRAY_ENDS = (("", "X"), ("", "Y"), ("", "Z"))
"""Axis names for a file without anatomical directions."""
FILL, LINE = 0.15, 1.6
"""Opacity within an outline, and its width in points."""
DASHES = (0, (2.5, 1.5))
"""Dash pattern of true outlines."""

MAX_ROWS = 12
"""Most structures that the legend names."""
MAX_LETTERS, MAX_TITLE = 20, 60
"""Most letters of a name in the legend, and of the title."""
ONE_HEAD, HEADS = ("volume",), ("segmented", "true", "Dice")
EMPTY = "Nothing was segmented."
FONT, SMALL = 11, 9
DIM = "#6B6B6B"

MAX_INCHES, MIN_INCHES = 7.6, 0.15
"""Largest width of both columns of planes together, and largest height of both rows; smallest size
of a plane that is nearly a line."""
MAX_PIXELS = 2048
"""Most voxels along a side of a plane to draw; of a larger one, every few voxels are drawn."""
LEGEND_INCHES, LINE_INCHES = (3.6, 5.2), 0.24
"""Width of the legend, without and with true labels, and the distance of its lines."""
SIDE, ABOVE, BELOW, GAP = 0.35, 1.05, 0.6, 0.85
"""Inches around and between planes, for letters and titles."""

Labels = npt.NDArray[Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Preview:
    """What is drawn: planes of the image's first channel, and label maps (X, Y, Z) on its grid."""

    title: str
    image: Image
    labels: Labels
    structures: Sequence[Structure]
    """The outlined structures, in the order of the colours."""
    truth: Labels | None = None
    """True label values; None: they are not known. Their outlines are dashed, and the planes go
    through their largest structure."""
    dice: Sequence[float | None] = ()
    """With a truth: the score of each structure."""

    @property
    def units(self) -> Units:
        """Units of lengths and volumes in the text."""
        return Units.of(self.image.geometry.spacing_mm)

    def volume_text(self, num_voxels: int) -> str:
        """Return the volume of voxels."""
        return self.units.volume_text(num_voxels * voxel_mm3(self.image.geometry.affine) / 1000)


def preview_figure(preview: Preview) -> Figure:
    """Draw three planes through the largest structure, and a legend.

    The coronal and the sagittal plane are above, the axial one and the legend below, all planes at
    one scale. The view of a patient is radiological: right is on the left of the picture, as is
    the front in the sagittal plane. Otherwise Y points down, as in programs for microscopy.
    """
    geometry = preview.image.geometry
    maps: list[tuple[Labels, Any]] = [(preview.labels, "-")]
    if preview.truth is not None:
        maps.append((preview.truth, DASHES))
    surveys = [survey(labels, preview.structures) for labels, _ in maps]
    guide = _guide(surveys)
    box = visible_box(surveys, geometry.shape)
    shown_mm = [
        (first * mm, last * mm) for (first, last), mm in zip(box, geometry.spacing_mm, strict=True)
    ]
    x, y, z = (last - first for first, last in shown_mm)
    inches_per_mm = min(MAX_INCHES / (x + y), MAX_INCHES / (y + z))
    x, y, z = (max(MIN_INCHES, mm * inches_per_mm) for mm in (x, y, z))
    rows = _rows(preview, surveys)
    legend_width = LEGEND_INCHES[preview.truth is not None]
    widths, heights = (x, max(y, legend_width)), (z, max(y, LINE_INCHES * (len(rows) + 8)))
    width, height = sum(widths) + 2 * SIDE + GAP, sum(heights) + ABOVE + GAP + BELOW
    figure = Figure((width, height))
    upper, lower = figure.subplots(
        *(2, 2),
        width_ratios=widths,
        height_ratios=heights,
        gridspec_kw={
            **{"left": SIDE / width, "right": 1 - SIDE / width, "wspace": 2 * GAP / sum(widths)},
            **{"bottom": BELOW / height, "top": 1 - ABOVE / height},
            "hspace": 2 * GAP / sum(heights),
        },
    )
    steps = [-(-size // MAX_PIXELS) for size in geometry.shape]
    planes = [
        preview.image.plane(view.across, guide.position[view.across])[_thin(view, steps)]
        for view in VIEWS
    ]
    window = _window(planes)
    seen: set[int] = set()
    for axes, view, shown in zip((*upper, lower[0]), VIEWS, planes, strict=True):
        index = guide.position[view.across]
        _draw_image(axes, view, shown, geometry, window)
        for labels, style in maps:
            plane = plane_of(labels, view.across, index)[_thin(view, steps)]
            seen |= _outline(axes, view, plane, preview, style, steps)
        across, up = shown_mm[view.horizontal], shown_mm[view.vertical]
        is_line = min(across[1] - across[0], up[1] - up[0]) * inches_per_mm < MIN_INCHES
        axes.set_aspect("auto" if is_line else "equal", anchor="NW")
        axes.set_xlim(across[::-1] if geometry.is_anatomical else across)
        axes.set_ylim(up if geometry.is_anatomical else up[::-1])
        _name_edges(axes, view, geometry.is_anatomical)
        name = view.name
        if not geometry.is_anatomical:
            name = "XYZ"[view.horizontal] + "XYZ"[view.vertical]
        title = f"{name}, {index + 1} of {geometry.shape[view.across]}"
        axes.set_title(title, fontsize=FONT, loc="left", pad=18)
    _draw_scale(lower[0], widths[0] / inches_per_mm / 3, 0.28 / y, preview.units)
    _draw_legend(lower[1], preview, rows, seen, _notes(preview, surveys, rows, seen))
    title, place = drawable(preview.title, MAX_TITLE), (SIDE / width, 1 - 0.2 / height)
    figure.text(*place, title, va="top", fontsize=FONT + 3, fontweight="bold")
    return figure


def _guide(surveys: Sequence[Survey]) -> Survey:
    """Return the survey that determines the planes: of the truth, unless the truth is empty."""
    return next((found for found in reversed(surveys) if found.largest is not None), surveys[0])


def _window(planes: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """Return the intensities that are drawn as black and as white."""
    values = np.concatenate([plane.ravel() for plane in planes])
    black, white = np.percentile(values, PERCENTILES).tolist()
    if black == white:  # nearly everything is background
        black, white = float(values.min()), float(values.max())
    return black, white


def _draw_image(
    axes: Axes,
    view: View,
    plane: npt.NDArray[Any],
    geometry: Geometry,
    window: tuple[float, float],
) -> None:
    width, height = (
        geometry.shape[axis] * geometry.spacing_mm[axis]
        for axis in (view.horizontal, view.vertical)
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


def _thin(view: View, steps: Sequence[int]) -> tuple[slice, slice]:
    """Return which voxels of a plane are drawn."""
    return slice(None, None, steps[view.horizontal]), slice(None, None, steps[view.vertical])


def _outline(
    axes: Axes, view: View, plane: Labels, preview: Preview, style: Any, steps: Sequence[int]
) -> set[int]:
    """Draw the outlines of the structures in a plane, and return the structures' indices."""
    x_mm, y_mm = (
        (np.arange(size + 2) - 0.5) * steps[axis] * preview.image.geometry.spacing_mm[axis]
        for size, axis in zip(plane.shape, (view.horizontal, view.vertical), strict=True)
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


def _name_edges(axes: Axes, view: View, is_anatomical: bool) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    ends = PATIENT_ENDS if is_anatomical else ARRAY_ENDS
    (first, last), (low, high) = ends[view.horizontal], ends[view.vertical]
    left, right = (last, first) if is_anatomical else (first, last)
    if not is_anatomical:
        low, high = high, low
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


Row = tuple[int | None, tuple[str, ...]]
"""A line of the legend: the structure, None for several; its name and numbers."""


def _rows(preview: Preview, surveys: Sequence[Survey]) -> list[Row]:
    """Return the structures of the legend: all, or the largest ones and how many more there are."""
    structures, last = preview.structures, surveys[-1].num_voxels
    named = list(range(len(structures)))
    if len(named) > MAX_ROWS:
        named = sorted(named, key=lambda index: -last[index])[:MAX_ROWS]
    rows: list[Row] = []
    for index in named:
        cells = [preview.volume_text(found.num_voxels[index]) for found in surveys]
        if preview.truth is not None:
            cells.append(score(preview.dice[index]))
        rows.append((index, (drawable(structures[index].name, MAX_LETTERS), *cells)))
    left = set(range(len(structures))) - set(named)
    if left:
        num_left = sum(last[index] > 0 for index in left)
        counts = [sum(found.num_voxels[index] for index in left) for found in surveys]
        cells = [*map(preview.volume_text, counts), *[""] * (preview.truth is not None)]
        rows.append((None, (f"and {num_left} more", *cells)))
    return rows


def _draw_legend(
    axes: Axes, preview: Preview, rows: Sequence[Row], seen: set[int], notes: Sequence[str]
) -> None:
    """Write names beside their colours, their numbers, and notes below."""
    axes.set_axis_off()
    down = 0.0

    def write(text: str, right: float = 0, **how: Any) -> None:
        place = {"xycoords": "axes fraction", "textcoords": "offset points"}
        axes.annotate(text, (0, 1), (72 * right, -72 * down), va="top", **{**place, **how})

    def write_row(cells: Sequence[str], **how: Any) -> None:
        text = f"{cells[0]:{MAX_LETTERS}}" + "".join(f"{cell:>11}" for cell in cells[1:])
        write(text, 0.25, family="monospace", fontsize=SMALL, **how)

    write_row(("", *(HEADS if preview.truth is not None else ONE_HEAD)), color=DIM)
    for index, cells in rows:
        down += LINE_INCHES
        is_seen = index is None or index in seen
        write_row(cells, color="black" if is_seen else DIM)
        if index is not None:
            mark = "■" if is_seen else "□"
            write(mark, color=LABELS[index % len(LABELS)], fontsize=FONT)
    down += LINE_INCHES / 2
    for note in notes:
        down += LINE_INCHES
        is_warning = note == EMPTY
        weight, colour = ("bold", "black") if is_warning else ("normal", DIM)
        write(note, fontsize=SMALL, fontweight=weight, color=colour)


def _notes(
    preview: Preview, surveys: Sequence[Survey], rows: Sequence[Row], seen: set[int]
) -> list[str]:
    """Return the notes below the picture, a line each."""
    notes = []
    if surveys[0].largest is None:
        notes.append(EMPTY)
    if preview.truth is not None:
        notes.append("Solid: segmented; dashed: true.")
    if seen and any(index is not None and index not in seen for index, _ in rows):
        notes.append("Labels in grey are not in these planes.")
    largest = _guide(surveys).largest
    planes = "Middle planes"
    if largest is not None:
        name = drawable(preview.structures[largest].name, MAX_LETTERS)
        planes = f"Planes with the largest area of {name}"
    origin, sides = "the first voxel", "The file does not say where left and right are."
    if preview.image.geometry.is_anatomical:
        origin = "the left, the back and the bottom"
        sides = "Radiological view: the patient's right is on the left."
    notes += [f"{planes},", f"counted from {origin}."]
    return [*notes, sides] if preview.units == MILLIMETRES else notes


def _draw_scale(axes: Axes, most_mm: float, down: float, units: Units) -> None:
    """Draw a scale bar below a plane: of the largest round length up to ``most_mm``."""
    most = most_mm / units.mm
    power = 10.0 ** math.floor(math.log10(most))
    length = max(step * power for step in (1, 2, 5) if step * power <= most)
    text = f"{length:g} {units.length}"
    where = {"bbox_to_anchor": (0, -down), "bbox_transform": axes.transAxes}
    bar = AnchoredSizeBar(
        axes.transData, length * units.mm, text, "upper left", borderpad=0, frameon=False, **where
    )
    axes.add_artist(bar)


def write_preview(path: Path, image: Image, labels: Labels, label_names: Mapping[int, str]) -> None:
    """Draw a segmentation (X, Y, Z) over its scan into a file."""
    structures = [Structure(name=name, values=(value,)) for value, name in label_names.items()]
    title = image.geometry.path.name
    preview = Preview(title=title, image=image, labels=labels, structures=structures)
    save_figure(preview_figure(preview), path)
