"""Opens TIFF stacks, OME-TIFF, ImageJ's files and folders of slices; writes labels as TIFF."""

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError, counted, reason_of, some
from unet3d.images.files import TIFF, times, volume_stem, volume_suffix
from unet3d.images.geometry import Geometry
from unet3d.images.label_names import HUES
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.images.microscopy import length_mm, package, placed
from unet3d.images.source import AS_STATED, Reading, Source, beginning_of
from unet3d.images.tiff_stack import DAMAGED, Plane, Stack, num_pages
from unet3d.images.units import Units, unit_mm
from unet3d.inputs.plain_data import printable, shown
from unet3d.inputs.reading import read_json

logger = logging.getLogger(__name__)

# tifffile logs each oddity to stderr; what matters is checked here.
logging.getLogger("tifffile").setLevel(logging.CRITICAL)

MAX_SLICE_BYTES = 2**32
"""A larger file with one page is a stack: ImageJ describes only the first page of such a stack."""

BUFFER_BYTES = 512
"""Bytes read at once from the descriptions of pages, which may lie between voxels."""

MAX_IMAGEJ_BYTES = 2**31
"""More voxels than this, and a file may exceed the 4 GiB of ImageJ's format."""

RESOLUTION_MM = {2: 25.4, 3: 10.0}
"""TIFF's units of resolution, inch and centimetre, in mm."""

PLANE_AXES, CHANNEL_AXES = "ZIQ", "CS"
"""tifffile's letters of axes; I and Q are pages whose meaning the file does not state."""

ONE_FILE = {"_multifile": False, "is_mmstack": False, "is_ndtiff": False}
"""Keeps tifffile from opening other files that a file names: each one stands for itself."""


class _Opened(NamedTuple):
    """One file: its planes, each of one or several pages of channels."""

    file: Path
    dtype: np.dtype[Any]
    planes: list[Sequence[Plane]]
    stated_mm: Sequence[float | None]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Rows, columns, channels, and the type of a voxel."""
        rows, columns, interleaved = self.planes[0][0].shape
        return rows, columns, interleaved * len(self.planes[0]), self.dtype.name

    @property
    def text(self) -> str:
        """What is in the file, for a message."""
        *shape, dtype = self.kind
        return f"{counted(len(self.planes), 'page')} of {times(shape)} {dtype}"


def members(path: Path) -> tuple[Path, ...]:
    """Return a stack or the slices in a folder, then nnU-Net's file of the spacing beside it.

    A folder is a volume if at least two of its files, and more than half of them, are TIFFs, and
    the first one has a single page. Any other folder stands for itself.
    """
    files = _slices(path) if os.path.isdir(path) else (path,)
    sidecar = _sidecar(path) if files else None
    return (*(files or (path,)), *([sidecar] if sidecar else []))


def _sidecar(path: Path) -> Path | None:
    """Return nnU-Net's file of the spacing: ``case.json`` beside ``case_0000.tif``."""
    stem = volume_stem(path)
    names = [f"{name}.json" for name in (stem, re.sub(r"_\d{4}$", "", stem)) if name]
    beside = (path.with_name(name) for name in names)
    return next((file for file in beside if os.path.isfile(file)), None)


def _slices(folder: Path) -> tuple[Path, ...]:
    """Return the slices in a folder in natural order; none if it is not a folder of slices."""
    try:
        files = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:  # the caller opens the folder, and says why it cannot
        return ()
    tiffs = [path for path in files if volume_suffix(path) in TIFF.suffixes and path.is_file()]
    if len(tiffs) < 2 or 2 * len(tiffs) <= len(files):
        return ()
    tiffs.sort(key=lambda path: _natural(path.name))
    return tuple(tiffs) if is_page(tiffs[0]) else ()


def is_page(file: Path) -> bool:
    """Return whether a file has one page, and is not a stack with one description."""
    try:
        return num_pages(file) == 1 and file.stat().st_size < MAX_SLICE_BYTES
    except (VolumeError, OSError):  # whoever opens the file says why it cannot be read
        return False


