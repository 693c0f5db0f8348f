"""The page of a segmentation: a viewer of the scan with its labels, and a table of them."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from unet3d.errors import VolumeError
from unet3d.images.geometry import same_grid, voxel_mm3
from unet3d.images.image import Image, open_image
from unet3d.images.label_names import read_label_names
from unet3d.images.labels import LabelMap, on_grid_of, read_label
from unet3d.images.memory_limits import explaining_memory
from unet3d.inference.scans import label_statistics
from unet3d.reports.format import millilitres, save_figure, size_text
from unet3d.reports.pages.page import render, resource
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
from unet3d.reports.preview import COLOURS, Preview, preview_figure

MAX_LABELS = 1000
"""Different values of a label map; more are the grey values of an image."""

NIIVUE = "niivue/niivue.js"
LICENCES = ("niivue/LICENSE", "niivue/LICENSES-OF-PARTS.txt")


def segmentation_page(
    segmentation: Path, image: Path, names: Mapping[int, str] | None = None
) -> str:
    """Return the page of a segmentation.

    Args:
        segmentation: The label map.
        image: The scan, on the same grid.
        names: Name of each label by its value, instead of those in the segmentation's header.

    Raises:
        VolumeError: A file cannot be read, they do not lie on one grid, the segmentation is none,
            or memory does not suffice.
    """
    scan = open_image(image)
    disagreement = same_grid(open_image(segmentation).geometry, scan.geometry)
    if disagreement is not None:
        raise VolumeError(
            f"{segmentation} and {image} do not lie on one grid: {disagreement}; name the scan "
            "that was segmented"
        )
    with explaining_memory(f"cannot show {segmentation}"):
        labels = on_grid_of(scan.geometry, read_label(segmentation))
        return _page(_statistics(scan, labels, names), scan, labels)


def _statistics(scan: Image, labels: LabelMap, names: Mapping[int, str] | None) -> dict[str, Any]:
    """Return, by the name of each label, what :func:`label_statistics` has of it."""
    path = labels.geometry.path
    values = np.unique(labels.array).tolist()
    if len(values) > MAX_LABELS or values[0] < 0:
        raise VolumeError(
            f"{path} holds {len(values)} different values, from {values[0]} to {values[-1]}; "
            f"is it an image? name a label map, of at most {MAX_LABELS} values from 0"
        )
    if names is None:
        names = read_label_names(path)
    every = sorted({*values, *names} - {0})
    named = {value: names.get(value, f"label {value}") for value in every}
    if len(set(named.values())) < len(named):
        named = {value: f"{name} ({value})" for value, name in named.items()}
    return label_statistics(labels.array, scan, named)


def _page(statistics: Mapping[str, Any], scan: Image, labels: LabelMap) -> str:
    geometry, image = scan.geometry, scan.read(channel=0)[0]
    steps = steps_for(geometry.shape, geometry.spacing_mm)
    affine = reduced_affine(geometry.affine, steps)
    reduced = middles(labels.array, steps)
    rows = _rows(statistics, reduced, affine)
    greys = greys_of(means(image, steps), affine)
    return render(
        "segmentation.html",
        styles=["templates/page.css", "templates/viewer.css"],
        scripts=[NIIVUE, "templates/viewer.js"],
        title=labels.geometry.path.name,
        notes=[],
        rows=rows,
        picture=_picture(scan, labels, rows),
        image=Markup(greys.nifti),  # base64
        labels=Markup(numbered(reduced, [row["value"] for row in rows], affine)),
        viewer={
            "labels": [
                {
                    "name": row["name"],
                    "colour": _rgb(row["colour"]),
                    "mm": row["mm"],
                    "num_voxels": row["num_voxels"],
                }
                for row in rows
            ],
            "extent_mm": [
                size * mm for size, mm in zip(geometry.shape, geometry.spacing_mm, strict=True)
            ],
            "greys": [greys.lowest, greys.highest],
            "shown": [greys.black, greys.white],
        },
        is_reduced=max(steps) > 1,
        steps=size_text(steps),
        shape=size_text(geometry.shape),
        shown_shape=size_text(reduced.shape),
        num_channels=geometry.num_channels,
        facts=[
            (what, value)
            for what, value in (
                ("segmentation", str(labels.geometry.path)),
                ("scan", str(geometry.path)),
                ("voxels", size_text(geometry.shape)),
                ("spacing", " x ".join(f"{mm:.4g}" for mm in geometry.spacing_mm) + " mm"),
            )
            if value
        ],
        niivue=resource(NIIVUE).partition(",")[0].removeprefix("// "),
        licences="\n\n".join(map(resource, LICENCES)).splitlines(),
    )


def _rows(
    statistics: Mapping[str, Any], reduced: npt.NDArray[Any], affine: Affine
) -> list[dict[str, Any]]:
    """Return the lines of the table, in ascending order of the values."""
    rows = []
    for index, (name, found) in enumerate(statistics.items()):
        intensity = found["intensity"][0]
        rows.append(
            {
                "name": name,
                "value": found["value"],
                "colour": COLOURS[index % len(COLOURS)],
                "volume": millilitres(found["volume_ml"]),
                "volume_ml": found["volume_ml"],
                "num_voxels": found["num_voxels"],
                "intensity": intensity,
                "mm": _middle(reduced == found["value"], affine) if intensity else None,
            }
        )
    return rows


def _middle(mask: npt.NDArray[np.bool_], affine: Affine) -> list[float] | None:
    """Return the place in mm of the voxel nearest to the middle of all; None without any."""
    where = np.argwhere(mask)
    if not len(where):
        return None
    apart = (where - where.mean(axis=0)) @ affine[:3, :3].T
    nearest = where[int(np.argmin((apart**2).sum(axis=1)))]
    return [float(mm) for mm in affine[:3, :3] @ nearest + affine[:3, 3]]


def _picture(scan: Image, labels: LabelMap, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what is seen without the viewer, and on paper."""
    figure = preview_figure(
        Preview(
            title=scan.geometry.path.name,
            image=scan,
            labels=labels.array,
            structures=[Structure(name=row["name"], values=(row["value"],)) for row in rows],
            spacing_mm=scan.geometry.spacing_mm,
            voxel_ml=voxel_mm3(scan.geometry.affine) / 1000,
        )
    )
    file = io.BytesIO()
    save_figure(figure, file)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))
