"""Preparation of a data set: from scans to arrays for training.

:func:`plan_preprocessing` decides from the data set how images are prepared; :func:`prepare_cases`
prepares them once, into the cache.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from unet3d.config import DataSettings, Shape, Spacing
from unet3d.datasets.dataset import Case, Dataset
from unet3d.datasets.labels import Labels
from unet3d.distributed.ranks import num_cores
from unet3d.distributed.workers import map_items
from unet3d.errors import CacheError, DatasetError, VolumeError, naming
from unet3d.images.geometry import ONE_GRID, Geometry, same_grid
from unet3d.images.image import Image, open_image, open_source
from unet3d.images.labels import LabelMap, on_grid_of, read_label
from unet3d.images.source import AS_STATED
from unet3d.inputs.ahead import in_threads
from unet3d.inputs.plain_data import key_of, validated
from unet3d.preparation.cache import Cache, PreparedCase
from unet3d.preparation.normalization import (
    ChannelNormalization,
    Kind,
    is_microscopic,
    kind_of,
    sampled,
)
from unet3d.preparation.prepared_image import (
    kept_box,
    nonzero_box,
    prepare_image,
    prepare_label,
)
from unet3d.preparation.resample import median_spacing, resampled_shape, target_spacing
from unet3d.preparation.transform import Preprocessing
from unet3d.records import recall, remember
from unet3d.terminal import counting

logger = logging.getLogger(__name__)

MAX_INTENSITIES_PER_CASE = 10_000
"""Most voxels of a case for the statistics of channels."""

RAW_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
"""Types of intensities as microscopes measure them."""

LARGEST_IN_FLOAT16 = 2.0**14
"""Normalised intensities up to this are stored as float16, which reaches four times as far."""

MASKED_SHARE = 0.75
"""If cropping leaves at most this share of the volume in the median case, z-scores are computed
inside a mask (the value of nnU-Net)."""

MAX_READERS = 4
"""Most threads that read a case each, because each case may take gibibytes of memory."""

VERSION = 12
"""Part of every key: raise it whenever preparation gives other arrays for the same settings, or the
format of entries changes."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Spacing and shape of a data set, from which patch size and network follow."""

    spacing_mm: Spacing
    """Spacing of the prepared arrays: the target, or the median if each keeps its own."""
    shape: Shape
    """Median shape of the prepared arrays."""
    shapes: frozenset[Shape]
    """All shapes of the prepared arrays."""
    num_cases: int
    """Number of cases in all folds."""

    @property
    def num_voxels(self) -> int:
        """Voxels of all cases together, counting each with the median shape."""
        return self.num_cases * math.prod(self.shape)


def plan_preprocessing(
    dataset: Dataset, settings: DataSettings, geometries: Sequence[Geometry] = ()
) -> tuple[Preprocessing, Fingerprint]:
    """Decide how every image of a data set is prepared.

    Voxels are read for the nonzero box and the statistics of channels; the cache keeps both. All
    labelled cases count in every fold, so that folds share prepared arrays. ``geometries``: one for
    each case; by default headers are read.
    """
    geometries = geometries or [
        open_source(case.images[0], case.reading).geometry for case in dataset.cases
    ]
    is_raw = settings.normalization == "auto" and _is_raw(dataset, geometries)
    kinds = [kind_of(name, settings.normalization, is_raw) for name in dataset.channel_names]
    kept, channels = _found_in_voxels(dataset, Cache(settings.cache), kinds)
    shares = [
        math.prod(box) / math.prod(one.shape) for box, one in zip(kept, geometries, strict=True)
    ]
    if np.median(shares) <= MASKED_SHARE:
        masked = ChannelNormalization(kind="z-score-inside")
        channels = [masked if one.kind == "z-score" else one for one in channels]
    spacings_mm = [geometry.spacing_mm for geometry in geometries]
    target_mm = target_spacing(spacings_mm, kept, settings.spacing_mm)
    shapes = [
        resampled_shape(shape, spacing_mm, target_mm)
        for shape, spacing_mm in zip(kept, spacings_mm, strict=True)
    ]
    x, y, z = (int(size) for size in np.median(shapes, axis=0).round())
    fingerprint = Fingerprint(
        spacing_mm=target_mm or median_spacing(spacings_mm),
        shape=(x, y, z),
        shapes=frozenset(shapes),
        num_cases=len(geometries),
    )
    preprocessing = Preprocessing(
        spacing_mm=target_mm,
        channels=tuple(channels),
        channel_names=dataset.channel_names,
        crops_to_nonzero=True,
        **{field.name: getattr(dataset, field.name) for field in fields(Labels)},
    )
    return preprocessing, fingerprint


def _is_raw(dataset: Dataset, geometries: Sequence[Geometry]) -> bool:
    """Return whether all cases have intensities as microscopes measure them."""
    return all(map(is_microscopic, geometries)) and all(
        open_image(case.images, reading=case.reading).dtype in RAW_TYPES for case in dataset.cases
    )


