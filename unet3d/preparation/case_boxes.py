"""Where the images of a data set are not zero, found once and remembered in the cache.

::

    boxes/<key>.json      the box of one case, under a key of what its files contain

Patch size and network follow from the shapes that are left, so they are needed before training and
by ``unet3d plan``. A thread reads while another unpacks: starting processes would take longer than
most data sets do.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from unet3d.config import Shape
from unet3d.datasets.dataset import Case
from unet3d.distributed.ranks import num_cores
from unet3d.distributed.workers import counting
from unet3d.images.nifti import open_channels
from unet3d.inputs.ahead import each_ahead
from unet3d.inputs.plain_data import validated
from unet3d.preparation.cache import Cache
from unet3d.preparation.cropping import Box, nonzero_box
from unet3d.preparation.entries import json_checksum
from unet3d.records import key_of, recall, remember

logger = logging.getLogger(__name__)

MAX_READERS = 4
"""Cases that are read at a time; each may take gibibytes of memory."""

VERSION = 1
"""Part of every key: raise it whenever boxes come to mean something else."""

Result = TypeVar("Result")


def boxes_of(cases: Sequence[Case], shapes: Sequence[Shape], cache: Path | None) -> list[Box]:
    """Return for each case the smallest box of all voxels that are not zero in every channel.

    Args:
        cases: The cases.
        shapes: Voxels along X, Y, Z of each.
        cache: Folder in which boxes are remembered; None: the user's cache folder.

    Raises:
        VolumeError: An image cannot be read.
        CacheError: The cache cannot be written.
    """
    store = Cache(cache)

    def known(case: Case, shape: Shape) -> Box | None:
        return recall(_record(store, case), lambda tree: _sound_box(tree, shape))

    def found(case: Case, shape: Shape) -> Box:
        box = nonzero_box(open_channels(case.images).voxels)
        remember_box(store, case, box)
        return box

    with counting("hashing", len(cases)) as watch:
        boxes = _in_threads(known, list(zip(cases, shapes, strict=True)), watch)
    missing = [index for index, box in enumerate(boxes) if box is None]
    if missing:
        counts = len(missing), len(boxes)
        logger.info("reading %d of %d cases to crop them, into %s", *counts, store.folder)
    tasks = [(cases[index], shapes[index]) for index in missing]
    with counting("reading", len(missing)) as watch:
        rest = iter(_in_threads(found, tasks, watch))
    return [next(rest) if box is None else box for box in boxes]


def remember_box(store: Cache, case: Case, box: Box) -> None:
    """Write the box of a case to where :func:`boxes_of` finds it.

    Args:
        store: The cache.
        case: The case.
        box: That of its image.

    Raises:
        CacheError: The cache cannot be written.
    """
    content = {"start": list(box.start), "stop": list(box.stop)}
    remember(_record(store, case), {**content, "checksum": json_checksum(content)})


def _record(store: Cache, case: Case) -> Path:
    key = key_of([store.digest(path) for path in case.images], VERSION)
    return store.folder / "boxes" / f"{key}.json"


def _sound_box(tree: Any, shape: Shape) -> Box:
    content = {key: tree[key] for key in ("start", "stop")}
    box = validated(Box, content)
    if tree["checksum"] != json_checksum(content):
        raise ValueError("it has another checksum")
    if any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
        raise ValueError("it is larger than the image")
    return box


def _in_threads(
    work: Callable[[Case, Shape], Result],
    tasks: Sequence[tuple[Case, Shape]],
    watch: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    futures = each_ahead(lambda task: work(*task), tasks, min(MAX_READERS, num_cores()))
    done: list[Result] = []
    try:
        for future in futures:
            done.append(future.result())
            watch(len(done))
        return done
    finally:  # also where there is a fault, or somebody asked to stop
        for future in futures:
            future.cancel()
