"""From a data set of scans to arrays that the network can be trained on.

:func:`plan_preprocessing` looks at the data set and decides how its images are prepared;
:func:`prepare_cases` does it, once, into the cache.
"""

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from unet3d.config import DataSettings, Shape, Spacing
from unet3d.datasets.dataset import Case, Dataset
from unet3d.distributed.workers import counting, map_items
from unet3d.errors import CacheError, DatasetError, VolumeError
from unet3d.images.header import read_header, same_grid
from unet3d.images.image_voxels import ImageVoxels
from unet3d.images.nifti import Volume, on_grid_of, read_channels, read_label
from unet3d.preparation.cache import Cache, PreparedCase
from unet3d.preparation.case_boxes import boxes_of, remember_box
from unet3d.preparation.cropping import nonzero_box, takes_much
from unet3d.preparation.normalization import ChannelNormalization, kind_of
from unet3d.preparation.prepared_image import prepare_image
from unet3d.preparation.resample import resampled_shape
from unet3d.preparation.target_spacing import median_spacing, target_spacing
from unet3d.preparation.transform import Preprocessing, kept_box, prepare_label
from unet3d.records import key_of

logger = logging.getLogger(__name__)

MAX_INTENSITIES_PER_CASE = 10_000
"""Voxels of a case, at most, from which the statistics of a CT channel are taken."""

LARGEST_IN_FLOAT16 = 2.0**14
"""Normalised intensities up to this are stored as float16, which reaches four times as far."""

VERSION = 7
"""Part of every key: raise it whenever preparation gives other arrays for the same settings, or
entries of another form."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_Preparation = tuple[Case, Preprocessing, Cache, str]
"""A case, its plan, where it goes and under which key."""

_Collection = tuple[Case, int | None, Cache, str]
"""A case, the value of voxels that nobody has labelled, where it goes and under which key."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Spacing and shape of a data set, from which patch size and network follow."""

    spacing_mm: Spacing
    """Spacing of the prepared arrays: the target, or the median where each keeps its own."""
    shape: Shape
    """Median shape of the prepared arrays."""
    shapes: frozenset[Shape]
    """All shapes that these have."""
    num_cases: int
    """How many cases there are, in all folds."""

    @property
    def num_voxels(self) -> int:
        """Voxels of all cases together, each taken for the median one."""
        return self.num_cases * math.prod(self.shape)


def plan_preprocessing(
    dataset: Dataset, settings: DataSettings, num_workers: int = 0
) -> tuple[Preprocessing, Fingerprint]:
    """Decide how every image of a data set is prepared.

    Headers are read; voxels to find what is not zero, and where a CT channel needs its statistics,
    and the cache then keeps both. All labelled cases count, in every fold, so that folds share
    prepared arrays.

    Args:
        dataset: The data set.
        settings: Target spacing, normalisation, cache.
        num_workers: Processes that collect CT statistics; 0: this one.

    Raises:
        VolumeError: A file cannot be read.
        DatasetError: A CT channel has no statistics, because every label map is empty.
        CacheError: The cache cannot be written.
    """
    headers = [read_header(case.images[0]) for case in dataset.cases]
    kinds = [kind_of(name, settings.normalization) for name in dataset.channel_names]
    channels = [ChannelNormalization(kind=kind) for kind in kinds]
    if "ct" in kinds:
        intensities = _intensities(dataset, settings.cache, num_workers)
        for channel, kind in enumerate(kinds):
            if kind == "ct":
                channels[channel] = ct_normalization(
                    [of_case[:, channel] for of_case in intensities]
                )
    whole = [header.shape for header in headers]
    kept = whole
    if settings.crop_to_nonzero:
        kept = [box.shape for box in boxes_of(dataset.cases, whole, settings.cache)]
    if takes_much(whole, kept):
        masked = ChannelNormalization(kind="z-score-inside")
        channels = [masked if one.kind == "z-score" else one for one in channels]
    spacings_mm = [header.spacing_mm for header in headers]
    median_mm = median_spacing(spacings_mm)
    target_mm = target_spacing(spacings_mm, kept, settings.spacing_mm)
    shapes = [
        resampled_shape(shape, spacing_mm, target_mm)
        for shape, spacing_mm in zip(kept, spacings_mm, strict=True)
    ]
    x, y, z = (int(size) for size in np.median(shapes, axis=0).round())
    fingerprint = Fingerprint(
        spacing_mm=target_mm or median_mm,
        shape=(x, y, z),
        shapes=frozenset(shapes),
        num_cases=len(headers),
    )
    preprocessing = Preprocessing(
        spacing_mm=target_mm,
        channels=tuple(channels),
        channel_names=dataset.channel_names,
        label_names=dataset.label_names,
        label_values=dataset.label_values,
        ignore_value=dataset.ignore_value,
        crops_to_nonzero=settings.crop_to_nonzero,
        regions=dataset.regions,
    )
    return preprocessing, fingerprint


