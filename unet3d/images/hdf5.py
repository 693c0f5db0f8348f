"""Reads volumes in HDF5 files; writes label maps to new ones.

A file with one volume is named by its path, ``scan.h5``; in any other file the dataset is named,
too: ``scan.h5:/raw``. Links, and datasets whose voxels are in other files, are not followed.
"""

import io
import itertools
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
from unet3d.images.chunked import ChunkedVoxels
from unet3d.images.files import file_and_dataset, times
from unet3d.images.geometry import Geometry
from unet3d.images.microscopy import (
    length_mm,
    named_axes,
    package,
    placed,
    point_in_time,
    rounded,
    states_spacing,
    warn_once,
    written_place,
)
from unet3d.images.scratch import forget_pages
from unet3d.images.source import AS_STATED, DAMAGED, Reading, Source, beginning_of, whole_axes
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
        self._path, self._name, self._begin = path, dataset.name, dataset.id.get_offset()

    def __getitem__(self, box: tuple[slice, ...]) -> npt.NDArray[Any]:
        if self._begin is not None:  # neither in chunks nor compressed
            file, _ = file_and_dataset(self._path)
            return np.array(np.memmap(file, self.dtype, "r", self._begin, self.shape)[box])
        with _opened(self._path) as opened:
            return np.asarray(opened[self._name][box])


class _Output(io.FileIO):
    """A new file that keeps the first error of writing: HDF5 can crash if it fails to close one."""

    error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write all bytes, or none after an error."""
        rest = memoryview(content).cast("B")
        num_bytes = len(rest)
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return num_bytes

    def truncate(self, size: int | None = None) -> int:
        """Change the size, unless there was an error."""
        try:
            return super().truncate(size) if self.error is None else size or 0
        except OSError as error:
            self.error = error
            return size or 0


def members(path: Path) -> tuple[Path, ...]:
    """Return the volume itself."""
    return (path,)


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
        stated = () if reading.axes else _stated_axes(path, dataset)
        axes = named_axes(path, dataset.shape, stated, reading)
        number = dict(zip(axes, dataset.shape, strict=True)).get("t", 1)
        time = point_in_time(path, number, reading)
        _refuse_unreadable(path, dataset)
        chunks = dataset.chunks or (1,) * len(axes)
        voxels = ChunkedVoxels(path, _Dataset(path, dataset), axes, chunks, time)
        stated_mm, origin_mm, unit = _place(dataset, axes)
    shape = whole_axes(path, voxels.shape)
    geometry = placed(path, shape, stated_mm, reading, origin_mm=origin_mm, unit=unit)
    return Source(geometry, voxels.dtype, lambda scratch: voxels)


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


def _stated_axes(path: Path, dataset: Any) -> Sequence[str]:
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
    if len(sizes) < 4:
        return "zyx"
    raise VolumeError(
        f"{path} has {len(sizes)} axes ({times(sizes)}) without names; name them with --axes, such "
        "as czyx"
    )


def _refuse_unreadable(path: Path, dataset: Any) -> None:
    """Refuse voxels in other files, or compressed in an unknown way; say if chunks are missing."""
    if dataset.is_virtual or dataset.external:
        raise VolumeError(
            f"{path} has its voxels in other files, as a virtual or external dataset; copy them "
            "into one file"
        )
    is_known = import_module("h5py").h5z.filter_avail
    properties = dataset.id.get_create_plist()
    for code, _, _, name in map(properties.get_filter, range(properties.get_nfilters())):
        with suppress(ImportError):
            if not is_known(code):
                import_module("hdf5plugin")  # adds most of the others
        if not is_known(code):
            called = printable(name.decode(errors="replace")) or f"filter {code}"
            raise VolumeError(f"{path} is compressed by {called}: pip install hdf5plugin")
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
    """Write labels (I, J, K) as a dataset (Z, Y, X) in compressed chunks."""
    h5py = package("h5py", f"writing {path}")
    spacing_mm, origin_mm = written_place(geometry)
    labels = stored.T
    chunks = tuple(min(CHUNK, size) for size in labels.shape)
    with _Output(path, "w+") as output, h5py.File(output, "w") as file:
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
        starts = (
            range(0, size, chunk) for size, chunk in zip(labels.shape[:2], chunks, strict=False)
        )
        for z, y in itertools.product(*starts):
            dataset[z : z + CHUNK, y : y + CHUNK] = labels[z : z + CHUNK, y : y + CHUNK]
            forget_pages(stored)
            if output.error is not None:
                break
    if output.error is not None:
        raise output.error
