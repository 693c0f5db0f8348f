"""Labels and probabilities on the grid of a scan, against the logits of the whole volume."""

import itertools

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.images.orientations import ORIENTATIONS, turn_to
from tests.networks import random_checkpoint
from tests.products import by_night
from unet3d.datasets.labels import Region
from unet3d.images.image import open_image
from unet3d.images.scratch import Scratch
from unet3d.inference.label_volume import LabelVolume, ProbabilityVolume, SlabSink
from unet3d.preparation.prepared_image import whole_box

SHAPE = (6, 5, 4)
"""Size along X, Y, Z, in any stored order."""

BOX = (slice(1, 5), slice(0, 4), slice(1, 4))
SIZE = (4, 4, 3)

HALF = np.finfo(np.float16).eps
"""Rounding error of a float16 number below 1."""


def header_of(codes, folder):
    """Return the header of a file with its axes in some order and direction."""
    return open_image(write_oriented(np.zeros(SHAPE, np.uint8), codes, folder)).geometry


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


@pytest.mark.parametrize("axis", [1, *by_night(0, 2)])
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
            assert as_stored(labels.array, codes).flags.f_contiguous  # as in the file
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
    logits = logits_of(len(regions or values), SIZE)
    inside = np.zeros(SIZE) if regions else np.array(values)[logits.numpy().argmax(0)]
    for region, number in zip(regions, logits.numpy(), strict=False):  # in written order
        inside[number > 0] = region.written
    expected = np.zeros(SHAPE, dtype)
    expected[BOX] = inside
    certain = np.zeros((len(logits), *SHAPE))
    certain[0] = not regions
    probabilities = 1 / (1 + np.exp(-logits.double().numpy())) if regions else softmax(logits)
    certain[:, *BOX] = probabilities
    for axis in range(3):
        labels = LabelVolume(header, BOX, preprocessing, Scratch(tmp_path))
        fill(labels, logits, axis)
        np.testing.assert_array_equal(labels.array, expected)
        assert labels.array.dtype == np.dtype(dtype)
        fill(ProbabilityVolume(tmp_path / "a.npy", header, BOX, preprocessing), logits, axis)
        for found, wanted in zip(np.load(tmp_path / "a.npy"), certain, strict=True):
            np.testing.assert_allclose(found.T, as_stored(wanted, "PSL"), rtol=0, atol=HALF)


def test_certain_logits_are_certain_and_never_nan(tmp_path):
    path, header = tmp_path / "a.npy", header_of("RAS", tmp_path)
    logits = torch.full((3, *SHAPE), -1e30)
    logits[1] = 1e30
    fill(ProbabilityVolume(path, header, whole_box(SHAPE), preprocessing_of()), logits, 0)
    np.testing.assert_array_equal(np.load(path)[1], 1)
    np.testing.assert_array_equal(np.load(path)[[0, 2]], 0)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_error_arrives(number):
    """With one of the next slabs, or at the end."""
    calls = itertools.count()

    def full(array):
        if next(calls) == number:
            raise OSError("the disk is gone")
        return array

    sink = SlabSink(np.zeros(SHAPE), full)

    def add_all():
        for _ in range(SHAPE[0]):
            sink.take(torch.zeros(1, *SHAPE[1:]), 0)
        sink.finish()

    with pytest.raises(OSError, match="the disk is gone"):
        add_all()
