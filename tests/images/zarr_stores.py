"""OME-Zarr stores of a small volume, written by zarr itself."""

import zipfile

import numpy as np
import pytest

zarr = pytest.importorskip("zarr")

VOXELS = np.random.default_rng(0).integers(1, 4000, (9, 17, 21)).astype(np.uint16)  # Z, Y, X
SPACING = (40.0, 8.0, 8.0)


def axes_named(names, unit="nanometer"):
    kinds = {"c": "channel", "t": "time"}
    axes = [{"name": name, "type": kinds.get(name, "space")} for name in names]
    return [one | ({"unit": unit} if unit and one["type"] == "space" else {}) for one in axes]


def scaled(scale, translation=None):
    found = [{"type": "scale", "scale": list(scale)}]
    return found + ([{"type": "translation", "translation": translation}] if translation else [])


def store(path, voxels=VOXELS, version="0.5", names="zyx", num_levels=2, **changes):
    """Write an image as OME-Zarr; in ``changes`` are parts of its metadata."""
    group = zarr.open_group(path, mode="w", zarr_format=3 if version == "0.5" else 2)
    levels = []
    for number in range(num_levels):
        step = 2**number
        part = voxels[(..., *[slice(None, None, step)] * 3)]
        shards = {"shards": (*part.shape[:-3], 8, 16, 16)} if version == "0.5" else {}
        group.create_array(
            str(number),
            shape=part.shape,
            chunks=(*part.shape[:-3], 4, 8, 8),
            dtype=part.dtype,
            config={"write_empty_chunks": True},
            **shards,
        )[...] = part
        scale = [1.0] * (voxels.ndim - 3) + [size * step for size in SPACING]
        levels.append({"path": str(number), "coordinateTransformations": scaled(scale)})
    multiscale = {"axes": axes_named(names), "datasets": levels, **changes}
    if version == "0.5":
        group.attrs["ome"] = {"version": "0.5", "multiscales": [multiscale]}
    else:
        group.attrs["multiscales"] = [{"version": "0.4", **multiscale}]
    return path


def zipped(folder, compression=zipfile.ZIP_STORED, above=""):
    path = folder.with_name(f"{folder.name}.zip")
    with zipfile.ZipFile(path, "w", compression) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                packed.write(file, f"{above}{file.relative_to(folder)}")
    return path


def write_store(path, voxels, spacing=10, zarr_format=3, chunks=(32, 32, 32)):
    """Write an image (Z, Y, X) in nanometres as OME-Zarr with one level."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    group.create_array("0", shape=voxels.shape, chunks=chunks, dtype=voxels.dtype)[...] = voxels
    scale = [{"type": "scale", "scale": [spacing] * 3}]
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    levels = [{"path": "0", "coordinateTransformations": scale}]
    multiscales = [{"axes": axes, "datasets": levels, "version": "0.4"}]
    group.attrs.update(
        {"multiscales": multiscales}
        if zarr_format == 2
        else {"ome": {"version": "0.5", "multiscales": multiscales}}
    )
    return path
