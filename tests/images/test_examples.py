"""Any collection of TIFF, zarr and HDF5, against what tifffile, zarr and h5py themselves read.

``UNET3D_EXAMPLES`` names its folder. A volume that unet3d refuses is skipped with the reason, so
``pytest -rs`` lists what is refused.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from unet3d.errors import VolumeError
from unet3d.images.files import SUFFIXES
from unet3d.images.image import open_image
from unet3d.images.source import Reading

tifffile = pytest.importorskip("tifffile")
zarr = pytest.importorskip("zarr")
h5py = pytest.importorskip("h5py")

FOLDER = os.environ.get("UNET3D_EXAMPLES", "")
MAX_BYTES = 2**28  # as read by the library
MM = {
    **dict.fromkeys(("µm", "um", "micron", "microns", "micrometer"), 1e-3),
    **dict.fromkeys(("μm", "\\u00B5m", "\\u03BCm"), 1e-3),
    **{"nm": 1e-6, "nanometer": 1e-6, "mm": 1.0, "millimeter": 1.0, "cm": 10.0, "inch": 25.4},
}


def volumes():
    """Yield all that may be a volume: paths, and the datasets of HDF5 files."""
    for folder, _, names in os.walk(FOLDER):
        here = Path(folder)
        tiffs = [name for name in names if name.lower().endswith((".tif", ".tiff"))]
        if {"zarr.json", ".zgroup", ".zarray"} & {*names} or len(tiffs) > 1:
            yield str(here)
        for name in tiffs + [name for name in names if name.lower().endswith(".zarr.zip")]:
            yield str(here / name)
        if ".h5" in SUFFIXES:
            for name in names:
                if name.lower().endswith((".h5", ".hdf5")) and h5py.is_hdf5(here / name):
                    yield from datasets(here / name)


def datasets(path):
    found = []
    with h5py.File(path) as file:
        file.visititems(lambda name, one: found.append((name, one.shape) if shaped(one) else None))
    return [f"{path}:/{name}" for name, shape in filter(None, found) if len(shape) > 2]


def shaped(one):
    return isinstance(one, h5py.Dataset) and one.shape is not None


def tiff(path):
    """Return what tifffile reads: voxels, axes, and the known lengths of a voxel by axis in mm."""
    with tifffile.TiffFile(path, _multifile=False) as file:
        series = file.series[0]
        assert series.nbytes <= MAX_BYTES
        page, lengths = series.keyframe, {}
        if file.is_ome:
            images = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
            pixels = (images[0] if isinstance(images, list) else images)["Pixels"]
            for axis in "XYZ":
                if f"PhysicalSize{axis}" in pixels:
                    mm = MM.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
                    lengths[axis] = mm and pixels[f"PhysicalSize{axis}"] * mm
        elif file.imagej_metadata is not None:
            fields = file.imagej_metadata
            mm = [MM.get(fields.get(f"{axis}unit", fields.get("unit"))) for axis in "xyz"]
            for axis, tag, one in (("X", "XResolution", mm[0]), ("Y", "YResolution", mm[1])):
                pixels, units = page.tags[tag].value if tag in page.tags else (0, 1)
                lengths[axis] = one and pixels and units / pixels * one
            lengths["Z"] = mm[2] and abs(fields.get("spacing", 1.0)) * mm[2]
        return series.asarray(), series.axes, lengths


def slices(folder):
    paths = [path for path in Path(folder).iterdir() if path.suffix.lower() in (".tif", ".tiff")]
    paths.sort(key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])
    found = [tiff(path) for path in paths]
    return np.stack([one[0] for one in found]), "Z" + found[0][1], found[0][2]


def zarr_array(path):
    """Return what zarr reads of the finest level of a group, or of an array."""
    if os.path.isfile(path):
        path = zarr.storage.ZipStore(path)
    node = zarr.open(path, mode="r")
    if isinstance(node, zarr.Group):
        attributes = node.attrs.asdict()
        image = attributes.get("ome", attributes)["multiscales"][0]
        level = image["datasets"][0]
        array, axes = node[level["path"]], image["axes"]
        assert array.nbytes <= MAX_BYTES
        transforms = [
            *level["coordinateTransformations"],
            *image.get("coordinateTransformations", []),
        ]
        scales = np.prod([one["scale"] for one in transforms if one["type"] == "scale"], axis=0)
        known = zip(axes, scales, strict=True)
        lengths = {a["name"].upper(): MM.get(a.get("unit", "mm"), 0) * scale for a, scale in known}
        return array[...], "".join(a["name"].upper() for a in axes), lengths
    names = getattr(node.metadata, "dimension_names", None)
    with suppress(Exception):  # a level of a pyramid has the axes of its group
        above = zarr.open_group(Path(path).parent, mode="r").attrs.asdict()
        names = [axis["name"] for axis in above.get("ome", above)["multiscales"][0]["axes"]]
    return node[...], "".join(names or "TCZYX"[-node.ndim :]).upper(), {}


def hdf5(name):
    path, _, inside = name.partition(":/")
    with h5py.File(path) as file:
        dataset = file[inside]
        stated = dataset.attrs.get("element_size_um", [])
        lengths = {axis: float(um) * 1e-3 for axis, um in zip("ZYX", stated, strict=False)}
        # vigra's axistags, which ilastik writes
        keys = re.findall(r'"key": "(\w)"', str(dataset.attrs.get("axistags", "")))
        last = dataset.ndim == 4 and dataset.shape[3] < dataset.shape[0]  # as PlantSeg's and others
        axes = "".join(keys).upper() or ("ZYXC" if last else "CZYX"[-dataset.ndim :])
        return dataset[...], axes, lengths


def expected(name):
    if ".h5:" in name or ".hdf5:" in name:
        return hdf5(name)
    if name.lower().endswith((".tif", ".tiff")) and os.path.isfile(name):
        return tiff(name)
    is_zarr = any(Path(name, one).exists() for one in ("zarr.json", ".zgroup", ".zarray"))
    return zarr_array(name) if is_zarr or os.path.isfile(name) else slices(name)


def opened(name):
    try:
        return open_image(Path(name))
    except VolumeError as error:
        assert "\n" not in str(error)
        with suppress(VolumeError):
            return open_image(Path(name), reading=Reading(time=1))
        pytest.skip(str(error).replace(f"{FOLDER}/", ""))


@pytest.mark.skipif(not FOLDER, reason="set UNET3D_EXAMPLES to a folder of volumes")
@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize("name", sorted(volumes()), ids=lambda name: os.path.relpath(name, FOLDER))
def test_volume_is_what_its_library_reads(name):
    image = opened(name)
    voxels, axes, lengths = expected(name)
    for axis in set(axes) - {*"CSXYZIQ"}:
        place = axes.index(axis)
        voxels, axes = voxels.take(1 if axis == "T" else 0, place), axes.replace(axis, "")
    axes = re.sub("[IQ]", "Z", axes)
    order = [axes.index(axis) for axis in "CSXYZ" if axis in axes]
    voxels = voxels.transpose(order).reshape(-1, *[voxels.shape[place] for place in order[-3:]])
    assert image.shape == voxels.shape
    assert image.dtype == voxels.dtype
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(image.whole(), voxels.astype(np.float32))
    for axis, mm in zip("XYZ", image.geometry.spacing_mm, strict=True):
        if lengths.get(axis):
            assert mm == pytest.approx(lengths[axis], rel=1e-6)
