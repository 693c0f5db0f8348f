"""Reads OME-Zarr 0.4 and 0.5 and plain zarr arrays; writes label maps as OME-Zarr 0.5.

A store is a folder of files with chunks of voxels, or a zip file of such a folder. Level 0, the
finest, is read; any other level is opened by its path, such as ``scan.ome.zarr/2``, and a label map
in a store as ``scan.ome.zarr/labels/NAME``.
"""

import logging
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, Field

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.chunked import ChunkedVoxels
from unet3d.images.files import ZARR_METADATA, is_store, times
from unet3d.images.geometry import Geometry
from unet3d.images.label_names import HUES
from unet3d.images.microscopy import NAMES, length_mm, package, placed
from unet3d.images.source import AS_STATED, Reading, Source, unreadable, whole_axes
from unet3d.images.units import Units, unit_mm
from unet3d.inputs.plain_data import printable, shown, validated
from unet3d.inputs.reading import MAX_JSON_BYTES, plain_json, read_json

logger = logging.getLogger(__name__)

CHUNK = 128
"""Voxels of a written chunk along each axis; a file, called a shard, has up to 4^3 chunks."""

COARSEST = 256
"""Most voxels along an axis of the coarsest level of a pyramid."""

Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Length = Annotated[float, Field(gt=0, le=1e12)]


class _Axis(BaseModel):
    name: str
    unit: str | None = None


class _Transform(BaseModel):
    type: str
    scale: list[Length] | None = None
    translation: list[Number] | None = None


def _inside(path: str) -> str:
    if ".." in Path(path).parts or Path(path).is_absolute():
        raise ValueError(f"{shown(path)} leads out of the store")
    return path


class _Level(BaseModel):
    path: Annotated[str, AfterValidator(_inside)]
    coordinateTransformations: list[_Transform] = []


class _Multiscale(BaseModel):
    axes: Annotated[list[_Axis], Field(min_length=2, max_length=5)]
    datasets: Annotated[list[_Level], Field(min_length=1, max_length=64)]
    coordinateTransformations: list[_Transform] = []

    def placed(self, level: _Level) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the scale and translation along each axis, in the units of the axes."""
        num_axes = len(self.axes)
        scale, translation = np.ones(num_axes), np.zeros(num_axes)
        for one in (*level.coordinateTransformations, *self.coordinateTransformations):
            values = {"scale": one.scale, "translation": one.translation, "identity": []}
            found = values.get(one.type)
            if found is None or len(found) not in (num_axes, 0):
                raise ValueError(
                    f"a transformation of type {shown(one.type)} has no {num_axes} numbers"
                )
            if one.type == "scale":
                scale, translation = scale * found, translation * found
            elif one.type == "translation":
                translation = translation + found
        return scale, translation


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A group or an array of a store, as its metadata describe it."""

    path: Path
    """The folder of the node, or the zip file."""
    packed: zipfile.ZipFile | None
    """The opened zip file; None for a folder."""
    inside: str
    """The path of the node in the zip file, with / at its end; empty in a folder."""
    zarr_format: int
    attributes: Mapping[str, Any]
    array: Mapping[str, Any] | None
    """The description of an array; None for a group."""

    @classmethod
    def of(
        cls, path: Path, packed: zipfile.ZipFile | None = None, inside: str = ""
    ) -> "_Node | None":
        """Read the metadata of a node; None if there is none."""

        def content(name: str) -> Any:
            return _json(path / name) if packed is None else _packed_json(packed, inside + name)

        described = content("zarr.json")
        if described is not None:
            attributes = described.get("attributes", {})
            array = described if described.get("node_type") == "array" else None
        else:
            array = content(".zarray")
            if array is None and content(".zgroup") is None:
                return None
            attributes = content(".zattrs") or {}
        if not isinstance(attributes, dict):
            raise ValueError(f"attributes are {shown(attributes)}")
        return cls(
            path=path,
            packed=packed,
            inside=inside,
            zarr_format=2 if described is None else 3,
            attributes=attributes,
            array=array,
        )

    def child(self, name: str) -> "_Node | None":
        """Return a node in this group; None if there is none."""
        if self.packed is None:
            return _Node.of(self.path / name)
        return _Node.of(self.path, self.packed, f"{self.inside}{name}/")

    @property
    def ome(self) -> Mapping[str, Any]:
        """The metadata of OME-Zarr 0.5, or of 0.4, which are not in a group of their own."""
        ome = self.attributes.get("ome", self.attributes)
        return ome if isinstance(ome, dict) else {}

    @property
    def multiscale(self) -> _Multiscale | None:
        """The first pyramid of a group; None if it has none."""
        listed = self.ome.get("multiscales")
        if listed is None:
            return None
        first = listed[0] if isinstance(listed, list) and listed else listed
        axes = first.get("axes") if isinstance(first, dict) else None
        if not isinstance(axes, list) or not all(isinstance(one, dict) for one in axes):
            raise ValueError("axes have no names and units, which they have since version 0.4")
        return validated(_Multiscale, first)


