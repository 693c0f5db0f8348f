import json
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from unittest import mock

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from unet3d.datasets import phantom as heads
from unet3d.datasets.phantom import (
    LABEL_NAMES,
    head_phantom,
    write_phantom_dataset,
)
from unet3d.errors import ConfigError, DatasetError

LESION = LABEL_NAMES.index("lesion")


def best_band_dice(values, truth):
    """Return the Dice of the best interval lo..hi of intensities, over all pairs of 500 limits."""
    limits = np.linspace(values.min(), values.max(), 500)
    num_below = np.searchsorted(np.sort(values), limits, side="right")
    num_true_below = np.searchsorted(np.sort(values[truth]), limits, side="right")
    num_in_band = num_below[None, :] - num_below[:, None]
    num_true_in_band = num_true_below[None, :] - num_true_below[:, None]
    upper = np.triu_indices(len(limits), k=1)
    return float((2 * num_true_in_band[upper] / (num_in_band[upper] + truth.sum())).max())


def test_a_seed_decides_every_voxel_and_every_label_is_there_in_any_shape():
    for seed, shape in product(range(6), ((16, 16, 16), (24, 24, 24), (37, 53, 29), (96, 96, 16))):
        image, labels = head_phantom(seed, shape)
        assert np.unique(labels).tolist() == list(range(len(LABEL_NAMES))), (seed, shape)
        assert (image.shape, labels.shape) == ((1, *shape), shape)
        assert (image.dtype, labels.dtype) == (np.float32, np.uint8)
        assert image.min() >= 0 and np.isfinite(image).all()
    for found, again in zip((image, labels), head_phantom(seed, shape), strict=True):
        np.testing.assert_array_equal(found, again)
    assert not np.array_equal(image, head_phantom(8, shape)[0])


@pytest.fixture(scope="module")
def phantoms():
    return [head_phantom(seed, (64, 64, 64)) for seed in range(4)]


def test_no_band_of_intensities_finds_the_lesions(phantoms):
    truth = np.ravel([labels == LESION for _, labels in phantoms])
    raw = np.ravel([image for image, _ in phantoms])
    scored = np.ravel([(image - image.mean()) / image.std() for image, _ in phantoms])
    assert best_band_dice(truth.astype(np.float32), truth) == 1.0  # the search can find an interval
    assert best_band_dice(raw, truth) < 0.6
    assert best_band_dice(scored, truth) < 0.6


def test_lesions_stand_out_from_the_brain_around_them_and_vary(phantoms):
    numbers = set()
    for image, labels in phantoms:
        lesion = ndimage.binary_erosion(labels == LESION)
        rim = ndimage.binary_dilation(labels == LESION, iterations=4) & (labels == 1)
        noise = image[0, :4].std()  # noise in air
        assert np.median(image[0][lesion]) - np.median(image[0][rim]) > 4 * noise
        assert np.count_nonzero(labels == LESION) > 100
        numbers.add(ndimage.label(labels == LESION)[1])
    assert len(numbers) >= 2


