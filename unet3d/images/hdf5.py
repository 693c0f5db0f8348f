"""Reads volumes in HDF5 files; writes label maps to new ones.

A file with one volume is named by its path, ``scan.h5``; in any other file the dataset is named,
too: ``scan.h5:/raw``. Links, and datasets whose voxels are in other files, are not followed.
"""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, some
from unet3d.images.files import file_and_dataset, times
from unet3d.images.geometry import Geometry
from unet3d.images.microscopy import (
    length_mm,
    named_axes,
    package,
    rounded,
    source_of_array,
    states_spacing,
    warn_once,
    written_place,
)
from unet3d.images.scratch import forget_pages
from unet3d.images.source import AS_STATED, DAMAGED, Reading, Source, beginning_of
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import plain_json

UNITS = {"resolution": ("nanometer", 1e-6), "element_size_um": ("micrometer", 1e-3)}
"""Attributes of a spacing along z, y, x: the unit, and its length in mm. An ``offset`` is in nm."""

SEGMENTATION, NAMES = "segmentation", "label_names"
"""Dataset of a written label map, and its attribute with the names of label values, as JSON."""

CHUNK = 64
"""Voxels of a written chunk along each axis."""


class _Dataset:
    """An array that opens its file to read a box, because opened files do not survive a fork."""

    def __init__(self, path: Path, dataset: Any) -> None:
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self.chunks = dataset.chunks or (1,) * dataset.ndim
        self._path, self._name, self._begin = path, dataset.name, dataset.id.get_offset()

    def __getitem__(self, box: tuple[slice, ...]) -> npt.NDArray[Any]:
        if self._begin is not None:  # neither in chunks nor compressed
            file, _ = file_and_dataset(self._path)
            return np.array(np.memmap(file, self.dtype, "r", self._begin, self.shape)[box])
        with _opened(self._path) as opened:
            return np.asarray(opened[self._name][box])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file of a volume; whatever h5py raises becomes a VolumeError."""
    file, _ = file_and_dataset(path)
    beginning_of(file)
    h5py = package("h5py", f"reading {path}")
    try:
        with h5py.File(file, "r") as opened:
            yield opened
    except (VolumeError, MemoryError):
        raise
    except Exception as error:  # h5py raises errors of any type for damaged files
        raise VolumeError(f"cannot read {path}: {printable(str(error), 200)}; {DAMAGED}") from error


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read the description of a dataset, but no voxels."""
    with _opened(path) as file:
        dataset = _dataset(path, file)
        axes = named_axes(path, dataset.shape, _stated_axes(dataset), reading)
        _refuse_unreadable(path, dataset)
        stated_mm, origin_mm, unit = _place(dataset, axes)
        return source_of_array(
            path,
            _Dataset(path, dataset),
            axes,
            reading,
            spacing_mm=reading.spacing_mm or stated_mm,
            origin_mm=origin_mm,
            unit=unit,
        )