def prepare_cases(
    cases: Sequence[Case], preprocessing: Preprocessing, cache: Path | None, num_workers: int
) -> list[PreparedCase]:
    """Prepare cases, or find them prepared.

    Args:
        cases: The cases.
        preprocessing: The plan.
        cache: Folder of the prepared arrays; None: the user's cache folder.
        num_workers: Processes that prepare; 0: this one.

    Returns:
        The cases in the same order.

    Raises:
        VolumeError: A case cannot be read or prepared; the message names the file.
        CacheError: The cache cannot be written, or lost a case.
        DatasetError: A worker was killed.
    """
    store = Cache(cache)
    settings = _settings_of_arrays(preprocessing)
    keys = [key_of([*digests, settings], VERSION) for digests in _digests(store, cases)]
    tasks = [(case, preprocessing, store, key) for case, key in zip(cases, keys, strict=True)]
    return _from_cache(_load_case, _prepare_case, tasks, store, num_workers, "preparing")


def _load_case(task: _Preparation) -> PreparedCase | None:
    case, _, store, key = task
    return store.load_case(key, case.name)


def _prepare_case(task: _Preparation) -> None:
    case, preprocessing, store, key = task
    image, label = _read_case(case)
    spacing_mm = preprocessing.spacing_of(image.header)
    voxels = ImageVoxels.of(image.array)
    box = kept_box(voxels, preprocessing).slices
    try:
        classes = prepare_label(label.array[box], spacing_mm, preprocessing)
    except VolumeError as error:
        raise VolumeError(f"{case.label}: {error}") from error
    try:
        prepared = prepare_image(voxels.cut(box), spacing_mm, preprocessing)
    except VolumeError as error:
        raise VolumeError(f"{case.images[0]}: {error}") from error
    spacing_mm = preprocessing.spacing_mm or spacing_mm
    stored = stored_image(prepared, preprocessing.channels)
    store.save_case(key, stored, classes, spacing_mm, len(preprocessing.label_values))


def stored_image(
    image: npt.NDArray[np.float32], channels: Sequence[ChannelNormalization]
) -> npt.NDArray[np.floating[Any]]:
    """Return an image as it is stored: in float16 where that loses nothing that counts.

    Normalised intensities are rounded to 11 binary digits, which is at most 2^-11 of their size
    and far below the noise of a scan. Where one is too large for float16, or a channel that is not
    normalised would not keep its exact values, all of the image stays as it is.

    Args:
        image: A prepared image, shape (C, X, Y, Z).
        channels: How each channel was normalised.
    """
    with np.errstate(over="ignore"):
        rounded = image.astype(np.float16)
    for channel, stored, how in zip(image, rounded, channels, strict=True):
        if how.kind == "none":
            fits = np.array_equal(channel, stored)
        else:
            fits = bool(np.abs(stored).max() <= LARGEST_IN_FLOAT16)
        if not fits:
            return image
    return rounded


def _read_case(case: Case) -> tuple[Volume, Volume]:
    """Return a case's image and label map, which lie on one grid."""
    image, label = read_channels(case.images), read_label(case.label)
    disagreement = same_grid(image.header, label.header)
    if disagreement:
        raise VolumeError(f"{case.label}: not on the grid of {case.images[0]}: {disagreement}")
    return image, on_grid_of(image.header, label)