def members(path: Path) -> tuple[Path, ...]:
    """Return the files of metadata and of the finest level; a zip file is one file."""
    if not os.path.isdir(path):
        return (path,)
    inside = path
    with suppress(OSError, ValueError):
        node = _Node.of(path)
        if node is not None and node.multiscale is not None:
            inside = path / node.multiscale.datasets[0].path
    metadata = [path / name for name in (*ZARR_METADATA, ".zattrs")]
    files = [Path(folder, name) for folder, _, names in os.walk(inside) for name in names]
    found = [file for file in metadata if os.path.isfile(file)]
    return tuple(dict.fromkeys([*found, *sorted(files)])) if found else (path,)


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read the metadata of a store, but no voxels."""
    if not os.path.exists(path):
        raise VolumeError(f"there is no file or folder {path}; name a volume")
    try:
        with _root(path) as node:
            return _open(path, node, reading)
    except VolumeError:
        raise
    except ValueError as error:
        raise VolumeError(
            f"{path} has metadata that cannot be used: {error}; save it as OME-Zarr 0.4 or 0.5"
        ) from error
    except Exception as error:  # zarr raises errors of any type for damaged metadata
        raise unreadable(path, error) from error


def _open(path: Path, node: _Node | None, reading: Reading) -> Source:
    if node is None:
        raise VolumeError(
            f"{path} is not a zarr store: it lacks {' or '.join(ZARR_METADATA)}; it is incomplete, "
            "or of another format"
        )
    pyramid, level = node.multiscale, None
    if pyramid is not None:
        level = pyramid.datasets[0]
        array = node.child(level.path)
    elif node.array is not None:
        array = node
        above = _Node.of(path.parent) if path.is_dir() else None
        pyramid = above.multiscale if above is not None else None
        listed = [] if pyramid is None else pyramid.datasets
        level = next((one for one in listed if one.path == path.name), None)
    else:
        raise VolumeError(f"{path} is a zarr group without multiscales; {_instead(path)}")
    if array is None or array.array is None:
        raise VolumeError(f"{path} lacks the array of its finest level; copy the volume again")
    if pyramid is None or level is None:
        axes = _plain_axes(array)
        units: list[str | None] = [None] * len(axes)
        scale, translation = np.ones(len(axes)), np.zeros(len(axes))
    else:
        axes, units = [one.name for one in pyramid.axes], [one.unit for one in pyramid.axes]
        scale, translation = pyramid.placed(level)
    library, is_label = _library(f"reading {path}"), "image-label" in node.ome
    opened = library.open_array(
        path, array.path, array.packed, array.inside, array.zarr_format, is_label
    )
    source = _source(path, opened, axes, units, scale, translation, reading)
    if pyramid is not None and array is not node:
        source.levels = _levels(path, node, pyramid)
    return source


def _source(
    path: Path,
    array: Any,
    axes: Sequence[str],
    units: Sequence[str | None],
    scale: npt.NDArray[Any],
    translation: npt.NDArray[Any],
    reading: Reading,
) -> Source:
    """Return an array whose axes have names, units, a scale and a translation."""
    sizes = dict(zip(axes, array.shape, strict=False))
    if len(axes) != len(array.shape) or len(sizes) < len(axes) or not {*"xyz"} <= sizes.keys():
        raise VolumeError(
            f"{path} has {len(array.shape)} axes ({times(array.shape)}), named "
            f"{printable(','.join(axes))}; a volume needs z, y and x, each once"
        )
    long = [name for name, size in sizes.items() if name not in (*"xyzc",) and size != 1]
    if long:
        raise VolumeError(
            f"{path} has {sizes[long[0]]} positions along its axis {printable(long[0])}; save one "
            "of them as a store of its own"
        )
    places = [axes.index(name) for name in "xyz"]
    named = [units[place] or "mm" for place in places]
    unit_mms = [unit_mm(name) for name in named]
    if None in unit_mms:
        raise ValueError(f"the unit {shown(named[unit_mms.index(None)])} is not one of length")
    is_stated = any(units[place] for place in places) or (scale[places] != 1).any()
    stated_mm = [
        length_mm(scale[place], one) if is_stated else None
        for place, one in zip(places, unit_mms, strict=True)
    ]
    origin_mm = _rounded(translation[places] * np.array(unit_mms))
    voxels = ChunkedVoxels(path, array, axes, array.chunks)
    shape = whole_axes(path, voxels.shape)
    unit = NAMES.get(named[0], named[0]) if is_stated else None
    geometry = placed(path, shape, stated_mm, reading, origin_mm=origin_mm, unit=unit)
    return Source(geometry, array.dtype, lambda scratch: voxels)


def _plain_axes(node: _Node) -> list[str]:
    """Return the names of the axes of an array, by default z, y, x after the channel."""
    assert node.array is not None
    shape = node.array.get("shape")
    num_axes = len(shape) if isinstance(shape, list) else 0
    names = node.array.get("dimension_names") or node.attributes.get("_ARRAY_DIMENSIONS")
    return list(map(str, names)) if isinstance(names, list) else list("tczyx"[-num_axes:])


def _levels(path: Path, group: _Node, pyramid: _Multiscale) -> tuple[Shape, ...]:
    """Return the voxels along X, Y, Z of each level, up to one that is missing.

    Levels must cover the same volume; else one of their spacings is wrong.
    """
    places = [[axis.name for axis in pyramid.axes].index(name) for name in "xyz"]
    first, found = None, list[Shape]()
    for level in pyramid.datasets:
        node = group.child(level.path)
        shape = None if node is None or node.array is None else node.array.get("shape")
        if not isinstance(shape, list) or len(shape) != len(pyramid.axes):
            break  # only the level that is read must exist
        scale, _ = pyramid.placed(level)
        extent, spacing = (scale * shape)[places], scale[places]
        if first is None:
            first = extent
        elif (np.abs(extent - first) > 1.01 * spacing).any():
            raise VolumeError(
                f"{path} has levels that disagree: level {printable(level.path)} covers "
                f"{times(extent[::-1])}, but the finest {times(first[::-1])}; correct the scales "
                "in its metadata"
            )
        x, y, z = (int(shape[place]) for place in places)
        found.append((x, y, z))
    return tuple(found)


def _json(path: Path) -> Any:
    """Return the content of a file of metadata; None if it is missing."""
    try:
        return _object(read_json(path)) if os.path.lexists(path) else None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _packed_json(packed: zipfile.ZipFile, name: str) -> Any:
    """Return the content of a file of metadata in a zip file; None if it is missing."""
    try:
        if packed.getinfo(name).file_size > MAX_JSON_BYTES:  # no more is ever unpacked
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
        return _object(plain_json(packed.read(name)))
    except KeyError:
        return None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _object(found: Any) -> Any:
    if not isinstance(found, dict):
        raise ValueError(f"it is {shown(found)}")
    return found


@contextmanager
def _root(path: Path) -> Iterator[_Node | None]:
    """Yield the outermost node in a folder or a zip file, in which it may be in a folder."""
    if os.path.isdir(path):
        yield _Node.of(path)
        return
    with zipfile.ZipFile(path) as packed:
        names = [name for name in packed.namelist() if name.rpartition("/")[2] in ZARR_METADATA]
        first = min(names, key=lambda name: (name.count("/"), name), default="")
        yield _Node.of(path, packed, first[: first.rfind("/") + 1])


def _instead(path: Path) -> str:
    """Return what to name in place of a group."""
    if os.path.isdir(path):
        for inner in sorted(path.iterdir()):
            if any(os.path.isfile(inner / name) for name in ZARR_METADATA):
                return f"name a volume in it, such as {inner}"
    return "name a store that is one volume"


def _library(what: str) -> ModuleType:
    """Return the module that uses zarr, an optional package, for what begins an error."""
    package("zarr", what)
    return import_module("unet3d.images.zarr_store")


def label_names(path: Path) -> dict[int, str]:
    """Return the name of each label value that a store states, or an empty mapping."""
    with suppress(Exception), _root(path) as node:  # a damaged store can raise anything
        listed = [] if node is None else node.ome["image-label"]["properties"]
        named = {int(one["label-value"]): printable(one["name"]) for one in listed}
        return {value: name for value, name in named.items() if value > 0 and name}
    return {}


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) into a folder: a pyramid in which each level has every second voxel.

    The unit is that of the scan's file. An axis is not halved while its spacing is twice as coarse
    as another's.
    """
    turned = geometry.affine[:3, :3] - np.diag(geometry.affine.diagonal()[:3])
    if np.abs(turned).max() > 1e-3 * min(geometry.spacing_mm):
        logger.warning("%s is written without the rotation of its scan: OME-Zarr has none", path)
    library = _library(f"writing {path}")
    unit = geometry.unit or NAMES[Units.of(geometry.spacing_mm).length]
    is_known = geometry.has_spacing or set(geometry.spacing_mm) != {1.0}
    axis = {"type": "space"} | ({"unit": unit} if is_known else {})
    one_mm = unit_mm(unit) or 1.0
    spacing = np.array(geometry.spacing_mm)[::-1]
    labels = geometry.in_ras(stored).T  # (Z, Y, X)
    arrays: dict[str, npt.NDArray[Any]] = {}
    levels: list[dict[str, Any]] = []
    while True:
        name = str(len(levels))
        transforms = [
            {"type": "scale", "scale": _rounded(spacing / one_mm)},
            {"type": "translation", "translation": _rounded(geometry.affine[2::-1, 3] / one_mm)},
        ]
        levels.append({"path": name, "coordinateTransformations": transforms})
        arrays[name] = labels
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
        described["source"] = {"image": os.path.relpath(geometry.path, path)}
    multiscale = {
        "name": "labels",
        "axes": [{"name": name, **axis} for name in "zyx"],
        "datasets": levels,
        "type": "decimation",
    }
    ome = {"version": "0.5", "multiscales": [multiscale], "image-label": described}
    library.write(path, {"ome": ome}, arrays, CHUNK)


def _rounded(values: npt.NDArray[Any]) -> list[float]:
    """Return numbers without the rounding errors of their conversion to mm and back."""
    return [float(f"{value:.12g}") for value in values]


def _rgba(hue: str) -> list[int]:
    return [*(int(255 * float(part)) for part in hue.split()), 255]
