"""Reads OME-Zarr 0.4 and 0.5 and plain zarr arrays in folders, in zip files and at URLs.

A level other than the one that is asked for can be opened by its path, such as
``scan.ome.zarr/2``, and a label map in a store as ``scan.ome.zarr/labels/NAME``.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.chunked import ChunkedVoxels
from unet3d.images.files import ZARR_METADATA, file_of, holds_store, times, url_of
from unet3d.images.geometry import Geometry
from unet3d.images.microscopy import (
    NAMES,
    length_mm,
    named_axes,
    package,
    placed,
    point_in_time,
    rounded,
    warn_once,
)
from unet3d.images.ome_metadata import Axis, Multiscale, Node
from unet3d.images.source import AS_STATED, Reading, Source, unreadable, whole_axes
from unet3d.images.store_files import StoreFiles, joined
from unet3d.images.units import Units, unit_mm
from unet3d.inputs.plain_data import printable, shown

logger = logging.getLogger(__name__)


def members(path: Path) -> tuple[Path, ...]:
    """Return the path alone: a store counts as one file."""
    return (path,)


def files_of(folder: Path) -> list[str]:
    """Return the files of metadata in a folder, and all files of its finest level."""
    inside = folder
    with suppress(VolumeError, ValueError, OSError):  # whoever opens the store says what is wrong
        node = Node.of(StoreFiles(folder), os.path.abspath(folder))
        if node is not None and node.pyramid is not None:
            inside = folder / node.pyramid.datasets[0].path
    # Text, because the paths of 100,000 files would take seconds.
    metadata = [os.path.join(folder, name) for name in (*ZARR_METADATA, ".zattrs")]
    files = {os.path.join(above, name) for above, _, names in os.walk(inside) for name in names}
    return [*filter(os.path.isfile, metadata), *sorted(files.difference(metadata))]


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read the metadata of a store, but no voxels."""
    volume = url_of(path) or path
    if volume is path and not os.path.exists(file_of(path)):
        raise VolumeError(f"there is no file or folder {path}; name a volume")
    try:
        return _open(path, StoreFiles(path), reading)
    except VolumeError:
        raise
    except ValueError as error:
        raise VolumeError(
            f"{volume} has metadata that cannot be used: {error}; save it as OME-Zarr 0.4 or 0.5"
        ) from error
    except Exception as error:  # zarr raises errors of any type for damaged metadata
        raise unreadable(volume, error) from error


def _open(path: Path, files: StoreFiles, reading: Reading) -> Source:
    node = _root(files)
    group, pyramid, named = _pyramid_around(node)
    levels = [node] if pyramid is None else group.levels(pyramid)
    if (named or 0) >= len(levels):
        files.refuse_forbidden()
        raise VolumeError(f"{files.volume} lacks the array of level {named or 0}; copy it again")
    shape = levels[0].shape
    if pyramid is None:
        axes = [Axis(name=name) for name in _plain_axes(node, reading)]
        scales, translations = np.ones((1, len(shape))), np.zeros((1, len(shape)))
    else:
        axes = pyramid.axes
        placed_levels = map(pyramid.placed, pyramid.datasets[: len(levels)])
        scales, translations = map(np.array, zip(*placed_levels, strict=True))
    names = named_axes(files.volume, shape, [axis.name for axis in axes], reading)
    x, y, z = places = [names.index(name) for name in "xyz"]
    scales, translations = scales[:, places], translations[:, places]
    shapes = [(one.shape[x], one.shape[y], one.shape[z]) for one in levels]
    _refuse_uneven(files, shapes, scales)
    units = [axes[place].unit for place in places]
    is_known = any(units) or bool((scales[0] != 1).any())
    mm = [unit_mm(unit or "mm") for unit in units]
    if is_known and not any(units) and reading.spacing_mm is None:
        warn_once(
            files.volume,
            "%s has a scale without a unit, which is taken as mm; if it is not, use --spacing",
        )
    if reading.spacing_mm is not None:
        spacings, is_known = scales / scales[0] * reading.spacing_mm, True
    elif None in mm:
        raise ValueError(f"the unit {shown(units[mm.index(None)])} is not one of length")
    else:
        spacings = scales * mm
    if group.is_complete is False:
        raise VolumeError(
            f"{files.volume} is incomplete; run the command that writes it to its end"
        )
    if group.is_complete:
        _refuse_lost_files(levels)
    number = _chosen(files, spacings, reading, is_known) if named is None else named
    array = _library(f"reading {files.volume}", "zarr_store").open_array(
        files,
        levels[number].name,
        levels[number].zarr_format,
        is_sparse="image-label" in group.ome,
        is_whole=bool(group.is_complete),
    )
    time = point_in_time(files.volume, shape[names.index("t")] if "t" in names else 1, reading)
    voxels = ChunkedVoxels(files.volume, array, names, array.chunks, time)
    geometry = placed(
        path,
        whole_axes(path, voxels.shape),
        [length_mm(one, 1.0) if is_known else None for one in spacings[number]],
        AS_STATED,
        origin_mm=rounded(translations[number] * [one or 1.0 for one in mm]),
        unit=NAMES.get(str(units[0]), units[0]) if is_known and units[0] else None,
    )
    channels = group.channel_names if len(group.channel_names) == geometry.num_channels else ()
    return Source(
        geometry,
        array.dtype,
        lambda scratch: voxels,
        channel_names=channels,
        levels=tuple(shapes) if named is None else (),
    )