def _natural(name: str) -> list[Any]:
    """Return the parts of a name, its numbers as integers: z2 comes before z10."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]


def _refuse_uneven(folder: Path, slices: Sequence[Path]) -> None:
    """Refuse names that do not number slices evenly: of several channels, or with a gap.

    Further numbers, such as the depth in ``slice_0767_z=8.5521um.tif``, may differ.
    """
    names = [_natural(path.name) for path in slices]
    differing = {
        place
        for one in names
        for place in range(max(len(one), len(names[0])))
        if one[place : place + 1] != names[0][place : place + 1]
    }
    place = min(differing)
    if any(number % 2 == 0 for number in differing):
        raise VolumeError(
            f"{folder} holds slices whose names differ in more than numbers, such as "
            f"{slices[0].name} and {slices[-1].name}; keep the slices of one channel in it, "
            "numbered in their order"
        )
    steps = [after[place] - name[place] for name, after in pairwise(names)]
    for step, (before, after) in zip(steps, pairwise(slices), strict=True):
        if step != min(steps) or step == 0:
            raise VolumeError(
                f"{folder} lacks a slice, or has two of one number: {after.name} comes after "
                f"{before.name}; add the slice, or keep one channel in the folder, numbered in "
                "even steps"
            )


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read the descriptions of all pages of a stack, or of a folder of slices, but no voxels."""
    slices = _slices(path) if os.path.isdir(path) else ()
    if slices:
        _refuse_uneven(path, slices)
    found = [_open(file) for file in slices or (path,)]
    first = found[0]
    for one in found:
        if one.kind != first.kind or (slices and len(one.planes) > 1):
            raise VolumeError(
                f"{one.file} has {one.text}, but {first.file.name} has {first.text}; slices in a "
                "folder have one page each, all alike"
            )
    planes = [plane for one in found for plane in one.planes]
    if len(planes) < 2:
        raise VolumeError(
            f"{path} has one page, and a volume needs at least two; name the folder of all slices, "
            "or save them as one stack"
        )
    rows, columns, num_channels, _ = first.kind
    shape = (columns, rows, len(planes), num_channels)
    chunk_bytes = math.prod(planes[0][0].chunk) * num_channels * first.dtype.itemsize
    refuse_beyond_memory(chunk_bytes, f"{path}: reading a strip", "use a machine with more")
    geometry = placed(path, shape, _spacing_mm(path, first.stated_mm), reading)
    stack = Stack(shape, first.dtype, planes)
    return Source(geometry, first.dtype, lambda scratch: stack)


