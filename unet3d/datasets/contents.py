"""The contents of a data set: shapes, spacings, intensities, labels of its cases, and outliers.

Arrays are measured while they are in memory for the checks, so no file is read twice.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.config import Shape, Spacing
from unet3d.datasets.dataset import Dataset
from unet3d.datasets.labels import ScoredLabels, values_of
from unet3d.errors import counted
from unet3d.images.files import times
from unet3d.images.units import MILLIMETRES, Units
from unet3d.inputs.plain_data import printable

PERCENTILES = (0, 1, 50, 99, 100)

SAMPLE_VOXELS = 2**20
"""Percentiles of larger images are taken from every second, third, ... voxel along each axis."""

MAX_LISTED = 5
"""Most channels, labels and outliers that printed lines name; the JSON file has all."""

MAX_NAME, MAX_LINE = 24, 500
"""Most letters of a name in a printed line, and of the text after it."""

MIN_CASES = 8
"""With fewer cases, no outliers are reported."""

FAR_OUT = 3.0
"""Distance beyond a quartile, in interquartile ranges, from which a value is far out (Tukey)."""

LEAST_RANGE = 0.1
"""Smallest interquartile range to assume, because the range of almost equal cases is near 0. It
applies to logarithms, and to intensities divided by the range from the 1st to the 99th
percentile."""

Numbers = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class CaseContents:
    """Measurements of a case."""

    name: str
    shape: Shape
    spacing_mm: Spacing
    voxel_ml: float
    intensities: dict[int, list[float]] = field(default_factory=dict)
    """Percentiles of each readable channel, by its index."""
    num_voxels: dict[int, int] | None = None
    """Number of voxels by label value; None: the label map cannot be read."""


def intensities_of(array: npt.NDArray[Any]) -> list[float]:
    """Return percentiles of a channel (X, Y, Z); lowest and highest include all voxels."""
    step = math.ceil((array.size / SAMPLE_VOXELS) ** (1 / 3))
    inner = np.percentile(array[::step, ::step, ::step], PERCENTILES[1:-1])
    return [float(value) for value in (array.min(), *inner, array.max())]


def voxels_of(array: npt.NDArray[np.integer[Any]]) -> dict[int, int]:
    """Return the number of voxels of each value in a label map (X, Y, Z)."""
    counts: Counter[int] = Counter()
    for plane in array:  # in memory order
        values, found = np.unique(plane, return_counts=True)
        counts.update(dict(zip(values.tolist(), found.tolist(), strict=True)))
    return dict(counts)


def summary(dataset: Dataset, cases: Sequence[CaseContents]) -> dict[str, Any]:
    """Return a summary of all cases, outliers, and each case, as plain values for JSON."""
    scored = ScoredLabels.of(dataset).names
    volumes_ml = {name: _volumes_ml(cases, values_of(label)) for label, name in scored.items()}
    shapes = np.array([case.shape for case in cases], np.float64).reshape(-1, 3)
    spacings_mm = np.array([case.spacing_mm for case in cases]).reshape(-1, 3)
    channels = []
    far_out: dict[str, list[str]] = {}

    def look(values: Numbers, texts: Iterable[str]) -> None:
        for case, text, is_far in zip(cases, texts, _are_far_out(values), strict=True):
            if is_far:
                far_out.setdefault(case.name, []).append(text)

    look(np.log(shapes), (f"shape {times(shape)}" for shape in shapes))
    units = _units(_spread(spacings_mm))
    look(
        np.log(spacings_mm),
        (f"spacing {times(mm / units.mm)} {units.length}" for mm in spacings_mm),
    )
    for number, name in enumerate(dataset.channel_names):
        unknown = [math.nan] * len(PERCENTILES)
        found = np.array([case.intensities.get(number, unknown) for case in cases])
        spread = _spread(found)
        channels.append({"name": name, "intensities": spread})
        if spread is not None:
            inner = found[:, 1:-1] / (spread["median"][-2] - spread["median"][1] or 1.0)
            look(inner, (f"{name} {_listed(of_case[1:-1])}" for of_case in found))
    for name, found in volumes_ml.items():
        volumes = (f"{name} {ml / units.ml:.4g} {units.volume}" for ml in found)
        look(np.log(found)[:, None], volumes)
    return {
        "name": dataset.root.name,
        "num_cases": len(dataset.cases),
        "shape": _spread(shapes),
        "spacing_mm": _spread(spacings_mm),
        "percentiles": PERCENTILES,
        "channels": channels,
        "num_label_maps": sum(case.num_voxels is not None for case in cases),
        "labels": [
            {"name": name, "num_cases": int(np.isfinite(found).sum()), "volume_ml": _spread(found)}
            for name, found in volumes_ml.items()
        ],
        "outliers": [{"case": name, "why": texts} for name, texts in far_out.items()],
        "cases": [asdict(case) for case in cases],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield a summary as about ten lines of text."""
    channels, labels, outliers = found["channels"], found["labels"], found["outliers"]
    units = _units(found["spacing_mm"])
    rows = [
        ("shape", _told(found["shape"], times, "voxels")),
        (
            "spacing",
            _told(found["spacing_mm"], lambda mm: times(np.divide(mm, units.mm)), units.length),
        ),
    ]
    for channel in channels[:MAX_LISTED]:
        text, spread = "unknown", channel["intensities"]
        if spread is not None:
            inner = f"percentiles {_listed(PERCENTILES[1:-1])}: {_listed(spread['median'][1:-1])}"
            text = f"{spread['lowest'][0]:.6g} to {spread['highest'][-1]:.6g}, {inner} (median)"
        rows.append((channel["name"], text))
    for label in labels[:MAX_LISTED]:
        text = f"in {label['num_cases']} of {counted(found['num_label_maps'], 'case')}"
        if label["num_cases"]:
            volume = _told(label["volume_ml"], lambda ml: f"{ml / units.ml:.4g}", units.volume)
            text += f", {volume}"
        rows.append((label["name"], text))
    named = [f"{one['case']} ({'; '.join(one['why'])})" for one in outliers[:MAX_LISTED]]
    rows += zip(("outliers", *[""] * MAX_LISTED), named or ["none"], strict=False)
    for what, all_of in (("channels", channels), ("labels", labels), ("outliers", outliers)):
        if len(all_of) > MAX_LISTED:
            rows.append(("", f"and {len(all_of) - MAX_LISTED} more {what}: --json names all"))
    counts = (found["num_cases"], "case"), (len(channels), "channel"), (len(labels), "label")
    words = ", ".join(counted(number, noun) for number, noun in counts)
    yield f"{printable(found['name'])}: {words}"
    names = [printable(name, MAX_NAME) for name, _ in rows]
    for name, (_, text) in zip(names, rows, strict=True):
        yield f"  {name:{max(map(len, names))}}  {printable(text, MAX_LINE)}"