def _digests(store: Cache, cases: Sequence[Case]) -> list[list[str]]:
    """Return the digests of the files of each case; their first time takes minutes, which shows."""
    found = []
    with counting("hashing", len(cases)) as watch:
        for case in cases:
            found.append([store.digest(path) for path in (*case.images, case.label)])
            watch(len(found))
    return found


def _settings_of_arrays(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return what changes prepared arrays, which names do not."""
    plan = preprocessing.to_dict()
    kept = ("spacing_mm", "channels", "label_values", "ignore_value")
    how = ("crops_to_nonzero", "orientation", "interpolation")
    return {key: plan[key] for key in (*kept, *how)}


def ct_normalization(intensities: Sequence[npt.NDArray[np.float32]]) -> ChannelNormalization:
    """Return the normalisation of a CT channel: percentiles 0.5 and 99.5, mean, deviation.

    Every case counts alike, however few of its voxels are labelled, as in nnU-Net, which draws
    equally many from each with replacement; here each voxel is weighted instead.

    Args:
        intensities: Of each case, (N,); at least one intensity in all.
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


def _intensities(
    dataset: Dataset, cache: Path | None, num_workers: int
) -> list[npt.NDArray[np.float32]]:
    """Return intensities inside the labels of every case, each of shape (N, C)."""
    store, ignored = Cache(cache), dataset.ignore_value
    keys = [key_of([*digests, ignored], VERSION) for digests in _digests(store, dataset.cases)]
    tasks = [(case, ignored, store, key) for case, key in zip(dataset.cases, keys, strict=True)]
    collected = _from_cache(
        _load_intensities,
        _collect_intensities,
        tasks,
        store,
        num_workers,
        "collecting intensities of",
    )
    if not any(len(of_case) for of_case in collected):
        raise DatasetError(
            f"{dataset.root}: every label map is empty, so CT intensities have no statistics; "
            "check the labels or set data.normalization=z-score"
        )
    return collected


def _load_intensities(task: _Collection) -> npt.NDArray[np.float32] | None:
    _, _, store, key = task
    return store.load_intensities(key)


def _collect_intensities(task: _Collection) -> None:
    case, ignored, store, key = task
    image, label = _read_case(case)
    remember_box(
        store, case, nonzero_box(ImageVoxels.of(image.array))
    )  # the planning asks for it next
    is_inside = label.array != 0
    if ignored is not None:
        is_inside &= label.array != ignored
    inside = np.flatnonzero(is_inside)
    if len(inside) > MAX_INTENSITIES_PER_CASE:
        rng = np.random.default_rng(0)
        inside = rng.choice(inside, MAX_INTENSITIES_PER_CASE, replace=False)
    voxels = image.array.reshape(len(image.array), -1)
    store.save_intensities(key, voxels[:, inside].T.copy())


def _from_cache(
    load: Callable[[Item], Result | None],
    make: Callable[[Item], None],
    tasks: Sequence[Item],
    store: Cache,
    num_workers: int,
    doing: str,
) -> list[Result]:
    """Return an entry of the cache for each task, having made what is missing or damaged."""
    found = _opened(load, tasks, num_workers)
    missing = [index for index, entry in enumerate(found) if entry is None]
    if missing:
        logger.info("%s %d of %d cases into %s", doing, len(missing), len(tasks), store.folder)
        lacking = [tasks[index] for index in missing]
        with counting(doing, len(lacking)) as watch:
            map_items(make, lacking, num_workers, watch)
        for index, entry in zip(missing, _opened(load, lacking, num_workers), strict=True):
            found[index] = entry
    entries = [entry for entry in found if entry is not None]
    if len(entries) < len(tasks):
        raise CacheError(
            f"{store.folder} lost what was written to it; leave the folder of data.cache alone "
            "during a run"
        )
    return entries


def _opened(
    load: Callable[[Item], Result], tasks: Sequence[Item], num_workers: int
) -> list[Result]:
    """Open entries in threads, because checksums are computed without Python's lock."""
    with ThreadPoolExecutor(max(1, num_workers)) as pool:
        return list(pool.map(load, tasks))
