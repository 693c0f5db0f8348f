"""Bytes and memory for reading a box of 128^3 voxels from a volume of 8 GB in each format.

    python benchmarks/boxes.py --json boxes.json
    python benchmarks/boxes.py --cases zarr-64,tiff --edge 1024 --folder DIR

The volume is uint8 noise around the boxes, which cannot be compressed, and a hole elsewhere, so it
takes little disk space. Each box is read in a process of its own, with nothing of the file in the
system's cache. *Asked* are the bytes that the process asked the system for: none of a mapped file.
*Read* are those that came from the disk, in whole pages, of which the system reads some ahead. Both
are multiples of the box. The memory is the peak of the process, with all libraries.

An *aligned* box is one chunk of 128^3; another touches eight chunks, so no program can read less
than eight times its bytes. A row of a plain file is in one piece, and so are all rows between the
first and the last of a box in a plane: with pages larger than a row of the box, that is what is
read. Needs the extra ``microscopy``, and for *Read* a disk that is not in memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from common import new_parser, words, write_record

BOX = 128
FIRST, WRITTEN = 0, 512
"""First voxel of the written part along each axis, and its length."""

STARTS = {"aligned": 128, "unaligned": 165}

Write = Callable[[Path, int, npt.NDArray[np.uint8]], Path]


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--cases", type=words, default=",".join(CASES))
    parser.add_argument("--edge", type=int, default=2048, help="voxels along each axis")
    parser.add_argument("--folder", type=Path, help="on a disk; default: temporary")
    return parser


# Volumes


def _zarr(chunk: int, shard: int | None = None) -> Write:
    def write(folder: Path, edge: int, part: npt.NDArray[np.uint8]) -> Path:
        import zarr

        array = zarr.create_array(
            folder / "scan.zarr",
            shape=(edge,) * 3,
            chunks=(chunk,) * 3,
            shards=None if shard is None else (shard,) * 3,
            dtype="uint8",
            dimension_names=("z", "y", "x"),
        )
        array[_written(), _written(), _written()] = part
        return folder / "scan.zarr"

    return write


def _tiff(folder: Path, edge: int, part: npt.NDArray[np.uint8]) -> Path:
    import tifffile

    path = folder / "scan.tif"
    mapped = tifffile.memmap(path, shape=(edge,) * 3, dtype="uint8", bigtiff=True)
    mapped[_written(), _written(), _written()] = part
    mapped.flush()
    return path


def _nifti(folder: Path, edge: int, part: npt.NDArray[np.uint8]) -> Path:
    import nibabel as nib

    path = folder / "scan.nii"
    header = nib.Nifti1Header()
    header.set_data_shape((edge,) * 3)
    header.set_data_dtype(np.uint8)
    header["vox_offset"] = 352
    header.set_sform(np.eye(4), 1)
    path.write_bytes(header.binaryblock + bytes(4))
    os.truncate(path, 352 + edge**3)
    mapped = np.memmap(path, np.uint8, "r+", 352, (edge,) * 3)
    mapped[_written(), _written(), _written()] = part
    mapped.flush()
    return path


def _hdf5(chunk: int | None, **how: Any) -> Write:
    def write(folder: Path, edge: int, part: npt.NDArray[np.uint8]) -> Path:
        import h5py

        with h5py.File(folder / "scan.h5", "w") as file:
            chunks = None if chunk is None else (chunk,) * 3
            raw = file.create_dataset("raw", (edge,) * 3, "uint8", chunks=chunks, **how)
            raw.attrs["element_size_um"] = (1.0, 1.0, 1.0)
            raw[_written(), _written(), _written()] = part
        return folder / "scan.h5"

    return write


def _written() -> slice:
    return slice(FIRST, FIRST + WRITTEN)


CASES: dict[str, Write] = {
    "zarr-64": _zarr(64),
    "zarr-128": _zarr(128),
    "zarr-64-in-512": _zarr(64, 512),
    "zarr-128-in-512": _zarr(128, 512),
    "tiff": _tiff,
    "nifti": _nifti,
    "hdf5-64": _hdf5(64, compression="gzip", compression_opts=1),
    "hdf5-128": _hdf5(128, compression="gzip", compression_opts=1),
    "hdf5": _hdf5(None),
}


# Measuring


READ = """
import json, sys, time
from pathlib import Path
import numpy as np
from unet3d.images.image import open_image

def counters():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["read_bytes"])

path, kept, *ends = sys.argv[1:]
box = (slice(*map(int, ends)),) * 3
image = open_image(Path(path))
image.read((slice(0, 1),) * 3)  # imports modules
before, began = counters(), time.perf_counter()
found = image.read(box)
seconds = time.perf_counter() - began
asked, read = (after - old for after, old in zip(counters(), before))
np.save(kept, found[0].T)
lines = Path("/proc/self/status").read_text().splitlines()
(peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
row = {"asked": asked, "read": read, "seconds": seconds, "host_bytes": int(peak) * 1024}
print(json.dumps(row))
"""
"""Reads a box in a process without the modules of this script."""


def _noise() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (WRITTEN,) * 3, np.uint8)


def forget(folder: Path) -> None:
    """Remove all files in a folder from the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(case: str, edge: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Write a volume, and read a box at each place."""
    path = CASES[case](folder, edge, _noise())
    rows = {}
    for name, start in STARTS.items():
        forget(folder)
        kept = folder / f"{name}.npy"
        said = [sys.executable, "-c", READ, *map(str, (path, kept, start, start + BOX))]
        child = subprocess.run(said, capture_output=True, text=True, check=False)
        lines = (child.stderr if child.returncode else child.stdout).strip().splitlines()
        row: dict[str, Any] = json.loads(lines[-1] if not child.returncode else "{}")
        if child.returncode:
            row["reason"] = lines[-1]
        inside = slice(start - FIRST, start - FIRST + BOX)
        if "reason" in row:
            pass
        elif np.array_equal(np.load(kept), _noise()[inside, inside, inside]):
            row |= {what: row[what] / BOX**3 for what in ("asked", "read")}
        else:
            row = {"reason": "the voxels are not those that were written"}
        rows[name] = row
        shown = f"{case}, {name}: "
        shown += row.get("reason") or (
            f"asked {row['asked']:.2f}, read {row['read']:.2f} times the box, "
            f"{row['host_bytes'] / 2**20:.0f} MiB, {1000 * row['seconds']:.0f} ms"
        )
        print(shown, flush=True)
    return rows


def main() -> None:
    """Measure, print the lines, write the record."""
    arguments = make_parser().parse_args()
    rows = {}
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            rows[case] = measure(case, arguments.edge, Path(name))
    request = {"edge": arguments.edge, "box": BOX}
    write_record(arguments.json, [torch.device("cpu")], request=request, rows=rows)


if __name__ == "__main__":
    main()
