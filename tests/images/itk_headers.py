"""Small NRRD files and MetaImages, written field by field."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ARRAY = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
"""Voxels (X, Y, Z)."""

VOXELS = ARRAY.tobytes(order="F")

NRRD = {
    "type": "short",
    "dimension": "3",
    "sizes": "3 4 5",
    "space": "left-posterior-superior",
    "space directions": "(0.7,0,0) (0,0.8,0) (0,0,3)",
    "space origin": "(1,2,3)",
    "endian": "little",
    "encoding": "raw",
}

META = {
    "ObjectType": "Image",
    "NDims": "3",
    "BinaryData": "True",
    "BinaryDataByteOrderMSB": "False",
    "CompressedData": "False",
    "TransformMatrix": "1 0 0 0 1 0 0 0 1",
    "Offset": "1 2 3",
    "ElementSpacing": "0.7 0.8 3",
    "DimSize": "3 4 5",
    "ElementType": "MET_SHORT",
}


def nrrd_bytes(voxels: bytes | None = None, **changes: str | None) -> bytes:
    """Return an NRRD file; ``changes`` replace fields, with _ for a space; None removes one."""
    fields: dict[str, Any] = {**NRRD, **{k.replace("_", " "): v for k, v in changes.items()}}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    head = "\n".join(["NRRD0004", "# a remark", "note:=any: thing", *lines, "", ""]).encode()
    if voxels is None:
        voxels = gzip.compress(VOXELS, mtime=0) if fields["encoding"] == "gzip" else VOXELS
    return head + voxels


def meta_bytes(voxels: bytes | None = None, **changes: str | None) -> bytes:
    """Return a MetaImage; ``changes`` replace fields; None removes one."""
    fields: dict[str, Any] = {**META, "ElementDataFile": "LOCAL", **changes}
    fields["ElementDataFile"] = fields.pop("ElementDataFile")  # must be the last field
    lines = [f"{name} = {value}" for name, value in fields.items() if value is not None]
    if voxels is None:
        voxels = zlib.compress(VOXELS) if fields["CompressedData"] == "True" else VOXELS
    return "\n".join([*lines, ""]).encode() + voxels


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
