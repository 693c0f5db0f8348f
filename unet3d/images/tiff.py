"""Opens TIFF stacks, OME-TIFF, ImageJ's files and folders of slices."""

import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from unet3d.errors import VolumeError, some
from unet3d.images.files import TIFF, times, volume_stem, volume_suffix
from unet3d.images.microscopy import (
    length_mm,
    named_axes,
    source_of_array,
    unit_name,
)
from unet3d.images.source import AS_STATED, Reading, Source
from unet3d.images.tiff_labels import label_names as label_names
from unet3d.images.tiff_labels import write_labels as write_labels
from unet3d.images.tiff_stack import Planes, Stack, opened_tiff
from unet3d.images.units import unit_mm
from unet3d.inputs.plain_data import printable, shown
from unet3d.inputs.reading import read_json

CENTIMETRE = 3
"""TIFF's unit of a resolution."""

AXES = {"I": "z", "Q": "z", "S": "c"}
"""Axes by tifffile's letters: of pages whose meaning the file does not state, and of colours."""


class _Opened(NamedTuple):
    """One file: its planes, and what it states."""

    planes: Planes
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    place: dict[str, Any]
    """Spacing, and perhaps unit and origin, as :func:`source_of_array` takes them."""
    channel_names: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What is in the file, for a message."""
        return f"{times(self.sizes)} voxels ({', '.join(self.axes)}) of {self.planes.dtype.name}"


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
    """Return whether a file has one page; ImageJ describes only the first of a large stack."""
    with suppress(VolumeError), opened_tiff(file) as tiff:  # whoever opens it says what is wrong
        return len(tiff.pages) == 1 and bool(tiff.series[0].shape == tiff.pages[0].shape)
    return False


def _natural(name: str) -> list[Any]:
    """Return the parts of a name, its numbers as integers: z2 comes before z10."""
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", name)]


def _refuse_uneven(folder: Path, slices: Sequence[Path]) -> None:
    """Refuse names that do not number slices evenly: of several channels, or with a gap.

    Further numbers, such as the depth in ``slice_0767_z=8.5521um.tif``, may differ.
    """
    names = [_natural(path.name) for path in slices]
    columns = zip(*(name[1::2] for name in names), strict=False)
    numbers = next((column for column in columns if len(set(column)) > 1), (0,) * len(names))
    steps = [after - before for before, after in pairwise(numbers)]
    usual = min((step for step in steps if step > 0), default=1)
    for number, step in enumerate(steps):
        if names[number + 1][::2] != names[0][::2] or step != usual:
            raise VolumeError(
                f"{folder} lacks a slice, or holds others: {slices[number + 1].name} comes after "
                f"{slices[number].name}; keep the slices of one channel in it, numbered in even "
                "steps"
            )


def open_file(path: Path, reading: Reading = AS_STATED) -> Source:
    """Read the descriptions of all pages of a stack, or of a folder of slices, but no voxels."""
    files = _slices(path) if os.path.isdir(path) else ()
    if files:
        _refuse_uneven(path, files)
    found = [_open(file) for file in files or (path,)]
    first = found[0]
    for file, one in zip(files, found, strict=False):
        if one.text != first.text or "z" in one.axes:
            raise VolumeError(
                f"{file} has {one.text}, but {files[0].name} has {first.text}; slices in a folder "
                "have one page each, all alike"
            )
    sizes, stated = first.sizes, first.axes
    if files or "z" not in (reading.axes or stated):
        sizes, stated = (len(found), *sizes), ("z", *stated)
    axes = named_axes(path, sizes, stated, reading)
    known = dict(zip(axes, sizes, strict=True))
    if known["z"] == known.get("t", 1) == 1:
        raise VolumeError(
            f"{path} has one page, and a volume needs at least two; name the folder of all slices, "
            "or save them as one stack"
        )
    stack = Stack([one.planes for one in found], sizes)
    stated_mm = reading.spacing_mm or _spacing_beside(path) or first.place["spacing_mm"]
    return source_of_array(
        path,
        stack,
        axes,
        reading,
        **{**first.place, "spacing_mm": stated_mm},
        channel_names=first.channel_names,
    )


def _open(file: Path) -> _Opened:
    with opened_tiff(file) as tiff:
        # Copies of reduced size are levels of a pyramid, or thumbnails.
        found = [one for one in tiff.series if not one.keyframe.is_reduced] or tiff.series
        sizes = tuple(map(int, found[0].shape))
        axes = tuple(AXES.get(letter, letter.lower()) for letter in found[0].axes)
        if (
            len({(one.shape, one.dtype) for one in found}) > 1
            or len(found) > 1
            and ("z" in axes or tiff.is_ome)
        ):
            shapes = some([times(one.shape) for one in found], 4)
            raise VolumeError(
                f"{file} holds {len(found)} images, {shapes}; save one of them as a file of its own"
            )
        if len(found) > 1:  # pages that were written one by one
            sizes, axes = (len(found), *sizes), ("z", *axes)
        if tiff.is_ome and found[0].kind != "ome" and len(tiff.pages) > 1:
            raise VolumeError(
                f"{file} is one of several files of an OME-TIFF; save the volume as one file, for "
                "example with Fiji"
            )
        if {1, 2}.intersection(found[0].keyframe.extrasamples):
            raise VolumeError(
                f"{file} has colours with alpha (transparency); save it without alpha"
            )
        planes = Planes.of(file, found, math.prod(sizes) // math.prod(found[0].keyframe.shaped[2:]))
        if not tiff.is_ome:
            return _Opened(planes, sizes, axes, _stated_by_imagej(tiff))
        stated = _stated_by_ome(ElementTree.fromstring(tiff.ome_metadata))
        return _Opened(planes, sizes, axes, *stated)


def _spacing_beside(path: Path) -> Sequence[float | None] | None:
    """Return the spacing along X, Y, Z in nnU-Net's file beside a volume; None if it has none."""
    sidecar = _sidecar(path)
    usage = '{"spacing": [z, y, x]} in mm'
    if sidecar is None:
        return None
    try:
        content = read_json(sidecar)
    except (OSError, ValueError) as error:
        raise VolumeError(f"cannot read {sidecar}: {error}; write {usage}") from error
    if not isinstance(content, dict) or "spacing" not in content:  # of another program
        return None
    found = content["spacing"]
    lengths = [length_mm(one, 1.0) for one in found] if isinstance(found, list) else []
    if len(lengths) != 3 or None in lengths:
        raise VolumeError(f"{sidecar} has the spacing {shown(found)}; write {usage}")
    return lengths[::-1]