def _root(files: StoreFiles) -> Node:
    """Return the group or array that a path names; of several series, the first."""
    node = Node.of(files, files.root)
    if node is None:
        files.refuse_forbidden()
        raise VolumeError(
            f"{files.volume} is not a zarr store: it lacks {' or '.join(ZARR_METADATA)}; it is "
            "incomplete, or of another format"
        )
    if "bioformats2raw.layout" in node.ome and (series := node.child("0")) is not None:
        if node.child("1") is not None:
            logger.warning("%s holds several images; 0 is read", files.volume)
        return series
    return node


def _pyramid_around(node: Node) -> tuple[Node, Multiscale | None, int | None]:
    """Return the pyramid of a group, or that of which an array is a level, and the level's number.

    An array of its own has no pyramid, and is level 0.
    """
    if node.array is None:
        if node.pyramid is None:
            raise VolumeError(
                f"{node.files.volume} is a zarr group without multiscales; {_instead(node)}"
            )
        return node, node.pyramid, None
    folder, _, name = node.name.rpartition("/")
    group = Node.of(node.files, folder)
    pyramid = None if group is None else group.pyramid
    if group is not None and pyramid is not None:
        paths = [level.path for level in pyramid.datasets]
        if name in paths:
            return group, pyramid, paths.index(name)
    return node, None, 0


def _plain_axes(node: Node, reading: Reading) -> Sequence[str]:
    """Return the names of the axes of an array; by default the last of z, y, x."""
    assert node.array is not None
    names = node.array.get("dimension_names") or node.attributes.get("_ARRAY_DIMENSIONS")
    if isinstance(names, list) and None not in names:
        return list(map(str, names))
    if len(node.shape) > 3 and reading.axes is None:
        raise VolumeError(
            f"{node.files.volume} has {len(node.shape)} axes ({times(node.shape)}) without names; "
            "name them with --axes, such as czyx"
        )
    return "zyx"[-len(node.shape) :]


def _chosen(
    files: StoreFiles, spacings_mm: npt.NDArray[Any], reading: Reading, is_known: bool
) -> int:
    """Return the number of the level that users name, or that is nearest to a spacing."""
    if reading.level is None:
        near_mm = (is_known and reading.near_mm) or spacings_mm[0]
        return int(np.abs(np.log(spacings_mm / near_mm)).sum(axis=1).argmin())
    if not 0 <= reading.level < len(spacings_mm):
        units = Units.of(spacings_mm[0].tolist())
        known = [f"{level} ({units.spacing_text(mm)})" for level, mm in enumerate(spacings_mm)]
        raise VolumeError(f"{files.volume} has no level {reading.level}; it has {', '.join(known)}")
    return reading.level


def _refuse_uneven(files: StoreFiles, shapes: Sequence[Shape], scales: npt.NDArray[Any]) -> None:
    """Refuse levels that do not cover the same volume: one of their spacings must be wrong."""
    extents = scales * shapes
    for number, extent in enumerate(extents):
        if (np.abs(extent - extents[0]) > 1.01 * scales[number]).any():
            raise VolumeError(
                f"{files.volume} has levels that disagree: level {number} covers "
                f"{times(extent[::-1])}, but the finest {times(extents[0][::-1])}; correct the "
                "scales in its metadata"
            )


def _refuse_lost_files(levels: Sequence[Node]) -> None:
    for level in levels:
        assert level.array is not None
        sides = level.array["chunk_grid"]["configuration"]["chunk_shape"]
        numbers = [-(-size // side) for size, side in zip(level.shape, sides, strict=True)]
        for place in np.ndindex(*numbers):
            file = joined(level.name, "/".join(map(str, ("c", *place))))
            if level.files.read(file, 1, 0, 1) is None:
                raise VolumeError(f"{level.files.volume} lacks its file {file}; write it again")


def _instead(node: Node) -> str:
    """Return what to name in place of a group."""
    if os.path.isdir(node.name):
        inner = next(filter(holds_store, sorted(Path(node.name).iterdir())), None)
        if inner is not None:
            return f"name a volume in it, such as {inner}"
    return "name a store that is one volume"


def _library(what: str, module: str) -> ModuleType:
    """Return a module that uses zarr, an optional package, for what begins an error."""
    package("zarr", what)
    return import_module(f"unet3d.images.{module}")


def label_names(path: Path) -> dict[int, str]:
    """Return the name of each label value that a store states, or an empty mapping."""
    with suppress(Exception):  # a damaged store can raise anything
        listed = _root(StoreFiles(path)).ome["image-label"]["properties"]
        named = {int(one["label-value"]): printable(one["name"]) for one in listed}
        return {value: name for value, name in named.items() if value > 0 and name}
    return {}


def is_unfinished(path: Path) -> bool:
    """Return whether a path is a store of labels that processes of unet3d are filling."""
    with suppress(Exception):  # of another program, or damaged
        return _root(StoreFiles(path)).is_complete is False
    return False


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) into a folder, as a pyramid."""
    library = _library(f"writing {path}", "label_store")
    library.write_labels(path, stored, geometry, names)