def test_shape_and_spacing_only_sample_one_head(monkeypatch):
    monkeypatch.setattr(heads, "NOISE", 0.0)
    fine_image, fine_labels = head_phantom(3, (96, 96, 96), (1.0, 1.0, 1.0))
    for factors in ((2, 2, 2), (1, 1, 4), (3, 1, 2)):
        x, y, z = (96 // factor for factor in factors)
        image, labels = head_phantom(3, (x, y, z), tuple(map(float, factors)))

        blocks = [number for pair in zip((x, y, z), factors, strict=True) for number in pair]
        averaged = fine_image[0].reshape(blocks).mean(axis=(1, 3, 5))
        # A voxel is the mean over its volume, up to the curvature of surfaces in it.
        error = np.abs(image[0] - averaged)
        assert error.mean() < 0.02 * averaged.max()
        sampled = image[0] - fine_image[0][tuple(slice(f // 2, None, f) for f in factors)]
        assert error.mean() < 0.6 * np.abs(sampled).mean()  # much closer than single voxels are
        for value in range(1, len(LABEL_NAMES)):
            covered = (fine_labels == value).reshape(blocks).mean(axis=(1, 3, 5)) > 0.5
            found = labels == value
            dice = 2 * np.count_nonzero(found & covered) / (found.sum() + covered.sum())
            assert dice > 0.85


def test_slabs_leave_no_seam(monkeypatch):
    whole, labels = head_phantom(5, (48, 40, 44))
    monkeypatch.setattr(heads, "NOISE", 0.0)
    one, _ = head_phantom(5, (48, 40, 44))
    monkeypatch.setattr(heads, "SLAB_VOXELS", 40 * 44 * 5)
    slabs, labels_of_slabs = head_phantom(5, (48, 40, 44))

    np.testing.assert_allclose(slabs, one, atol=1)  # one grey value of rounding
    assert np.mean(labels != labels_of_slabs) < 1e-4
    assert np.abs(whole - one).max() > 1


def test_a_shape_that_is_too_small_for_a_head_is_refused():
    with pytest.raises(ConfigError, match=r"too small for a head; use at least 16 voxels"):
        head_phantom(0, (15, 64, 64))


def test_the_data_set_is_an_msd_folder(tmp_path):
    shape, spacing_mm = (32, 28, 16), (1.0, 1.0, 2.0)
    folder = write_phantom_dataset(tmp_path / "phantom", 3, shape, spacing_mm, seed=0)
    description = json.loads((folder / "dataset.json").read_text())
    assert description["labels"] == {str(i): name for i, name in enumerate(LABEL_NAMES)}
    assert description["numTraining"] == len(description["training"]) == 3
    images = []
    for case in description["training"]:
        image, label = nib.load(folder / case["image"]), nib.load(folder / case["label"])
        assert image.shape == label.shape == shape
        assert image.header.get_zooms() == spacing_mm
        assert nib.aff2axcodes(image.affine) == ("R", "A", "S")
        np.testing.assert_array_equal(image.affine, label.affine)
        np.testing.assert_allclose(image.affine @ [15.5, 13.5, 7.5, 1], [0, 0, 0, 1])
        images.append(image.get_fdata())
    assert not np.array_equal(images[0], images[1])
    # A case on disk equals the case in memory.
    seeds = [np.random.SeedSequence([0, index]).generate_state(1)[0] for index in range(3)]
    for case, image, seed in zip(description["training"], images, seeds, strict=True):
        expected, labels = head_phantom(seed, shape, spacing_mm)
        np.testing.assert_array_equal(image, expected[0])
        np.testing.assert_array_equal(nib.load(folder / case["label"]).get_fdata(), labels)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


SMALL = ((24, 24, 24), (1.0, 1.0, 1.0), 5)


def test_a_folder_with_other_contents_is_left_alone(tmp_path):
    folder = tmp_path / "phantom"
    write_phantom_dataset(folder, 2, *SMALL)
    before = contents(tmp_path)
    write_phantom_dataset(folder, 2, *SMALL)  # a second time, with the same result
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["phantom"]

    def assert_is_refused(folder, seed=5):
        before = contents(tmp_path)
        with pytest.raises(DatasetError, match="does not hold this phantom data set"):
            write_phantom_dataset(folder, 2, *SMALL[:2], seed)
        assert contents(tmp_path) == before

    assert_is_refused(folder, seed=6)
    description = folder / "dataset.json"
    for damaged in (b"[" * 200_000, b"\xff", b"NaN"):
        description.write_bytes(damaged)
        assert_is_refused(folder)
    description.unlink()
    os.mkfifo(description)
    assert_is_refused(folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    assert_is_refused(tmp_path / "mine")


def test_a_folder_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DatasetError, match=r"cannot write phantom data to .*File exists"):
        write_phantom_dataset(tmp_path / "file" / "phantom", 1, *SMALL)

    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(heads, "write_nifti", full)
    with pytest.raises(DatasetError, match=r"No space left on device; .*data\.cache"):
        write_phantom_dataset(tmp_path / "phantom", 1, *SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # no part of the data set is left


def test_those_who_race_share_one_data_set(tmp_path):
    folder = tmp_path / "phantom"
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: write_phantom_dataset(folder, 2, *SMALL), range(4)))
    assert folders == {folder}
    assert [path.name for path in tmp_path.iterdir()] == ["phantom"]
    assert len(list((tmp_path / "phantom").rglob("*.nii.gz"))) == 4
