"""Volumes as they are embedded in a page, against loops and nibabel."""

import base64
import gzip
import itertools
import math

import nibabel as nib
import numpy as np
import pytest
from nibabel.affines import apply_affine

from unet3d.reports.pages import reduced
from unet3d.reports.pages.reduced import (
    greys_of,
    means,
    middles,
    numbered,
    reduced_affine,
    steps_for,
)

AFFINE = np.array([[-0.7, 0.1, 0, 30], [0.1, 0.8, 0.2, -20], [0, 0.1, 2.5, 5], [0, 0, 0, 1.0]])


def file_of(text):
    return nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text, validate=True)))


def blocks(shape, steps):
    """Return the voxels of each block, by the block's index."""
    found = {}
    for voxel in itertools.product(*map(range, shape)):
        block = tuple(one // step for one, step in zip(voxel, steps, strict=True))
        found.setdefault(block, []).append(voxel)
    return found


@pytest.mark.parametrize("steps", [(2, 3, 1), (4, 1, 5)])
def test_blocks_become_their_mean_and_their_middle(steps):
    rng = np.random.default_rng(0)
    shape = (8, 7, 6)  # the last blocks along 7 and 6 are smaller
    image = rng.normal(100, 20, shape).astype(np.float32)
    labels = rng.integers(0, 9, shape).astype(np.uint8)
    mean, middle = means(image, steps), middles(labels, steps)
    whole = blocks(shape, steps)
    assert mean.shape == middle.shape == tuple(np.max(list(whole), axis=0) + 1)
    assert mean.dtype == np.float32 and middle.dtype == np.uint8
    affine = reduced_affine(AFFINE, steps)
    for block, voxels in whole.items():
        assert mean[block] == pytest.approx(np.mean([image[v] for v in voxels]), rel=1e-5)
        ends = zip(block, steps, shape, strict=True)
        assert middle[block] == labels[tuple(min(b * s + s // 2, n - 1) for b, s, n in ends)]
        if len(voxels) == math.prod(steps):
            centre = np.mean(apply_affine(AFFINE, voxels), axis=0)
            assert np.allclose(apply_affine(affine, block), centre)


def test_the_finest_axes_are_reduced_first():
    for shape, spacing_mm, steps in (
        ((256, 256, 180), (1, 1, 1), (1, 1, 1)),
        ((512, 512, 100), (0.7, 0.7, 5), (2, 2, 1)),
        ((512, 512, 512), (1, 1, 1), (3, 2, 2)),
        ((3000, 4, 4), (1, 1, 1), (3, 1, 1)),
        ((2000, 2000, 1), (1, 1, 1), (2, 2, 1)),
    ):
        assert steps_for(shape, spacing_mm) == steps
    for shape in ((700, 600, 900), (10**6, 50, 2), (5000, 5000, 5000)):
        sizes = [-(-n // step) for n, step in zip(shape, steps_for(shape, (1, 2, 3)), strict=True)]
        assert reduced.MAX_VOXELS / 3 < math.prod(sizes) <= reduced.MAX_VOXELS == 12_000_000 or (
            max(sizes) > reduced.MAX_SIDE / 2
        )
        assert max(sizes) <= reduced.MAX_SIDE


def test_an_image_keeps_its_intensities_to_a_grey_level():
    rng = np.random.default_rng(1)
    image = rng.uniform(-1000, 1500, (20, 18, 16)).astype(np.float32)
    image[3, 4, 5] = 1e6  # an outlier would use the whole range of levels
    greys = greys_of(image, AFFINE)
    file = file_of(greys.nifti)
    assert file.get_data_dtype() == np.uint8 and file.shape == image.shape
    assert np.allclose(file.affine, AFFINE, atol=1e-5)
    assert np.allclose(file.header.get_zooms(), np.linalg.norm(AFFINE[:3, :3], axis=0))
    inside = (image >= greys.lowest) & (image <= greys.highest)
    assert inside.mean() > 0.99 and greys.highest < 2000
    level = (greys.highest - greys.lowest) / 255
    assert np.abs(file.get_fdata() - image)[inside].max() < 0.51 * level
    assert greys.lowest < greys.black < greys.white < greys.highest
    assert (greys.black, greys.white) == pytest.approx((-975, 1475), abs=25)


def test_a_few_bright_voxels_in_nothing_are_seen():
    image = np.zeros((50, 50, 50), np.float32)
    image[:4, :4, :4] = 5  # less than 0.1 % of the voxels
    greys = greys_of(image, np.eye(4))
    assert np.allclose(file_of(greys.nifti).get_fdata(), image) and greys.white == 5
    for value in (0.0, -7.5, 1e30):  # a single value
        same = greys_of(np.full((4, 4, 4), value, np.float32), np.eye(4))
        assert np.allclose(file_of(same.nifti).get_fdata(), value)


def test_gaps_in_an_image_are_black():
    image = np.random.default_rng(1).uniform(0, 255, (8, 8, 8)).astype(np.float32)
    image[0], image[1, 0, 0] = np.nan, np.inf
    shown = file_of(greys_of(image, np.eye(4)).nifti).get_fdata()
    assert (shown[0] < 1).all() and np.abs(shown[2:] - image[2:]).max() < 1


@pytest.mark.parametrize("kind", [np.uint8, np.uint64])
def test_labels_are_numbered_in_the_order_of_their_values(kind):
    top = int(np.iinfo(kind).max)
    labels = np.array([0, 3, 7, top, 5, 3], kind).reshape(2, 3, 1)
    file = file_of(numbered(labels, [3, 7, top], AFFINE))
    assert np.asarray(file.dataobj).ravel().tolist() == [0, 1, 2, 3, 0, 1]
    assert np.allclose(file.affine, AFFINE, atol=1e-5)
    many = np.arange(1000, dtype=np.uint16).reshape(10, 10, 10)
    file = file_of(numbered(many, list(range(1, 1000)), np.eye(4)))
    assert np.array_equal(np.asarray(file.dataobj), many)
