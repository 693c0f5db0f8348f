"""Label names in the file of a segmentation, as TotalSegmentator writes and reads them.

In NIfTI they are in an extension of the header (code 0): the label table of Connectome Workbench in
XML, which 3D Slicer and TotalSegmentator's own tools read. Other programs skip it.
"""

import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import nibabel as nib
from isal import igzip

from unet3d.images.files import NIFTI, format_of, module_of
from unet3d.images.source import GZIP_MARK
from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_BYTES = 2**20
"""Bytes to read for the names: many times the size of thousands of names."""

TABLE = re.compile(rb"<CaretExtension.*?</CaretExtension>", re.DOTALL)

HUES = ("1 0 0", "0 1 0", "0 0 1", "1 1 0", "1 0 1", "0 1 1", "1 .5 0", "1 0 .5", ".5 1 .5")
"""Red, green and blue of labels in turn; the format requires colours."""


def name_labels(header: Any, names: Mapping[int, str]) -> None:
    """Add the names of label values to a NIfTI header of nibabel."""
    table = ElementTree.Element("LabelTable")
    for number, (value, name) in enumerate(names.items()):
        red, green, blue = HUES[number % len(HUES)].split()
        colour = {"Red": red, "Green": green, "Blue": blue, "Alpha": "1"}
        label = ElementTree.SubElement(table, "Label", colour, Key=str(value))
        label.text = name
    volume = ElementTree.Element("VolumeInformation", Index="0")
    volume.append(table)
    ElementTree.SubElement(volume, "VolumeType").text = "Label"
    root = ElementTree.Element("CaretExtension")
    root.append(volume)
    content = ElementTree.tostring(root, encoding="UTF-8")
    header.extensions.append(nib.nifti1.Nifti1Extension(0, content))
    header["vox_offset"] = 0  # nibabel then leaves as much space as the extension needs


def read_label_names(path: Path) -> dict[int, str]:
    """Return the name of each label value from the file of a label map, or an empty mapping.

    The file is untrusted: a damaged one counts as a file without names.
    """
    format_ = format_of(path)
    if format_ is not None and format_.written and format_ is not NIFTI:
        named: dict[int, str] = module_of(format_).label_names(path)
        return named
    with suppress(OSError, EOFError, ValueError, zlib.error, ElementTree.ParseError):
        found = TABLE.search(_beginning(path))
        # The match excludes a document type, so the XML cannot define entities that expand.
        labels = ElementTree.fromstring(found[0]).iter("Label") if found else ()
        names = {int(one.get("Key", "0")): printable((one.text or "").strip()) for one in labels}
        return {value: name for value, name in names.items() if value > 0 and name}
    return {}


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a file, unpacked if it is compressed; they include the header."""
    with open_regular(path) as file:
        is_packed = file.peek(2)[:2] == GZIP_MARK
        opened: Any = igzip.open
        content: IO[bytes] = opened(file, "rb") if is_packed else file
        return content.read(MAX_BYTES)