def _units(spacings_mm: dict[str, Any] | None) -> Units:
    """Return the units for the spread of spacings."""
    return MILLIMETRES if spacings_mm is None else Units.of(spacings_mm["median"])


def _volumes_ml(cases: Sequence[CaseContents], values: Sequence[int]) -> Numbers:
    """Return the volume of a label or region in each case, (N,); NaN for a case without it."""
    counts = [sum((case.num_voxels or {}).get(value, 0) for value in values) for case in cases]
    return np.array(
        [case.voxel_ml * count or math.nan for case, count in zip(cases, counts, strict=True)]
    )


def _are_far_out(values: Numbers) -> npt.NDArray[np.bool_]:
    """Return which cases (N,) are outliers in any of their values (N, K), by Tukey's rule."""
    if np.isfinite(values).all(axis=1).sum() < MIN_CASES:
        return np.zeros(len(values), bool)
    low, high = np.nanpercentile(values, (25, 75), axis=0)
    reach = FAR_OUT * np.maximum(high - low, LEAST_RANGE)
    far: npt.NDArray[np.bool_] = ((values < low - reach) | (values > high + reach)).any(axis=1)
    return far


def _spread(values: Numbers) -> dict[str, Any] | None:
    """Return median and extremes of the values of all cases, (N,) or (N, K); None: no values."""
    known = [of_case for of_case in values if not np.isnan(of_case).any()]
    if not known:
        return None
    spread = np.percentile(known, (50, 0, 100), axis=0).tolist()
    return dict(zip(("median", "lowest", "highest"), spread, strict=True))


def _told(spread: dict[str, Any] | None, form: Callable[[Any], str], unit: str) -> str:
    if spread is None:
        return "unknown"
    median, lowest, highest = map(form, spread.values())
    extremes = "" if lowest == highest else f" (median), {lowest} to {highest}"
    return f"{median}{extremes} {unit}"


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
