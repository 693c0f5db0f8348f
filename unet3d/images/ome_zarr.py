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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.files import ZARR_METADATA, file_of, times, url_of
from unet3d.images.geometry import Geometry
from unet3d.images.microscopy import (
    NAMES,
    length_mm,
    named_axes,
    package,
    rounded,
    source_of_array,
    warn_once,
)
from unet3d.images.source import AS_STATED, Reading, Source, unreadable
from unet3d.images.units import Units, unit_mm
from unet3d.inputs.plain_data import printable, shown

logger = logging.getLogger(__name__)

COMPLETE = "is_complete"
"""Attribute, in the group ``unet3d``, of stores that are written here: no file may be missing."""


def files_of(folder: Path) -> list[str]:
    """Return the files of metadata in a folder, and all files of its level, or of the finest."""
    inside = folder
    with suppress(Exception):  # whoever opens the store says what is wrong
        _, pyramid, named = _pyramid_around(_files(folder))
        inside = Path(os.path.abspath(folder)).parent / pyramid.arrays[named or 0].path
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
        return _open(path, _files(path), reading)
    except VolumeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise VolumeError(
            f"{volume} has metadata that cannot be used: {printable(repr(error), 200)}; save it as "
            "OME-Zarr 0.4 or 0.5"
        ) from error
    except Exception as error:  # zarr raises errors of any type for damaged metadata
        raise unreadable(volume, error) from error


def _open(path: Path, files: Any, reading: Reading) -> Source:
    group, pyramid, named = _pyramid_around(files)
    axes, arrays, scales, translations = pyramid
    shape = next(iter(arrays.values())).shape
    stated = [str(axis.get("name", "?")) for axis in axes]
    names = named_axes(files.volume, shape, stated, reading)
    x, y, z = places = [names.index(name) for name in "xyz"]
    scales, translations = scales[:, places], translations[:, places]
    shapes = {number: (one.shape[x], one.shape[y], one.shape[z]) for number, one in arrays.items()}
    _refuse_uneven(files, shapes, scales)
    units = [axes[place].get("unit") if axes else None for place in places]
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
    is_complete = _is_complete(group)
    if is_complete is False:
        raise VolumeError(
            f"{files.volume} is incomplete; run the command that writes it to its end"
        )
    number = _chosen(files, spacings, [*arrays], reading, is_known) if named is None else named
    files.is_whole, files.is_sparse = bool(is_complete), "image-label" in _ome(group)
    return source_of_array(
        path,
        files.opened(arrays[number]),
        names,
        reading,
        spacing_mm=[length_mm(one, 1.0) if is_known else None for one in spacings[number]],
        origin_mm=rounded(translations[number] * [one or 1.0 for one in mm]),
        unit=NAMES.get(str(units[0]), units[0]) if is_known and units[0] else None,
        channel_names=_channel_names(group),
        levels=tuple(shapes.values()) if named is None and len(shapes) > max(shapes) else (),
    )


def _root(files: Any) -> Any:
    """Return the group or array that a path names; of several series, the first."""
    node = files.node(files.name)
    if node is None:
        raise files.missing(
            f"is not a zarr store: it lacks {' or '.join(ZARR_METADATA)}; it is incomplete, or of "
            "another format"
        )
    series = [files.node(f"{node.path}/{n}") for n in "01" if "bioformats2raw.layout" in _ome(node)]
    if series and series[0] is not None:
        if series[1] is not None:
            logger.warning("%s holds several images; 0 is read", files.volume)
        return series[0]
    return node


def _ome(node: Any) -> Mapping[str, Any]:
    """Return the metadata of OME-Zarr 0.5, or of 0.4, which are not in a group of their own."""
    found = node.attrs.asdict()
    ome = found.get("ome", found)
    return ome if isinstance(ome, dict) else {}


def _is_complete(group: Any) -> bool | None:
    """Return whether a store that is written here has all files; None for other stores."""
    ours = group.attrs.get("unet3d")
    return ours.get(COMPLETE) if isinstance(ours, dict) else None


def _channel_names(group: Any) -> tuple[str, ...]:
    with suppress(LookupError, TypeError):
        return tuple(printable(one["label"]) for one in _ome(group)["omero"]["channels"])
    return ()


class _Pyramid(NamedTuple):
    """The levels of a volume; an array of its own is one."""

    axes: Sequence[Mapping[str, Any]]
    """Names and units; empty if they are unknown."""
    arrays: Mapping[int, Any]
    """The levels that are there, by their numbers."""
    scales: npt.NDArray[Any]
    """(levels, axes), in the units of the axes."""
    translations: npt.NDArray[Any]


