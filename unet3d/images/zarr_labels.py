"""Writes label maps as OME-Zarr 0.5: a pyramid in which each level has every second voxel.

The unit is that of the scan's file. An axis is not halved while its spacing is twice as coarse as
another's.
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
from zarr.storage import LocalStore

from unet3d.images.files import is_store, url_of
from unet3d.images.geometry import Geometry
from unet3d.images.label_names import HUES
from unet3d.images.microscopy import NAMES, rounded
from unet3d.images.ome_zarr import WHOLE
from unet3d.images.scratch import parts
from unet3d.images.units import Units, unit_mm

logger = logging.getLogger(__name__)

CHUNK = 128
"""Voxels of a chunk along each axis; a file, called a shard, has up to 4^3 chunks."""

COARSEST = 256
"""Most voxels along an axis of the coarsest level of a pyramid."""

PART_BYTES = 2**18
"""Most bytes to copy before pages of mapped labels are released; a coarse level reads many more."""


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K), which may be mapped, into a folder, one shard at a time."""
    turned = geometry.affine[:3, :3] - np.diag(geometry.affine.diagonal()[:3])
    if np.abs(turned).max() > 1e-3 * min(geometry.spacing_mm):
        logger.warning("%s is written without the rotation of its scan: OME-Zarr has none", path)
    unit = geometry.unit or NAMES[Units.of(geometry.spacing_mm).length]
    is_known = geometry.has_spacing or set(geometry.spacing_mm) != {1.0}
    axis = {"type": "space"} | ({"unit": unit} if is_known else {})
    one_mm = unit_mm(unit) or 1.0
    spacing = np.array(geometry.spacing_mm)[::-1]
    labels = geometry.in_ras(stored).T  # (Z, Y, X)
    levels: list[dict[str, Any]] = []
    voxels: list[npt.NDArray[Any]] = []
    while True:
        transforms = [
            {"type": "scale", "scale": rounded(spacing / one_mm)},
            {"type": "translation", "translation": rounded(geometry.affine[2::-1, 3] / one_mm)},
        ]
        levels.append({"path": str(len(levels)), "coordinateTransformations": transforms})
        voxels.append(labels)
        if max(labels.shape) <= COARSEST:
            break
        is_long = np.array(labels.shape) > 1
        halved = is_long & (spacing < 2 * spacing[is_long].min())
        labels = labels[tuple(slice(None, None, 2 if half else 1) for half in halved)]
        spacing = np.where(halved, 2 * spacing, spacing)
    described: dict[str, Any] = {
        "colors": [
            {"label-value": value, "rgba": _rgba(HUES[number % len(HUES)])}
            for number, value in enumerate(names)
        ],
        "properties": [{"label-value": value, "name": name} for value, name in names.items()],
    }
    if is_store(geometry.path):
        source = url_of(geometry.path) or os.path.relpath(geometry.path, path)
        described["source"] = {"image": source}
    multiscale = {
        "name": "labels",
        "axes": [{"name": name, **axis} for name in "zyx"],
        "datasets": levels,
        "type": "decimation",
    }
    ome = {"version": "0.5", "multiscales": [multiscale], "image-label": described}
    store = LocalStore(path)
    zarr.create_group(store, attributes={"ome": ome, **WHOLE})
    for number, level in enumerate(voxels):
        _write_level(store, str(number), level)


def _write_level(store: LocalStore, name: str, voxels: npt.NDArray[Any]) -> None:
    """Write an array (Z, Y, X) with all of its chunks, even if they are zero."""
    chunks = [min(CHUNK, size) for size in voxels.shape]
    sizes = list(zip(chunks, voxels.shape, strict=True))
    shards = [chunk * min(4, -(-size // chunk)) for chunk, size in sizes]
    array = zarr.create_array(
        store,
        name=name,
        shape=voxels.shape,
        chunks=chunks,
        shards=shards,
        dtype=voxels.dtype,
        dimension_names=("z", "y", "x"),
        config={"write_empty_chunks": True},
    )
    starts = (range(0, size, step) for size, step in zip(voxels.shape, shards, strict=True))
    for start in itertools.product(*starts):
        box = tuple(slice(one, one + step) for one, step in zip(start, shards, strict=True))
        shard = np.empty_like(voxels[box])  # in the same memory order, in which copying is fast
        for part in parts(voxels[box], PART_BYTES):
            shard[part] = voxels[box][part]
        array[box] = shard


def _rgba(hue: str) -> list[int]:
    return [*(int(255 * float(part)) for part in hue.split()), 255]