@contextmanager
def _tiff(file: Path) -> Iterator[Any]:
    """Open a file with tifffile; whatever it raises becomes a VolumeError."""
    beginning_of(file)
    number = num_pages(file)
    tifffile = package("tifffile", f"reading {file}")
    try:
        with (
            open(file, "rb", BUFFER_BYTES) as opened,
            tifffile.TiffFile(opened, name=str(file), **ONE_FILE) as tiff,
        ):
            if not number or not tiff.series:
                raise VolumeError(f"{file} has no pages; {DAMAGED}")
            yield tiff
    except (VolumeError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything in tifffile
        reason = reason_of(error) if isinstance(error, OSError) else printable(str(error))
        raise VolumeError(f"cannot read {file}: {reason}; {DAMAGED}") from error


def _open(file: Path) -> _Opened:
    with _tiff(file) as tiff:
        return _described(file, tiff)


def _described(file: Path, tiff: Any) -> _Opened:
    # Copies of reduced size are levels of a pyramid, or thumbnails.
    found = [one for one in tiff.series if not one.keyframe.is_reduced] or tiff.series
    if len(found) > 1:
        shapes = some([times(one.shape) for one in found], 4)
        raise VolumeError(
            f"{file} holds {len(found)} images of different sizes or types, {shapes}; save one of "
            "them as a file of its own"
        )
    series = found[0]
    page = series.keyframe
    axes, sizes = series.get_axes(False), series.get_shape(False)
    separate, depth, rows, columns, interleaved = page.shaped
    if {1, 2}.intersection(page.extrasamples):
        raise VolumeError(f"{file} has colours with alpha (transparency); save it without alpha")
    at = axes.find("YX")
    leading = sizes[:at]
    is_known = at >= 0 and sizes[at : at + 2] == (rows, columns) and depth == 1
    if not is_known or math.prod(sizes[at + 2 :]) != interleaved:
        raise VolumeError(
            f"{file} has axes {printable(axes)} ({times(sizes)}) that do not end in Y, X and "
            "colours; save it as planes of one depth after another"
        )
    places = _plane_axes_first(file, axes[:at], leading)
    planes = _planes(file, series, math.prod(leading))
    num_planes = math.prod(leading[place] for place in places if axes[place] in PLANE_AXES)
    order = np.arange(len(planes)).reshape(leading).transpose(places).reshape(num_planes, -1)
    grouped: list[Sequence[Plane]] = [[planes[number] for number in one] for one in order]
    return _Opened(file, np.dtype(page.dtype), grouped, _stated_mm(tiff))


def _plane_axes_first(file: Path, axes: str, sizes: Sequence[int]) -> list[int]:
    """Return the order of axes before Y and X that puts planes before channels."""
    long = [axis for axis, size in zip(axes, sizes, strict=True) if size > 1]
    if "T" in long:
        raise VolumeError(
            f"{file} has {sizes[axes.index('T')]} points in time; export one of them, or if they "
            "are planes, save them as Z (in Fiji: Image > Properties)"
        )
    several = [axis for axis in long if axis in PLANE_AXES]
    unknown = set(long) - {*PLANE_AXES, *CHANNEL_AXES}
    if len(several) > 1 or unknown:
        raise VolumeError(
            f"{file} has the axes {printable(axes)}YX ({times(sizes)} pages); it needs one axis Z "
            "of planes, and at most one C of channels"
        )
    return sorted(range(len(axes)), key=lambda place: axes[place] not in PLANE_AXES)


def _planes(file: Path, series: Any, number: int) -> list[Plane]:
    """Return all planes of a file in its order; VolumeError if voxels are missing."""
    page = series.keyframe
    separate, _, rows, columns, interleaved = page.shaped
    shape, dtype = (
        (rows, columns, interleaved),
        np.dtype(page.dtype).newbyteorder(page.parent.byteorder),
    )
    if series.dataoffset is not None:  # all planes are plain, and one follows another
        num_bytes = math.prod(shape) * dtype.itemsize
        begins = series.dataoffset + num_bytes * np.arange(number)[:, None]
        size, chunk = np.array([num_bytes]), (rows, columns)
        planes = [Plane(file, None, dtype, shape, chunk, 0, begin, size) for begin in begins]
    else:
        pages = list(series)
        if len(pages) * separate != number or None in pages:
            found = sum(one is not None for one in pages)
            raise VolumeError(
                f"{file} describes {number // separate} pages, but has {found}; {DAMAGED}"
            )
        chunk = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, columns)
        chunk = (min(chunk[0], rows), chunk[1])
        count = math.ceil(rows / chunk[0]) * math.ceil(columns / chunk[1])
        layouts = {id(one.keyframe): _decoder(one.keyframe) for one in pages}
        planes = [
            Plane(
                *(file, layouts[id(one.keyframe)], dtype, shape, chunk, first),
                *(
                    np.asarray(values[first : first + count], np.int64)
                    for values in (one.dataoffsets, one.databytecounts)
                ),
            )
            for one in pages
            for first in range(0, separate * count, count)
        ]
    for place, plane in enumerate(planes):
        plane.refuse_lost(f"plane {place + 1} of {number}")
    return planes


def _decoder(page: Any) -> Any:
    """Return what decodes strips and tiles of a page when its file is closed; None if plain."""
    is_plain = page.compression == page.predictor == page.fillorder == 1 and not page.is_tiled
    is_plain = is_plain and not page.is_subsampled and page.sampleformat != 5
    if is_plain and page.bitspersample in (8, 16, 32, 64):
        return None
    page.init_decode()
    return page


def _spacing_mm(path: Path, stated_mm: Sequence[float | None]) -> Sequence[float | None]:
    """Return the spacing that nnU-Net's file states, else the file itself."""
    sidecar = _sidecar(path)
    usage = '{"spacing": [z, y, x]} in mm'
    if sidecar is not None:
        try:
            content = read_json(sidecar)
        except (OSError, ValueError) as error:
            raise VolumeError(f"cannot read {sidecar}: {error}; write {usage}") from error
        if isinstance(content, dict) and "spacing" in content:  # else of another program
            found = content["spacing"]
            lengths = [length_mm(one, 1.0) for one in found] if isinstance(found, list) else []
            if len(lengths) != 3 or None in lengths:
                raise VolumeError(f"{sidecar} has the spacing {shown(found)}; write {usage}")
            stated_mm = lengths[::-1]
    return stated_mm