def _pyramid_around(files: Any) -> tuple[Any, _Pyramid, int | None]:
    """Return a group and its pyramid; of a path that names a level, also the level's number."""
    node = _root(files)
    if not hasattr(node, "chunks"):
        if "multiscales" not in _ome(node):
            raise VolumeError(
                f"{files.volume} is a zarr group without multiscales; name a volume in it"
            )
        return node, _pyramid(files, node), None
    folder, _, name = node.path.rpartition("/")
    group = files.node(folder) if name else None
    if group is not None and "multiscales" in _ome(group):
        paths = [level["path"] for level in _ome(group)["multiscales"][0]["datasets"]]
        if name in paths:
            return group, _pyramid(files, group), paths.index(name)
    axes = [{"name": name} for name in _plain_axes(node)]
    pyramid = _Pyramid(axes, {0: node}, np.ones((1, node.ndim)), np.zeros((1, node.ndim)))
    return node, pyramid, 0


@np.errstate(all="ignore")  # of infinite scales, which are refused
def _pyramid(files: Any, group: Any) -> _Pyramid:
    described = _ome(group)["multiscales"][0]
    levels = described["datasets"]
    found = [files.node(f"{group.path}/{level['path']}") for level in levels]
    arrays = {number: one for number, one in enumerate(found) if one is not None}
    if not arrays:
        raise files.missing("lacks the array of level 0; copy it again")
    num_axes = next(iter(arrays.values())).ndim
    scales, translations = np.ones((len(levels), num_axes)), np.zeros((len(levels), num_axes))
    for level, scale, translation in zip(levels, scales, translations, strict=True):
        key = "coordinateTransformations"
        for one in (*level.get(key, ()), *described.get(key, ())):
            if one["type"] == "scale":
                scale *= one["scale"]
                translation *= one["scale"]
            elif one["type"] == "translation":
                translation += one["translation"]
            elif one["type"] != "identity":
                raise ValueError(f"a transformation is of the type {shown(one['type'])}")
    if not ((scales > 0) & (scales < np.inf)).all():
        raise ValueError("a scale is not a number greater than 0")
    # Before version 0.4, axes are names without units; before 0.3, there are none.
    axes = [{"name": axis} if isinstance(axis, str) else axis for axis in described.get("axes", ())]
    return _Pyramid(axes, arrays, scales, translations)


def _plain_axes(array: Any) -> Sequence[str]:
    """Return the names of the axes of an array; of up to three without names, the last of zyx."""
    names = getattr(array.metadata, "dimension_names", None)
    names = names or array.attrs.get("_ARRAY_DIMENSIONS")
    if isinstance(names, list | tuple) and None not in names:
        return list(map(str, names))
    return "zyx"[-array.ndim :] if array.ndim < 4 else ""


def _chosen(
    files: Any,
    spacings_mm: npt.NDArray[Any],
    present: Sequence[int],
    reading: Reading,
    is_known: bool,
) -> int:
    """Return the number of the level that users name, or that is nearest to a spacing."""
    level = reading.level
    if level is None:
        near_mm = (is_known and reading.near_mm) or spacings_mm[0]
        level = int(np.abs(np.log(spacings_mm[: max(present) + 1] / near_mm)).sum(axis=1).argmin())
    if level not in present:
        units = Units.of(spacings_mm[0].tolist())
        known = [f"{one} ({units.spacing_text(spacings_mm[one])})" for one in present]
        said = f"has no level {level}; it has {', '.join(known)}"
        is_listed = level < len(spacings_mm)
        raise files.missing(said) if is_listed else VolumeError(f"{files.volume} {said}")
    return level


def _refuse_uneven(files: Any, shapes: Mapping[int, Shape], scales: npt.NDArray[Any]) -> None:
    """Refuse levels that do not cover the same volume: one of their spacings must be wrong."""
    extents = {number: scales[number] * shape for number, shape in shapes.items()}
    first = min(extents)
    for number, extent in extents.items():
        if (np.abs(extent - extents[first]) > 1.01 * scales[number]).any():
            raise VolumeError(
                f"{files.volume} has levels that disagree: level {number} covers "
                f"{times(extent[::-1])}, but the finest {times(extents[first][::-1])}; correct the "
                "scales in its metadata"
            )


def _files(path: Path) -> Any:
    """Return the files of the store in which a volume lies."""
    package("zarr", f"reading {url_of(path) or path}")
    return import_module("unet3d.images.zarr_store").StoreFiles(path)


def label_names(path: Path) -> dict[int, str]:
    """Return the name of each label value that a store states, or an empty mapping."""
    with suppress(Exception):  # a damaged store can raise anything
        listed = _ome(_root(_files(path)))["image-label"]["properties"]
        named = {int(one["label-value"]): printable(one["name"]) for one in listed}
        return {value: name for value, name in named.items() if value > 0 and name}
    return {}


def is_unfinished(path: Path) -> bool:
    """Return whether a path is a store of labels that processes of unet3d are filling."""
    with suppress(Exception):  # of another program, or damaged
        return _is_complete(_root(_files(path))) is False
    return False


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) into a folder, as a pyramid."""
    package("zarr", f"writing {path}")
    import_module("unet3d.images.label_store").write_labels(path, stored, geometry, names)