def _dataset(path: Path, file: Any) -> Any:
    """Return the dataset that a path names, or else the only volume of the file."""
    h5py = import_module("h5py")
    known: dict[str, Any] = {}

    def add(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.ndim > 2:
            known[name] = node

    file.visititems(add)  # follows no links, which could lead to other files
    file_path, name = file_and_dataset(path)
    found = [known[one] for one in known if one == name.strip("/") or not name]
    if len(found) == 1:
        return found[0]
    if not known:
        raise VolumeError(f"{path} holds no dataset with three axes; name a volume")
    listed = [f"{printable(name)} ({times(one.shape)} {one.dtype})" for name, one in known.items()]
    problem = "names no volume of its file" if name else "holds several volumes"
    raise VolumeError(
        f"{path} {problem}; name one of {some(listed)}, such as "
        f"{file_path}:/{printable([*known][-1])}"
    )


def _stated_axes(dataset: Any) -> Sequence[str]:
    """Return the names of axes: as the dataset states them, else z, y, x and perhaps channels."""
    tags = dataset.attrs.get("axistags")  # of vigra and ilastik
    if isinstance(tags, str):
        with suppress(ValueError, TypeError, KeyError):
            return [str(one["key"]) for one in plain_json(tags.encode())["axes"]]
    labels = [dimension.label for dimension in dataset.dims]
    if all(labels):
        return labels
    sizes = dataset.shape
    if len(sizes) == 4 and min(sizes) in (sizes[0], sizes[3]):
        return "czyx" if min(sizes) == sizes[0] else "zyxc"
    return "zyx" if len(sizes) < 4 else ""


def _refuse_unreadable(path: Path, dataset: Any) -> None:
    """Refuse voxels in other files, or compressed in an unknown way; say if chunks are missing."""
    if dataset.is_virtual or dataset.external:
        raise VolumeError(
            f"{path} has its voxels in other files, as a virtual or external dataset; copy them "
            "into one file"
        )
    with suppress(ImportError):
        import_module("hdf5plugin")  # adds most of the filters that h5py lacks
    properties = dataset.id.get_create_plist()
    filters = map(properties.get_filter, range(properties.get_nfilters()))
    if not all(import_module("h5py").h5z.filter_avail(code) for code, *_ in filters):
        raise VolumeError(f"{path} is compressed in a way that h5py lacks: pip install hdf5plugin")
    if dataset.chunks:
        pairs = zip(dataset.shape, dataset.chunks, strict=True)
        number = math.prod(math.ceil(size / chunk) for size, chunk in pairs)
        lacking = number - dataset.id.get_num_chunks()
        if lacking:
            message = "%s lacks %d of %d chunks; their voxels are %s, as HDF5 defines"
            warn_once(path, message, lacking, number, dataset.fillvalue)


def _place(dataset: Any, axes: Sequence[str]) -> tuple[list[float | None], list[float], str | None]:
    """Return the stated spacing and origin along X, Y, Z in mm, and the unit."""

    def along(name: str) -> list[Any]:
        values = np.ravel(dataset.attrs.get(name, ())).tolist()
        stated = dict(zip(axes if len(values) == len(axes) else "zyx", values, strict=False))
        return [stated.get(axis) for axis in "xyz"]

    name = next((name for name in UNITS if name in dataset.attrs), "element_size_um")
    unit, mm = UNITS[name]
    origin_mm = [1e-6 * float(one or 0) for one in along("offset")]
    return [length_mm(one, mm) for one in along(name)], origin_mm, unit


def label_names(path: Path) -> dict[int, str]:
    """Return the names of label values that :func:`write_labels` wrote, if there are any."""
    with suppress(VolumeError, ValueError, AttributeError), _opened(path) as file:
        named = plain_json(_dataset(path, file).attrs.get(NAMES, "{}").encode())
        return {int(value): printable(name) for value, name in named.items() if int(value) > 0}
    return {}


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) as a dataset (Z, Y, X) in compressed chunks.

    The file is made in memory, because HDF5 can crash if a disk is full; labels pack well.
    """
    h5py = package("h5py", f"writing {path}")
    spacing_mm, origin_mm = written_place(geometry)
    labels = stored.T
    chunks = tuple(min(CHUNK, size) for size in labels.shape)
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        options = {"chunks": chunks, "compression": "gzip", "dtype": labels.dtype}
        dataset = file.create_dataset(SEGMENTATION, labels.shape, **options)
        if states_spacing(geometry):
            is_nm = geometry.unit == "nanometer" or any(origin_mm)
            for name in UNITS if is_nm else ("element_size_um",):
                dataset.attrs[name] = rounded(np.array(spacing_mm[::-1]) / UNITS[name][1])
        if any(origin_mm):
            dataset.attrs["offset"] = rounded(np.array(origin_mm[::-1]) / UNITS["resolution"][1])
        if names:
            dataset.attrs[NAMES] = json.dumps({str(value): name for value, name in names.items()})
        for box in dataset.iter_chunks():
            dataset[box] = labels[box]
            forget_pages(stored)
    path.write_bytes(content.getbuffer())