def _found_in_voxels(
    dataset: Dataset, store: Cache, kinds: Sequence[Kind | Literal["percentiles"]]
) -> tuple[list[Shape], list[ChannelNormalization]]:
    """Return the shape of the nonzero box of each case, and the normalisation of each channel.

    The cache keeps the results of each case and of all cases together, so only new cases are read.
    """
    cases, counted = dataset.cases, sorted({"ct", "percentiles"}.intersection(kinds))
    outside: list[int] = []
    if "ct" in counted:  # counts voxels inside labels
        outside += dataset.raw_values[0] if dataset.raw_values else (0,)
        outside += [] if dataset.ignore_value is None else [dataset.ignore_value]
    digests = _digests(cases, store, labels=bool(outside))
    key = key_of([digests, outside, list(kinds)], VERSION)
    record = store.folder / "planned" / f"{key}.json"

    def read(tree: Any) -> tuple[list[Shape], list[ChannelNormalization]]:
        shapes: list[Shape] = [(x, y, z) for x, y, z in tree["shapes"]]
        return shapes, [validated(ChannelNormalization, one) for one in tree["channels"]]

    known = recall(record, read)
    if known is not None:
        return known
    logger.debug("reading %d cases", len(cases))
    with counting("reading", len(cases)) as watch:
        # Threads: starting processes would take longer than reading most data sets.
        found = _in_threads(
            lambda task: _examined(*task, store, counted, outside),
            list(zip(cases, digests, strict=True)),
            watch,
        )
    channels = []
    for number, kind in enumerate(kinds):
        if kind != "ct" and kind != "percentiles":
            channels.append(ChannelNormalization(kind=kind))
            continue
        of_cases = [intensities[kind][:, number] for _, intensities in found]
        if not any(map(len, of_cases)):
            raise DatasetError(
                f"{dataset.root}: every label map is empty, so CT intensities have no statistics; "
                "check the labels or set data.normalization=z-score"
            )
        channels.append(ct_normalization(of_cases))
    shapes = [shape for shape, _ in found]
    remember(record, {"shapes": shapes, "channels": [asdict(one) for one in channels]})
    return shapes, channels


_Examined = tuple[Shape, dict[str, npt.NDArray[np.float32]]]


def _examined(
    case: Case, digests: Sequence[str], store: Cache, counted: Sequence[str], outside: Sequence[int]
) -> _Examined:
    """Return the shape of the nonzero box, and intensities (N, C) for each kind that is counted.

    For ``ct`` they are inside labels; ``outside`` has the label values of all other voxels.
    """
    record = store.folder / "examined" / f"{key_of([digests, counted, outside], VERSION)}.json"

    def read(tree: Any) -> _Examined:
        (x, y, z), found = tree["shape"], tree["intensities"]
        return (x, y, z), {kind: np.array(one, np.float32) for kind, one in found.items()}

    known = recall(record, read)
    if known is None:
        known = shape, intensities = _found_in_case(case, counted, outside)
        found = {kind: one.tolist() for kind, one in intensities.items()}
        remember(record, {"shape": shape, "intensities": found})
    return known


def _found_in_case(case: Case, counted: Sequence[str], outside: Sequence[int]) -> _Examined:
    intensities = {}
    if "ct" in counted:
        image, label = _read_case(case)
        inside = np.flatnonzero(np.isin(label.array, outside, invert=True))
        voxels = image.whole().reshape(image.num_channels, -1)
        intensities["ct"] = voxels[:, inside[_some(len(inside))]].T
    else:
        image = open_image(case.images, reading=case.reading)
    if "percentiles" in counted:
        voxels = sampled(image).reshape(image.num_channels, -1)
        intensities["percentiles"] = voxels[:, _some(voxels.shape[1])].T
    if not all(np.isfinite(one).all() for one in intensities.values()):
        raise VolumeError(
            f"{case.images[0]} has voxels that are NaN or infinite; replace them, for example by 0"
        )
    x, y, z = (part.stop - part.start for part in nonzero_box(image))
    return (x, y, z), intensities


def _some(number: int) -> npt.NDArray[np.int64]:
    """Return indices of a number of voxels, at most :data:`MAX_INTENSITIES_PER_CASE`."""
    if number <= MAX_INTENSITIES_PER_CASE:
        return np.arange(number)
    return np.random.default_rng(0).choice(number, MAX_INTENSITIES_PER_CASE, replace=False)


