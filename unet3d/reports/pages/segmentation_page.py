"""The page of a segmentation: a viewer of the scan with its labels, and a table of the labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.fitting import open_fitting
from unet3d.images.image import Image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import LabelMap
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.source import AS_STATED, Reading
from unet3d.images.units import Units
from unet3d.inference.scans import label_statistics
from unet3d.reports.figures import LABELS
from unet3d.reports.pages.page import drawing_of, render, resource
from unet3d.reports.pages.reduced import (
    Affine,
    greys_of,
    means,
    middles,
    numbered,
    reduced_affine,
    steps_for,
)
from unet3d.reports.planes import Structure
from unet3d.reports.preview import Preview, preview_figure

MAX_LABELS = 1000
"""Most distinct values of a label map; a file with more is taken for an image."""

MAX_LABEL = 2**53
"""Highest value that a page can name: JavaScript's numbers are float64."""

NIIVUE = "niivue/niivue.js"
LICENCES = ("niivue/LICENSE", "niivue/LICENSES-OF-PARTS.txt")

ANATOMICAL_VIEWS = ("axial", "coronal", "sagittal")
ARRAY_VIEWS = ("XY", "XZ", "YZ")
"""Names of views for a file without anatomical directions."""


def segmentation_page(
    segmentation: Path,
    image: Path,
    names: Mapping[int, str] | None = None,
    reading: Reading = AS_STATED,
) -> str:
    """Return the page of a segmentation and its scan.

    Names of labels are taken from the segmentation's header unless they are given. Raises
    VolumeError if a file cannot be read, the grids differ, the segmentation is not a label map, or
    memory does not suffice. ``reading`` is what the user states about both; a scan with several
    levels is read at the one of the segmentation. Of large volumes, a coarser level or every few
    voxels are shown.
    """
    with explaining_memory(f"cannot show {segmentation}"):
        labels, scan, shape = open_fitting(segmentation, image, reading)
        return _page(_statistics(scan, labels, names), scan, labels, shape)


def _statistics(scan: Image, labels: LabelMap, names: Mapping[int, str] | None) -> dict[str, Any]:
    """Return the result of :func:`label_statistics`, by the names of labels."""
    path = labels.geometry.path
    values = np.unique(labels.array).tolist()
    if len(values) > MAX_LABELS or values[0] < 0 or values[-1] > MAX_LABEL:
        raise VolumeError(
            f"{path} holds {len(values)} different values, from {values[0]} to {values[-1]}; "
            f"is it an image? name a label map with at most {MAX_LABELS} values, from 0 "
            "to 2^53"
        )
    if names is None:
        names = read_label_names(path)
    every = sorted({*values, *names} - {0})
    named = {value: names.get(value, f"label {value}") for value in every}
    if len(set(named.values())) < len(named):
        named = {value: f"{name} ({value})" for value, name in named.items()}
    return label_statistics(labels.array, scan, named)


def _page(statistics: Mapping[str, Any], scan: Image, labels: LabelMap, whole_shape: Shape) -> str:
    geometry, image = scan.geometry, scan.read(channel=0)[0]
    units = Units.of(geometry.spacing_mm)
    steps = steps_for(geometry.shape, geometry.spacing_mm)
    # The viewer expects mm and sizes of patients, so lengths in other units pass for mm.
    affine = np.diag([1 / units.mm] * 3 + [1]) @ reduced_affine(geometry.affine, steps)
    reduced = middles(labels.array, steps)
    rows = _rows(statistics, reduced, affine, units)
    greys = greys_of(means(image, steps), affine)
    structures = [Structure(name=row["name"], values=(row["value"],)) for row in rows]
    preview = Preview(
        title=geometry.path.name, image=scan, labels=labels.array, structures=structures
    )
    measured, notes = "all voxels", []
    if geometry.shape != whole_shape:
        measured = f"{times(geometry.shape)} of {times(whole_shape)} voxels"
        notes.append(f"This volume is large: {measured} are shown and measured.")
    return render(
        "segmentation.html",
        styles=["templates/page.css", "templates/viewer.css"],
        scripts=[NIIVUE, "templates/viewer.js"],
        title=labels.geometry.path.name,
        notes=notes,
        rows=rows,
        # Shown without the viewer, and in print.
        picture=drawing_of(preview_figure(preview), "png"),
        image=Markup(greys.nifti),  # base64
        labels=Markup(numbered(reduced, [row["value"] for row in rows], affine)),
        viewer={
            "labels": [
                {key: row[key] for key in ("name", "colour", "place", "num_voxels")} for row in rows
            ],
            "extent": [
                size * mm / units.mm
                for size, mm in zip(geometry.shape, geometry.spacing_mm, strict=True)
            ],
            "unit": units.length,
            "is_anatomical": geometry.is_anatomical,
            "greys": [greys.lowest, greys.highest],
            "shown": [greys.black, greys.white],
        },
        views=ANATOMICAL_VIEWS if geometry.is_anatomical else ARRAY_VIEWS,
        is_anatomical=geometry.is_anatomical,
        is_reduced=max(steps) > 1,
        measured=measured,
        steps=times(steps),
        shape=times(geometry.shape),
        shown_shape=times(reduced.shape),
        num_channels=geometry.num_channels,
        facts=[
            ("segmentation", str(labels.geometry.path)),
            ("scan", str(geometry.path)),
            ("voxels", times(whole_shape)),
            ("spacing", units.spacing_text(geometry.spacing_mm)),
        ],
        niivue=resource(NIIVUE).partition(",")[0].removeprefix("// "),
        licences="\n\n".join(map(resource, LICENCES)).splitlines(),
    )


def _rows(
    statistics: Mapping[str, Any], reduced: npt.NDArray[Any], affine: Affine, units: Units
) -> list[dict[str, Any]]:
    """Return the lines of the table, in ascending order of the values."""
    rows = []
    for index, (name, found) in enumerate(statistics.items()):
        intensity = found["intensity"][0]
        rows.append(
            {
                "name": name,
                "value": found["value"],
                "colour": LABELS[index % len(LABELS)],
                "volume": units.volume_text(found["volume_ml"]),
                "num_voxels": found["num_voxels"],
                "intensity": intensity,
                "place": _middle(reduced == found["value"], affine) if intensity else None,
            }
        )
    return rows


def _middle(mask: npt.NDArray[np.bool_], affine: Affine) -> list[float] | None:
    """Return the position of the voxel nearest to the centre of all voxels; None: no voxels."""
    where = np.argwhere(mask)
    if not len(where):
        return None
    apart = (where - where.mean(axis=0)) @ affine[:3, :3].T
    nearest = where[int(np.argmin((apart**2).sum(axis=1)))]
    return [float(place) for place in affine[:3, :3] @ nearest + affine[:3, 3]]
