"""Labels and probabilities on the grid of a scan, against the logits of the whole volume."""

import errno
import os
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.networks import place, random_checkpoint
from tests.volumes.orientations import ORIENTATIONS, turn_to
from tests.volumes.samples import noise
from unet3d.inference.label_volume import LabelVolume, ProbabilityVolume
from unet3d.volumes.classes import Region
from unet3d.volumes.cropping import Box, whole_box
from unet3d.volumes.header import read_header
from unet3d.volumes.nifti import open_channels
from unet3d.volumes.scratch import Scratch

SHAPE = (6, 5, 4)
"""Along X, Y, Z, however it is stored."""

BOX = Box(start=(1, 0, 1), stop=(5, 4, 4))

HALF = np.finfo(np.float16).eps
"""What float16 keeps of a number below 1."""


def header_of(codes, folder):
    """Return the header of a file with its axes in some order and direction."""
    return read_header(write_oriented(np.zeros(SHAPE, np.uint8), codes, folder))


def write_oriented(array, codes, folder):
    image = nib.Nifti1Image(array, np.diag([1.0, 1.5, 2.0, 1]))
    path = folder / f"{codes}.nii"
    nib.save(image.as_reoriented(turn_to(codes)), path)
    return path


def as_stored(array, codes):
    """Return an array (X, Y, Z) as a file of this orientation has it."""
    return nib.apply_orientation(array, turn_to(codes))


def preprocessing_of(label_values=(0, 1, 2), regions=()):
    return random_checkpoint(label_values=label_values, regions=regions).preprocessing


REGIONS = (
    Region(name="whole", values=(1, 2, 5), written=2),
    Region(name="core", values=(1, 5), written=1),
    Region(name="active", values=(5,), written=5),
)


def logits_of(num, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num, *shape, generator=generator)


def fill(result, logits, axis):
    for slab in torch.split(logits, 2, 1 + axis):
        result.add(slab, axis)
    result.finish()


def softmax(logits):
    """Return probabilities in float64, with NumPy alone."""
    exponentials = np.exp(logits.double().numpy())
    return exponentials / exponentials.sum(0)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_labels_and_probabilities_of_every_orientation(axis, tmp_path):
    path = tmp_path / "a.npy"
    logits = logits_of(3, SHAPE, axis)
    for codes in ORIENTATIONS:
        header = header_of(codes, tmp_path)
        for scratch in (Scratch(), Scratch(tmp_path)):
            labels = LabelVolume(header, whole_box(SHAPE), preprocessing_of(), scratch)
            fill(labels, logits, axis)
            np.testing.assert_array_equal(labels.array, logits.numpy().argmax(0))
            assert labels.array.dtype == np.uint8
            assert as_stored(labels.array, codes).flags.f_contiguous  # as it is written
        fill(ProbabilityVolume(path, header, whole_box(SHAPE), preprocessing_of()), logits, axis)
        found = np.load(path)
        assert found.dtype == np.float16
        assert found.shape == (3, *reversed(nib.load(tmp_path / f"{codes}.nii").shape))
        for of_class, expected in zip(found, softmax(logits), strict=True):
            np.testing.assert_allclose(of_class.T, as_stored(expected, codes), rtol=0, atol=HALF)
        np.testing.assert_allclose(found.astype(float).sum(0), 1, atol=3 * HALF)


@pytest.mark.parametrize(
    ("values", "regions", "dtype"),
    [
        ((0, 1, 2), (), "u1"),
        ((0, 7, 3), (), "u1"),
        ((0, 300, 2), (), "u2"),
        (tuple(range(0, 600, 2)), (), "u2"),
        ((0, 1, 2, 5), REGIONS, "u1"),
    ],
    ids=["as classes", "others", "large", "many", "regions"],
)
def test_what_is_outside_of_a_box_is_background(values, regions, dtype, tmp_path):
    header, preprocessing = header_of("PSL", tmp_path), preprocessing_of(values, regions)
    logits = logits_of(len(regions or values), BOX.shape)
    inside = np.zeros(BOX.shape) if regions else np.array(values)[logits.numpy().argmax(0)]
    for region, number in zip(regions, logits.numpy(), strict=False):  # in their order
        inside[number > 0] = region.written
    expected = np.zeros(SHAPE, dtype)
    expected[BOX.slices] = inside
    for axis in range(3):
        labels = LabelVolume(header, BOX, preprocessing, Scratch(tmp_path))
        fill(labels, logits, axis)
        np.testing.assert_array_equal(labels.array, expected)
        assert labels.array.dtype == np.dtype(dtype)


@pytest.mark.parametrize("are_regions", [False, True])
def test_outside_of_a_box_the_background_is_certain(are_regions, tmp_path):
    preprocessing = preprocessing_of((0, 1, 2, 5), REGIONS) if are_regions else preprocessing_of()
    path = tmp_path / "a.npy"
    logits = logits_of(3, BOX.shape)
    expected = np.zeros((3, *SHAPE))
    if not are_regions:
        expected[0] = 1
    inside = 1 / (1 + np.exp(-logits.double().numpy())) if are_regions else softmax(logits)
    expected[:, *BOX.slices] = inside
    for axis in range(3):
        volume = ProbabilityVolume(path, header_of("RAS", tmp_path), BOX, preprocessing)
        fill(volume, logits, axis)
        np.testing.assert_allclose(np.load(path).T.transpose(3, 0, 1, 2), expected, atol=HALF)


def test_certain_logits_are_certain_and_never_nan(tmp_path):
    path, header = tmp_path / "a.npy", header_of("RAS", tmp_path)
    logits = torch.full((3, *SHAPE), -1e30)
    logits[1] = 1e30
    fill(ProbabilityVolume(path, header, whole_box(SHAPE), preprocessing_of()), logits, 0)
    np.testing.assert_array_equal(np.load(path)[1], 1)
    np.testing.assert_array_equal(np.load(path)[[0, 2]], 0)


def test_a_disk_that_is_full_shows_at_the_beginning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    header = header_of("RAS", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ProbabilityVolume(tmp_path / "a.npy", header, whole_box(SHAPE), preprocessing_of())


# From a file to a file


@pytest.mark.parametrize(("codes", "crops"), [("RAS", True), ("PSL", False), ("IRA", True)])
def test_a_scan_has_the_probabilities_of_the_plain_network(codes, crops, tmp_path):
    checkpoint = random_checkpoint(patch_size=None, dtype=torch.float64)
    preprocessing = replace(checkpoint.preprocessing, crops_to_nonzero=crops)
    array = np.zeros((16, 18, 12), np.float32)
    box = (slice(2, 14), slice(1, 17), slice(3, 11))
    array[box] = noise((12, 16, 8))
    counted = array[array != 0].astype(np.float64)
    model = checkpoint.build_model().eval()
    with torch.no_grad():
        part = array[box] if crops else array
        image = torch.from_numpy((part - counted.mean()) / counted.std()).double()
        inside = model(image[None, None])[0].softmax(0).numpy()
    expected = np.zeros((3, *array.shape))
    expected[0] = 1
    expected[:, *(box if crops else (slice(None),) * 3)] = inside
    path = tmp_path / "a.npy"
    scan = open_channels([write_oriented(array, codes, tmp_path)])
    predictor = place(replace(checkpoint, preprocessing=preprocessing))
    labels = predictor.segment(scan, probabilities=path)
    found = np.load(path)
    for of_class, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_class.T, as_stored(wanted, codes), atol=1e-3)
    assert (labels == expected.argmax(0)).mean() > 0.999  # normalised in float32
    np.testing.assert_array_equal(labels, predictor.segment(scan))