def prepare_cases(
    cases: Sequence[Case], preprocessing: Preprocessing, cache: Path | None, num_workers: int
) -> list[PreparedCase]:
    """Return prepared cases in order; cases not in the cache are prepared by worker processes.

    ``num_workers`` of 0: by this process.
    """
    plan = preprocessing.to_dict()
    for name in ("channel_names", "label_names", "regions"):
        del plan[name]  # names and regions do not change the arrays
    store = Cache(cache)
    keys = [key_of([*digests, plan], VERSION) for digests in _digests(cases, store)]
    tasks = list(zip(cases, keys, strict=True))

    def load(task: tuple[Case, str]) -> PreparedCase | None:
        case, key = task
        return store.load_case(key, case.name)

    found = _in_threads(load, tasks)
    lacking = [task for task, result in zip(tasks, found, strict=True) if result is None]
    if lacking:
        logger.debug("preparing %d of %d cases into %s", len(lacking), len(tasks), store.folder)
        prepare = partial(_prepare, store=store, preprocessing=preprocessing)
        with counting("preparing", len(lacking)) as watch:
            map_items(prepare, lacking, num_workers, watch)
        found = [result or load(task) for task, result in zip(tasks, found, strict=True)]
    prepared = [result for result in found if result is not None]
    if len(prepared) < len(tasks):
        raise CacheError(
            f"{store.folder} lost files that were written to it; do not change the folder of "
            "data.cache during a run"
        )
    return prepared


def _digests(cases: Sequence[Case], store: Cache, labels: bool = True) -> list[list[str]]:
    """Return the digests of the files of each case, and what is stated about them."""

    def of_case(case: Case) -> list[str]:
        stated = [case.reading.model_dump_json()] if case.reading != AS_STATED else []
        files = (*case.images, *[case.label] * labels)
        return [*stated, *(store.digest(path) for path in files)]

    with counting("hashing", len(cases)) as watch:
        return _in_threads(of_case, cases, watch)


def _prepare(task: tuple[Case, str], store: Cache, preprocessing: Preprocessing) -> None:
    case, key = task
    if store.has_case(key):
        return  # another process has prepared it meanwhile
    image, label = _read_case(case)
    spacing_mm = image.geometry.spacing_mm
    box = kept_box(image, preprocessing)
    try:
        classes = prepare_label(label.array[box], spacing_mm, preprocessing)
    except VolumeError as error:
        raise VolumeError(naming(case.label, error)) from error
    try:
        prepared = prepare_image(image.cut(box), preprocessing)
    except VolumeError as error:
        raise VolumeError(naming(case.images[0], error)) from error
    stored = stored_image(prepared, preprocessing.channels)
    spacing_mm, num_classes = (
        preprocessing.spacing_mm or spacing_mm,
        len(preprocessing.label_values),
    )
    store.save_case(key, stored, classes, spacing_mm, num_classes)


def stored_image(
    image: npt.NDArray[np.float32], channels: Sequence[ChannelNormalization]
) -> npt.NDArray[np.floating[Any]]:
    """Return an image (C, X, Y, Z) to store, in float16 if it holds the intensities well enough.

    float16 rounds normalised intensities to 11 binary digits, by at most 2^-11 of their value, far
    below the noise of a scan. Images with larger intensities, or with a channel that is not
    normalised and keeps its exact values, stay float32.
    """
    is_exact = any(how.kind == "none" for how in channels)
    largest = max(float(image.max()), -float(image.min()))
    return image if is_exact or largest > LARGEST_IN_FLOAT16 else image.astype(np.float16)


def _read_case(case: Case) -> tuple[Image, LabelMap]:
    """Return a case's image and label map; VolumeError if they are not on one grid."""
    image = open_image(case.images, reading=case.reading)
    label = read_label(case.label, case.reading.near(image.geometry.spacing_mm))
    disagreement = same_grid(image.geometry, label.geometry)
    if disagreement:
        where = f"not on the grid of {case.images[0]}"
        raise VolumeError(f"{case.label}: {where}: {disagreement}; {ONE_GRID}")
    return image, on_grid_of(image.geometry, label)


def ct_normalization(intensities: Sequence[npt.NDArray[np.float32]]) -> ChannelNormalization:
    """Return the normalisation of a CT channel: percentiles 0.5 and 99.5, mean, deviation.

    Every case has the same weight, as in nnU-Net. nnU-Net draws equally many voxels of each case,
    with replacement; here voxels are weighted instead. Intensities are (N,) for each case; together
    they must not be empty.
    """
    values = np.concatenate(intensities).astype(np.float64)
    sizes = [len(of_case) for of_case in intensities]
    weights = np.concatenate([np.full(size, 1 / max(size, 1)) for size in sizes])
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    mean = float(np.average(values, weights=weights))
    std = math.sqrt(np.average((values - mean) ** 2, weights=weights))
    shares = np.cumsum(weights) / weights.sum()
    low, high = values[np.searchsorted(shares, [0.005, 0.995])]
    return ChannelNormalization(
        kind="ct", low=float(low), high=float(high), mean=mean, std=std if std > 0 else 1.0
    )


def _in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    watch: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    return in_threads(work, items, min(MAX_READERS, num_cores()), watch)
