"""One volume in seven formats: the same training batches, and the same labels, bit for bit."""

import numpy as np
import pytest
import torch

from tests.command_line import run
from tests.images.samples import blob_label, noise, write_json, write_volume
from tests.images.zarr_stores import write_store
from tests.networks import write_checkpoint
from tests.patches.known_cases import make_loader
from unet3d.config import load_config
from unet3d.datasets.dataset import load_dataset
from unet3d.images.files import written_suffix
from unet3d.images.geometry import same_grid
from unet3d.images.image import open_image
from unet3d.images.labels import read_label
from unet3d.preparation.preprocess import plan_preprocessing, prepare_cases

tifffile = pytest.importorskip("tifffile")
h5py = pytest.importorskip("h5py")
pytest.importorskip("zarr")

SPACING_MM = 1e-5


def write_stack(path, voxels):
    tifffile.imwrite(path.with_suffix(".tif"), voxels, metadata=None, compression="zlib")
    write_json(path.with_suffix(".json"), {"spacing": [SPACING_MM] * 3})
    return path.with_suffix(".tif")


def write_slices(path, voxels):
    path.mkdir()
    for number, plane in enumerate(voxels):
        tifffile.imwrite(path / f"z{number}.tif", plane, metadata=None)
    write_json(path.with_suffix(".json"), {"spacing": [SPACING_MM] * 3})
    return path


def write_ome_tiff(path, voxels):
    metadata = {"axes": "ZYX"} | {f"PhysicalSize{axis}": 10 for axis in "XYZ"}
    metadata |= {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    tifffile.imwrite(path.with_suffix(".ome.tif"), voxels, ome=True, metadata=metadata)
    return path.with_suffix(".ome.tif")


def write_hdf5(path, voxels):
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        dataset = file.create_dataset("raw", data=voxels, chunks=(8, 8, 8), compression="gzip")
        dataset.attrs["element_size_um"] = [0.01] * 3
    return path.with_suffix(".h5")


WRITERS = {
    "NIfTI": lambda path, voxels: write_volume(
        path.with_suffix(".nii.gz"), voxels.T, (SPACING_MM,) * 3
    ),
    "TIFF stack": write_stack,
    "folder of slices": write_slices,
    "OME-TIFF": write_ome_tiff,
    "HDF5": write_hdf5,
    "OME-Zarr 0.4": lambda path, voxels: write_store(path.with_suffix(".zarr"), voxels, 10, 2),
    "OME-Zarr 0.5": lambda path, voxels: write_store(path.with_suffix(".ome.zarr"), voxels, 10, 3),
}
"""Functions that write voxels (Z, Y, X) with a spacing of 10 nm."""


@pytest.fixture(scope="module", params=["small", "real"])
def volume(request):
    """Return an image and its labels, (Z, Y, X)."""
    if request.param == "small":
        shape = (30, 26, 24)
        return noise(shape).astype(np.uint8).T, blob_label(shape).T
    folder = request.getfixturevalue("test_data") / "microscopy"
    box = (slice(0, 40), slice(0, 50), slice(0, 60))
    return [tifffile.imread(folder / f"fib25_{name}.tif")[box] for name in ("raw", "membrane")]


def batches_of(root, write, volume, cache):
    """Return two batches of a data set, whose two cases are halves of a volume, and an image."""
    entries = []
    for number, planes in enumerate(np.array_split(np.arange(len(volume[0])), 2)):
        entry = {}
        for name, voxels in zip(("image", "label"), volume, strict=True):
            (root / name).mkdir(exist_ok=True, parents=True)
            path = write(root / name / f"{number}", voxels[planes])
            entry[name] = str(path.relative_to(root))
        entries.append(entry)
    labels = {"background": 0, "one": 1, "two": 2}
    tree = {"channel_names": ["EM"], "labels": labels, "training": entries}
    dataset = load_dataset(write_json(root / "dataset.json", tree).parent)
    assert [case.name for case in dataset.cases] == ["label/0", "label/1"]
    config = load_config(None, [f"data.cache={cache}"])
    preprocessing, _ = plan_preprocessing(dataset, config.data)
    cases = prepare_cases(dataset.cases, preprocessing, cache, 0)
    loader = make_loader(cases, config.patches, size=(8, 8, 8), stride=(2, 2, 2), num_steps=2)
    return [*loader.epoch(0)], root / entries[0]["image"]


def prepared_and_segmented(root, name, volume):
    """Return the batches of a volume in one format, and its labels by a network."""
    batches, image = batches_of(root, WRITERS[name], volume, root / "cache")
    checkpoint = write_checkpoint(root / "run/checkpoint-latest.pt", patch_size=(16, 16, 16))
    words = ("--checkpoint", checkpoint, "--devices", "cpu", "--output", f"{root}/results/")
    assert run("predict", image, *words) == 0
    (result,) = (root / "results").iterdir()
    assert result.name == f"0{written_suffix(image)}"
    label = read_label(result)
    assert same_grid(open_image(image).geometry, label.geometry) is None
    return batches, label


@pytest.fixture(scope="module")
def of_nifti(volume, tmp_path_factory):
    return prepared_and_segmented(tmp_path_factory.mktemp("nifti"), "NIfTI", volume)


@pytest.mark.parametrize("kind", [name for name in WRITERS if name != "NIfTI"])
def test_batches_and_labels_are_those_of_nifti(tmp_path, volume, of_nifti, kind):
    (batches, label), (others, other) = of_nifti, prepared_and_segmented(tmp_path, kind, volume)
    for one, two in zip(batches, others, strict=True):
        assert torch.equal(one.image, two.image) and torch.equal(one.target, two.target)
    assert len(np.unique(label.array)) == 3 and same_grid(label.geometry, other.geometry) is None
    np.testing.assert_array_equal(label.array, other.array)
