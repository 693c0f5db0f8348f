"""Stores in data sets, caches and evaluations; and a real volume in several forms."""

import json

import numpy as np
import pytest

from tests.images.samples import write_volume
from tests.images.zarr_stores import write_store
from unet3d.config import load_config
from unet3d.datasets.dataset import load_dataset
from unet3d.images.image import open_image
from unet3d.inference.evaluation import evaluate
from unet3d.preparation import normalization, prepared_image
from unet3d.preparation.cache import Cache
from unet3d.preparation.check import examine
from unet3d.preparation.prepared_image import nonzero_box
from unet3d.preparation.preprocess import plan_preprocessing, prepare_cases

zarr = pytest.importorskip("zarr")


def write_dataset(root, images, labels, ending):
    """Write a data set in nnU-Net's layout."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        for name, voxels in ((f"imagesTr/{number}_0000", image), (f"labelsTr/{number}", label)):
            path = root / f"{name}{ending}"
            if ending == ".nii.gz":
                write_volume(path, voxels.T, (1e-5, 1e-5, 1e-5))
            else:
                write_store(path, voxels, zarr_format=2 + number % 2)
    description = {"channel_names": {"0": "EM"}, "labels": {"background": 0, "membrane": 1}}
    text = json.dumps({**description, "file_ending": ending, "numTraining": len(images)})
    (root / "dataset.json").write_text(text)
    return load_dataset(root)


@pytest.fixture(scope="module")
def volume(test_data):
    """Return parts of a real volume and of its membranes, (Z, Y, X)."""
    tifffile = pytest.importorskip("tifffile")
    folder = test_data / "microscopy"
    box = (slice(0, 60), slice(0, 70), slice(0, 80))
    return [tifffile.imread(folder / f"fib25_{name}.tif")[box] for name in ("raw", "membrane")]


def test_prepared_cases_are_the_same_as_of_nifti(tmp_path, volume):
    images, labels = ([part[:30], part[30:]] for part in volume)
    found = []
    for ending in (".nii.gz", ".ome.zarr"):
        dataset = write_dataset(tmp_path / ending[1:], images, labels, ending)
        settings = load_config(None, [f"data.cache={tmp_path / 'cache'}"]).data
        preprocessing, _ = plan_preprocessing(dataset, settings)
        cases = prepare_cases(dataset.cases, preprocessing, tmp_path / "cache", 0)
        found.append([(case.image(), case.label(), case.foreground().voxels) for case in cases])
    for one, other in zip(*found, strict=True):
        for expected, array in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_labels_in_the_store_of_their_image_have_its_name(tmp_path):
    voxels = np.arange(8**3, dtype=np.uint16).reshape(8, 8, 8)
    for number in range(2):
        store = write_store(tmp_path / f"scans/{number}.ome.zarr", voxels)
        write_store(store / "labels/cells", (voxels > 99).astype("u1"))
    paths = [f"scans/{number}.ome.zarr" for number in range(2)]
    cases = [{"image": path, "label": f"{path}/labels/cells"} for path in paths]
    tree = {"labels": {"background": 0, "cell": 1}, "training": cases}
    (tmp_path / "dataset.json").write_text(json.dumps(tree))
    dataset = load_dataset(tmp_path)
    assert [case.name for case in dataset.cases] == ["scans/0", "scans/1"]
    assert examine(dataset).findings == []


def test_a_store_that_belongs_to_no_case_is_named(tmp_path):
    voxels = np.arange(8**3, dtype=np.uint16).reshape(8, 8, 8)
    dataset = write_dataset(tmp_path, [voxels] * 2, [(voxels > 99).astype("u1")] * 2, ".ome.zarr")
    assert [case.name for case in dataset.cases] == ["0", "1"]
    assert examine(dataset).findings == []
    write_store(tmp_path / "imagesTr" / "extra.ome.zarr", voxels)
    (finding,) = examine(dataset).findings
    assert finding.case == "extra.ome.zarr" and "belongs to no case" in finding.message


def test_the_digest_of_a_store_tells_where_its_chunks_are(tmp_path):
    cache, voxels = Cache(tmp_path / "cache"), np.zeros((64, 32, 32), np.uint8)
    digests = set()
    for number, planes in enumerate([slice(0, 32), slice(32, 64), slice(0, 64)]):
        voxels[:] = 0
        voxels[planes] = 7
        digests.add(cache.digest(write_store(tmp_path / f"{number}.zarr", voxels)))
    assert len(digests) == 3
    copy = write_store(tmp_path / "copy.zarr", voxels)
    assert cache.digest(copy) in digests
    write_store(copy / "labels" / "cells", voxels)  # is another volume
    assert cache.digest(copy) in digests


def test_stores_are_compared_by_name_and_with_files(tmp_path):
    labels = np.random.default_rng(0).integers(0, 2, (8, 9, 10)).astype(np.uint8)
    store = write_store(tmp_path / "a" / "case_seg.ome.zarr", labels)
    same = write_store(tmp_path / "b" / "case.zarr", labels, zarr_format=2)
    file = write_volume(tmp_path / "c" / "case.nii.gz", labels.T, (1e-5, 1e-5, 1e-5))
    for prediction, label in ((store, same), (store, file), (tmp_path / "a", tmp_path / "b")):
        (case,) = evaluate(prediction, label).cases
        assert case.name == "case"
        assert all(score.dice == 1 for score in case.scores.values())
    assert open_image(store).geometry.unit == "nanometer"


def test_the_nonzero_box_of_a_large_pyramid_is_found_in_a_coarser_level(tmp_path, monkeypatch):
    voxels = np.zeros((40, 60, 80), np.uint8)  # (Z, Y, X)
    voxels[9:31, 17:50, 22:] = np.random.default_rng(0).integers(1, 255, (22, 33, 58))
    group = zarr.open_group(tmp_path / "scan.ome.zarr", mode="w", zarr_format=2)
    levels = []
    for level in range(4):
        step = 2**level
        group[str(level)] = voxels[::step, ::step, ::step]
        scale = [{"type": "scale", "scale": [10 * step] * 3}]
        levels.append({"path": str(level), "coordinateTransformations": scale})
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": levels, "version": "0.4"}]
    image = open_image(tmp_path / "scan.ome.zarr")
    assert image.levels == ((80, 60, 40), (40, 30, 20), (20, 15, 10), (10, 8, 5))
    exact = (slice(22, 80), slice(17, 50), slice(9, 31))
    assert nonzero_box(image) == exact
    monkeypatch.setattr(normalization, "LARGE_VOXELS", 10_000)
    monkeypatch.setattr(prepared_image, "ENOUGH_VOXELS", 2_000)
    monkeypatch.setattr(image, "pieces", None)  # only level 2 is read completely
    found = nonzero_box(image)
    for part, inner in zip(found, exact, strict=True):
        assert inner.start - 8 <= part.start <= inner.start and inner.stop <= part.stop
        assert part.stop <= inner.stop + 8
    assert found[0].stop == 80
    cut = image.cut(exact).at_level(1)
    np.testing.assert_array_equal(cut.whole()[0].T, voxels[::2, ::2, ::2][4:16, 8:25, 11:])
    assert cut.geometry.affine[:3, 3] == pytest.approx(np.array([22, 16, 8]) * 1e-5)
