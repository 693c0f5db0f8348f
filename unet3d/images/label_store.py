"""Label maps as OME-Zarr 0.5, written in blocks, by one process or by several; needs zarr.

A store is a pyramid in which each level has every second voxel. A block is a file of the store,
called a shard, which has several chunks. Boxes are along X, Y, Z, arrays of the store (Z, Y, X).
"""

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from unet3d.atomic import flush
from unet3d.errors import ConfigError
from unet3d.images.files import is_store, place_of, url_of
from unet3d.images.geometry import Geometry
from unet3d.images.image import Box
from unet3d.images.label_names import HUES
from unet3d.images.microscopy import NAMES, is_turned, rounded, states_spacing
from unet3d.images.objects import UNCACHED, WORK, Objects, naming_place
from unet3d.images.ome_zarr import COMPLETE
from unet3d.images.scratch import parts
from unet3d.images.units import Units, unit_mm

logger = logging.getLogger(__name__)

CHUNK = 128
"""Voxels of a chunk along each axis, as far as the volume has them."""

BLOCK = 512
"""Voxels of a block along each axis, as far as the volume has them."""

COARSEST = 256
"""Most voxels along an axis of the coarsest level of a pyramid."""

PART_BYTES = 2**18
"""Most bytes of mapped labels to copy before their pages are released."""


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K), which may be mapped, into an empty folder, block by block."""
    if is_turned(geometry):
        logger.warning("%s is written without the rotation of its scan: OME-Zarr has none", path)
    labels = geometry.in_ras(stored)
    LabelStore.create(path, geometry, labels.dtype, names)
    store = LabelStore(path)
    for box in store.blocks(0):
        block = np.empty_like(labels[box])  # in the same memory order, in which copying is fast
        for part in parts(labels[box], PART_BYTES):
            block[part] = labels[box][part]
        store.write(0, box, block)
    for level in range(1, store.num_levels):
        for box in store.blocks(level):
            store.write(level, box, store.halved(level, box))
    store.complete()


class LabelStore:
    """A store of labels that exists, in a folder or at a URL, opened for writing its blocks."""

    def __init__(self, path: Path) -> None:
        """Read the metadata."""
        url = url_of(path)
        with naming_place(path):
            store = FsspecStore.from_url(url, UNCACHED) if url else LocalStore(path)
            self._group = zarr.open_group(store, mode="r+", zarr_format=3)
            listed: Any = self._group.attrs["ome"]
            levels = listed["multiscales"][0]["datasets"]
            opened: list[Any] = [self._group[level["path"]] for level in levels]
        # All chunks are written, so that a missing file of a complete store is an error.
        self._arrays = [array.with_config({"write_empty_chunks": True}) for array in opened]
        self._path = path

    @classmethod
    def create(
        cls,
        path: Path,
        geometry: Geometry,
        dtype: npt.DTypeLike,
        names: Mapping[int, str],
        block: int = BLOCK,
        job: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a store of background in an empty folder or at a URL, on the grid of a scan.

        ``job`` describes the computation, for processes that want to take part in it. Raises
        FileExistsError if there is a store at the URL, if need be one of another process.
        """
        ome, shapes = _described(path, geometry, names)
        ours = {COMPLETE: False, "job": dict(job or {})}
        files: dict[str, Any] = {}
        store = MemoryStore(files) if url_of(path) else LocalStore(path)
        group = zarr.create_group(store, attributes={"ome": ome, "unet3d": ours})
        for level, shape in enumerate(shapes):
            chunks = [min(CHUNK, size) for size in shape]
            group.create_array(
                str(level),
                shape=shape,
                chunks=chunks,
                shards=[
                    chunk * min(block // CHUNK, -(-size // chunk))
                    for chunk, size in zip(chunks, shape, strict=True)
                ],
                dtype=np.dtype(dtype),
                compressors=ZstdCodec(checksum=True),
                dimension_names=("z", "y", "x"),
            )
        _upload(path, {name: file.to_bytes() for name, file in files.items()})

    @property
    def job(self) -> dict[str, Any]:
        """The computation whose result the store is."""
        return dict(self._ours["job"])

    @property
    def is_complete(self) -> bool:
        """Whether all blocks of all levels were written."""
        return bool(self._ours[COMPLETE])

    @property
    def _ours(self) -> Any:
        return self._group.attrs["unet3d"]

    @property
    def num_levels(self) -> int:
        """Number of levels of the pyramid."""
        return len(self._arrays)

    def blocks(self, level: int) -> list[Box]:
        """Return the boxes of all blocks of a level, neighbours along X one after another."""
        array = self._arrays[level]
        lines = [
            [slice(start, min(start + step, size)) for start in range(0, size, step)]
            for size, step in zip(array.shape, array.shards, strict=True)
        ]
        return [(x, y, z) for z, y, x in itertools.product(*lines)]

    def write(self, level: int, box: Box, labels: npt.NDArray[Any] | None) -> None:
        """Write the labels (X, Y, Z) of a block, and flush its file to the disk.

        Of a block of background, which may be given as None, one chunk is written: missing chunks
        of a file are background, and compressing all would take a hundred times as long.
        """
        array, place = self._arrays[level], box[::-1]
        with naming_place(self._path):
            if labels is None or not labels.any():
                array[tuple(part.start for part in place)] = 0
            else:
                array[place] = labels.T
        if url_of(self._path):
            return
        number = tuple(part.start // step for part, step in zip(place, array.shards, strict=True))
        file = self._path / array.path / array.metadata.encode_chunk_key(number)
        flush(file)
        flush(file.parent)

    def halved(self, level: int, box: Box) -> npt.NDArray[Any]:
        """Return the labels (X, Y, Z) of a box of a level, read from the next finer level."""
        finer, coarser = self._arrays[level - 1], self._arrays[level]
        place = []
        for part, size, half in zip(box[::-1], finer.shape, coarser.shape, strict=True):
            step = 1 if size == half else 2
            place.append(slice(part.start * step, part.stop * step, step))
        with naming_place(self._path):
            return np.asarray(finer[tuple(place)]).T

    def complete(self) -> None:
        """Note that all blocks are written, and delete what killed processes have left."""
        for array in self._arrays:  # at a URL, there are no such files
            for unfinished in (self._path / array.path).rglob("*.partial"):
                unfinished.unlink(missing_ok=True)
        with naming_place(self._path):
            self._group.update_attributes({"unet3d": {**self._ours, COMPLETE: True}})
        # Only now, because another process may just write the same note.
        for unfinished in self._path.glob("*.partial"):
            unfinished.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete a store at a URL, such that what is left of it can be deleted again."""
        # First what says that blocks are done, last what says that it is a store.
        for folder in (WORK, *(array.path for array in self._arrays)):
            Objects(self._path).clear(folder)
        Objects(self._path).delete("zarr.json")


def _upload(path: Path, files: Mapping[str, bytes]) -> None:
    """Write the metadata of a store to a URL, the group last, which makes it a store."""
    for name in sorted(files):
        objects = Objects(path)  # fsspec keeps the connection
        try:
            objects.create(name, files[name])
        except FileExistsError:
            # Equal metadata are of a process that makes the same store, or was killed.
            if name == "zarr.json":
                raise
            if objects.read(name) != files[name]:
                raise ConfigError(
                    f"{place_of(path)} holds {name} of another store; choose another --output"
                ) from None


def _described(
    path: Path, geometry: Geometry, names: Mapping[int, str]
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Return the metadata of a pyramid, and the shape (Z, Y, X) of each level.

    The unit is that of the scan's file. An axis is not halved while its spacing is twice as coarse
    as another's.
    """
    unit = geometry.unit or NAMES[Units.of(geometry.spacing_mm).length]
    axis = {"type": "space"} | ({"unit": unit} if states_spacing(geometry) else {})
    one_mm = unit_mm(unit) or 1.0
    spacing, shape = np.array(geometry.spacing_mm)[::-1], np.array(geometry.shape)[::-1]
    levels: list[dict[str, Any]] = []
    shapes: list[tuple[int, ...]] = []
    while True:
        transforms = [
            {"type": "scale", "scale": rounded(spacing / one_mm)},
            {"type": "translation", "translation": rounded(geometry.affine[2::-1, 3] / one_mm)},
        ]
        levels.append({"path": str(len(levels)), "coordinateTransformations": transforms})
        shapes.append(tuple(shape.tolist()))
        if shape.max() <= COARSEST:
            break
        halved = (shape > 1) & (spacing < 2 * spacing[shape > 1].min())
        shape = np.where(halved, -(-shape // 2), shape)
        spacing = np.where(halved, 2 * spacing, spacing)
    described: dict[str, Any] = {
        "colors": [
            {"label-value": value, "rgba": _rgba(HUES[number % len(HUES)])}
            for number, value in enumerate(names)
        ],
        "properties": [{"label-value": value, "name": name} for value, name in names.items()],
    }
    source = url_of(geometry.path)
    if is_store(geometry.path) and (source or not url_of(path)):
        described["source"] = {"image": source or os.path.relpath(geometry.path, path)}
    multiscale = {
        "name": "labels",
        "axes": [{"name": name, **axis} for name in "zyx"],
        "datasets": levels,
        "type": "decimation",
    }
    return {"version": "0.5", "multiscales": [multiscale], "image-label": described}, shapes


def _rgba(hue: str) -> list[int]:
    return [*(int(255 * float(part)) for part in hue.split()), 255]
