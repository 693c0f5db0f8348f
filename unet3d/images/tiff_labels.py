"""Writes label maps as TIFF, and reads the names of their values."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError
from unet3d.images.files import TIFF, volume_suffix
from unet3d.images.geometry import Geometry
from unet3d.images.label_names import HUES
from unet3d.images.microscopy import (
    package,
    rounded,
    states_spacing,
    written_place,
    written_unit,
)
from unet3d.images.scratch import forget_pages
from unet3d.images.tiff_stack import opened_tiff
from unet3d.images.units import unit_mm
from unet3d.inputs.plain_data import printable

MAX_IMAGEJ_BYTES = 2**31
"""More voxels than this, and a file may exceed the 4 GiB of ImageJ's format."""


def label_names(path: Path) -> dict[int, str]:
    """Return the names of label values that :func:`write_labels` wrote, if there are any."""
    with suppress(VolumeError, ElementTree.ParseError), opened_tiff(path) as tiff:
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
    spacing_mm, origin_mm = written_place(geometry)
    unit = written_unit(geometry)
    one_mm = unit_mm(unit) or 1.0
    x, y, z = rounded(np.array(spacing_mm) / one_mm)
    is_known = states_spacing(geometry)
    planes = stored.T
    metadata: dict[str, Any] = {"axes": "ZYX"}
    if planes.itemsize < 4 and planes.nbytes < MAX_IMAGEJ_BYTES and _is_of_imagej(geometry.path):
        options: dict[str, Any] = {"imagej": True}
        metadata["Info"] = "".join(f"label {value}: {name}\n" for value, name in names.items())
        if is_known:
            options["resolution"] = (1 / x, 1 / y)
            metadata |= {"unit": unit.replace("µ", "u"), "spacing": z}
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
            metadata |= {f"PhysicalSize{axis}Unit": unit for axis in "XYZ"}
        if any(origin_mm):
            metadata["Plane"] = {
                name: [value] * len(planes)
                for axis, mm in zip("XYZ", rounded(np.array(origin_mm) / one_mm), strict=True)
                for name, value in ((f"Position{axis}", mm), (f"Position{axis}Unit", unit))
            }
    tifffile.imwrite(
        path,
        _released(planes),
        shape=planes.shape,
        dtype=planes.dtype,
        compression="zlib",
        metadata=metadata,
        **options,
    )


def _released(planes: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield planes, whose memory pages are released if they are of a file."""
    for plane in planes:
        yield np.ascontiguousarray(plane)
        forget_pages(planes)


def _is_of_imagej(path: Path) -> bool:
    """Return whether a file is a stack that ImageJ saved, or describes as ImageJ does."""
    if volume_suffix(path) in TIFF.suffixes and os.path.isfile(path):
        with suppress(VolumeError), opened_tiff(path) as tiff:
            return bool(tiff.is_imagej)
    return False