def _stated_by_imagej(tiff: Any) -> dict[str, Any]:
    """Return the spacing and unit by ImageJ's fields, which tifffile may write, too."""
    fields = tiff.imagej_metadata or (tiff.shaped_metadata or [{}])[0]
    page = tiff.pages[0]
    # A resolution in inches is for printing.
    unit = 10.0 if page.tags.valueof(296, 1) == CENTIMETRE else None
    unit = unit_mm(_unescaped(fields.get("unit"))) or unit
    if unit is None and fields.get("spacing", 1) != 1:
        unit = 1.0  # such as pixels: at least the ratio of the spacings is known
    units = (unit, *(unit_mm(_unescaped(fields.get(name))) or unit for name in ("yunit", "zunit")))
    is_stack = fields.get("images", 1) > 1  # of a single slice ImageJ does not state the depth
    depth = abs(fields.get("spacing", 1)) if "spacing" in fields or is_stack else None
    lengths = (*(1 / each if each else None for each in page.get_resolution()), depth)
    stated_mm = [length_mm(*pair) for pair in zip(lengths, units, strict=True)]
    return {"spacing_mm": stated_mm, "unit": unit_name(unit)}


def _unescaped(name: object) -> str:
    """Return a text of ImageJ, which writes the micro sign as a backslash and its code."""
    return re.sub(r"\\u([0-9A-Fa-f]{4})", lambda found: chr(int(found[1], 16)), str(name))


def _stated_by_ome(root: ElementTree.Element) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return where planes lie by the metadata of OME, and the names of channels."""
    first = {one.tag.rpartition("}")[2]: one for one in reversed([*root.iter()])}
    pixels, plane = first.get("Pixels", root), first.get("Plane", root)
    names = [one.get("Name") for one in pixels if one.tag.endswith("Channel")]
    place: dict[str, Any] = {"spacing_mm": [], "origin_mm": []}
    for axis in "XYZ":
        unit = pixels.get(f"PhysicalSize{axis}Unit", "µm")
        place["spacing_mm"].append(length_mm(pixels.get(f"PhysicalSize{axis}"), unit_mm(unit)))
        unit_of_position = unit_mm(plane.get(f"Position{axis}Unit")) or 0.0
        place["origin_mm"].append(float(plane.get(f"Position{axis}", 0)) * unit_of_position)
    place["unit"] = unit_name(unit_mm(unit))
    return place, tuple(printable(name) for name in names if name)
