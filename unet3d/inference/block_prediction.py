"""Large images, segmented block by block by any number of processes that write to one store.

The labels of a block do not depend on who computes it, or on the other blocks.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unet3d import __version__
from unet3d.atomic import new_folder
from unet3d.errors import ConfigError, ResultExistsError
from unet3d.images.files import place_of, url_of
from unet3d.images.geometry import Geometry
from unet3d.images.image import Box, Image
from unet3d.images.label_store import BLOCK, LabelStore
from unet3d.images.objects import Objects, store_exists
from unet3d.images.ome_zarr import is_unfinished
from unet3d.inference.block_filling import LabelsOf, Part, fill, work_folder
from unet3d.inference.predictor import Predictor
from unet3d.inference.region import Region
from unet3d.inference.request import PredictionRequest
from unet3d.inference.sliding_window import WindowsDone
from unet3d.inference.tasks import Tasks

READ_AHEAD_FROM = 3 / 4
"""Share of the windows of a block after which the next block is claimed and read. Much earlier, a
process would hold a block at the end for which another one has time."""


def segment_in_blocks(
    image: Image,
    region: Region,
    output: Path,
    predictor: Predictor,
    request: PredictionRequest,
    blocks_done: WindowsDone,
) -> bool:
    """Take part in the segmentation of a region of an image; return whether the store is complete.

    The first process makes the store. Raises ConfigError if the store was begun with other
    networks, settings or another image.
    """
    found = predictor.prepared(image)
    geometry = image.geometry
    job = {
        "version": __version__,
        **predictor.identity(),
        "image": _described(geometry),
        "crop": [(part.start, part.stop) for part in region.box],
        "mask": region.mask and _described(region.mask),
        "reading": request.reading().model_dump(mode="json"),
        "skip_background": request.skip_background,
    }
    job = json.loads(json.dumps(job))
    dtype = np.min_scalar_type(max(predictor.preprocessing.label_values))
    block, written = request.block or BLOCK, image.cut(region.box).geometry
    described = (written, dtype, predictor.label_names, block, job)
    if url_of(output) and request.part is None:
        Objects(output).refuse_without_claims()
    while not _takes_part(output, job, request.overwrite):
        with suppress(FileExistsError):  # another process was faster
            if url_of(output):
                if store_exists(output):
                    _opened(output).delete()
                LabelStore.create(output, *described)
                continue
            with new_folder(output, replace=request.overwrite) as unfinished:
                LabelStore.create(unfinished, *described)
                if _takes_part(output, job, request.overwrite):
                    raise FileExistsError(output)

    def begin(box: Box, soon: Callable[[], object]) -> LabelsOf:
        return region.begin(box, partial(begin_part, soon))

    def begin_part(soon: Callable[[], object], box: Box) -> Callable[[], npt.NDArray[Any]]:
        waiting = [soon]

        def windows_done(done: int, total: int) -> None:
            while waiting and done >= READ_AHEAD_FROM * total:
                waiting.pop()()

        if found.image is image:
            return predictor.begin_block(found, box, windows_done)
        segment = predictor.begin_block(found, geometry.box_in_file(box), windows_done)
        return lambda: geometry.in_ras(segment())

    return fill(output, begin, Part(*request.part or ()), blocks_done)


def _described(geometry: Geometry) -> list[Any]:
    """Return what tells a volume from others."""
    place = url_of(geometry.path) or str(geometry.path.absolute())
    return [place, geometry.shape, geometry.spacing_mm]


def _takes_part(output: Path, job: dict[str, Any], overwrite: bool) -> bool:
    """Return whether a store exists that the same computation fills, or has just completed."""
    if not store_exists(output):
        return False
    if is_unfinished(output):
        found = LabelStore(output).job
        other = [key for key in job if found.get(key) != job[key]]
        if not other:
            return True
        if not overwrite:
            raise ConfigError(
                f"{place_of(output)} was begun with another "
                f"{' and '.join(other).replace('_', ' ')}; go on with the same, choose another "
                "--output, or add --overwrite to begin anew"
            )
    elif not overwrite:
        if LabelStore(output).job == job:  # others have just completed it
            return True
        raise ResultExistsError.meanwhile(output)
    return False


class Status(NamedTuple):
    """How far a store is."""

    is_complete: bool
    num_blocks: int
    done: int = 0
    at_work: int = 0
    given_up: int = 0
    """Blocks whose processes died."""
    seconds_left: float | None = None


def status(output: Path) -> Status:
    """Return how far a store is; ConfigError if it is not written in blocks."""
    store = _opened(output)
    num_blocks = len(store.blocks(0))
    if store.is_complete:
        return Status(is_complete=True, num_blocks=num_blocks, done=num_blocks)
    try:
        tasks = Tasks(work_folder(output), begins=False)
        done = {name for name in tasks.done() if name.startswith("0-")}
        works = [alive for name, alive in tasks.at_work().items() if name not in done]
        seconds = tasks.seconds_per_task(done)
    except FileNotFoundError:  # no process has begun
        return Status(is_complete=False, num_blocks=num_blocks)
    return Status(
        is_complete=False,
        num_blocks=num_blocks,
        done=len(done),
        at_work=sum(works),
        given_up=len(works) - sum(works),
        seconds_left=None if seconds is None else seconds * (num_blocks - len(done)),
    )


def _opened(output: Path) -> LabelStore:
    """Return a store that is written in blocks; ConfigError for any other, or none."""
    try:
        if not store_exists(output):  # zarr would make the folder
            raise FileNotFoundError(output)
        store = LabelStore(output)
        store.job  # noqa: B018
    except (KeyError, FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{place_of(output)} is not a store that is written in blocks") from error
    return store