def _stated_mm(tiff: Any) -> list[float | None]:
    """Return the spacing along X, Y, Z that a file states, in mm, or None."""
    if tiff.is_ome:
        elements = ElementTree.fromstring(tiff.ome_metadata).iter()
        pixels: Any = next((one for one in elements if one.tag.endswith("Pixels")), {})
        return [
            length_mm(
                pixels.get(f"PhysicalSize{axis}"),
                unit_mm(pixels.get(f"PhysicalSize{axis}Unit", "µm")),
            )
            for axis in "XYZ"
        ]
    # ImageJ's fields, which files written by tifffile may have, too.
    fields = tiff.imagej_metadata or (tiff.shaped_metadata or [{}])[0]
    page = tiff.pages[0]
    unit = unit_mm(_unescaped(fields.get("unit"))) or RESOLUTION_MM.get(page.tags.valueof(296, 1))
    if unit is None and fields.get("spacing", 1) != 1:
        unit = 1.0  # such as pixels: at least the ratio of the spacings is known
    units = (unit, *(unit_mm(_unescaped(fields.get(name))) or unit for name in ("yunit", "zunit")))
    depth = abs(fields.get("spacing", 1)) if "spacing" in fields or tiff.is_imagej else None
    lengths = (*(1 / each if each else None for each in page.get_resolution()), depth)
    return [length_mm(length, unit) for length, unit in zip(lengths, units, strict=True)]


def _unescaped(name: object) -> str:
    """Return a text of ImageJ, which writes the micro sign as a backslash and its code."""
    return re.sub(r"\\u([0-9A-Fa-f]{4})", lambda found: chr(int(found[1], 16)), str(name))


def label_names(path: Path) -> dict[int, str]:
    """Return the names of label values that :func:`write_labels` wrote, if there are any."""
    with suppress(VolumeError, ElementTree.ParseError), _tiff(path) as tiff:
        pairs = ElementTree.fromstring(tiff.ome_metadata or "<OME/>").iter()
        named = [(one.get("K", ""), one.text or "") for one in pairs if one.tag.endswith("}M")]
        note = str((tiff.imagej_metadata or {}).get("Info"))
        named += re.findall(r"^label (\d+): (.+)$", note, re.MULTILINE)
        return {
            int(value): printable(name)
            for value, name in named
            if value.isdecimal() and int(value) and name
        }
    return {}


def write_labels(
    path: Path, stored: npt.NDArray[Any], geometry: Geometry, names: Mapping[int, str]
) -> None:
    """Write labels (I, J, K) with the spacing of a scan: as OME-TIFF, or as ImageJ if it is so.

    ImageJ does not read the spacing of OME-TIFF, and shows small numbers without a palette black.
    """
    tifffile = package("tifffile", f"writing {path}")
    if stored.dtype.itemsize > 4:
        raise VolumeError(f"cannot write {path}: TIFF has no labels above {2**32 - 1}; use .nii.gz")
    spacing_mm = geometry.as_stored().spacing_mm
    unit = Units.of(spacing_mm)
    x, y, z = (float(f"{mm / unit.mm:.12g}") for mm in spacing_mm)
    is_known = geometry.has_spacing or set(spacing_mm) != {1.0}
    planes = stored.T
    metadata: dict[str, Any] = {"axes": "ZYX"}
    if planes.itemsize < 4 and planes.nbytes < MAX_IMAGEJ_BYTES and _is_of_imagej(geometry.path):
        options: dict[str, Any] = {"imagej": True}
        metadata["Info"] = "".join(f"label {value}: {name}\n" for value, name in names.items())
        if is_known:
            options["resolution"] = (1 / x, 1 / y)
            metadata |= {"unit": unit.length.replace("µ", "u"), "spacing": z}
        if planes.itemsize == 1:
            colours = np.array([hue.split() for hue in HUES], float) * (2**16 - 1)
            palette = np.vstack([np.zeros((1, 3)), np.resize(colours, (255, 3))]).T
            options |= {"photometric": "palette", "colormap": palette.astype(np.uint16)}
    else:
        options = {"ome": True, "photometric": "minisblack"}
        if names:
            metadata["MapAnnotation"] = {str(value): name for value, name in names.items()}
        if is_known:
            metadata |= {"PhysicalSizeX": x, "PhysicalSizeY": y, "PhysicalSizeZ": z}
            metadata |= {f"PhysicalSize{axis}Unit": unit.length for axis in "XYZ"}
    tifffile.imwrite(
        path,
        (np.ascontiguousarray(plane) for plane in planes),
        shape=planes.shape,
        dtype=planes.dtype,
        compression="zlib",
        metadata=metadata,
        **options,
    )


def _is_of_imagej(path: Path) -> bool:
    """Return whether a file is a stack that ImageJ saved, or describes as ImageJ does."""
    if volume_suffix(path) in TIFF.suffixes and os.path.isfile(path):
        with suppress(VolumeError), _tiff(path) as tiff:
            return bool(tiff.is_imagej)
    return False
