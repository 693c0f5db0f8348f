"""Blocks of a large volume: their labels are those of the whole, wherever its blocks end."""

import itertools
import threading

import numpy as np
import pytest

from tests.images.samples import write_volume
from tests.networks import place, random_checkpoint
from tests.products import by_night
from unet3d.config import InferenceSettings
from unet3d.images.image import open_image
from unet3d.preparation.prepared_image import PreparedImage

SHAPE = (40, 29, 33)


def boxes_of(shape, side):
    starts = itertools.product(*(range(0, n, s) for n, s in zip(shape, side, strict=True)))
    return [
        tuple(slice(a, min(a + s, n)) for a, s, n in zip(start, side, shape, strict=True))
        for start in starts
    ]


@pytest.fixture(scope="module")
def scan(tmp_path_factory):
    array = np.random.default_rng(3).standard_normal(SHAPE).astype(np.float32)
    array = np.cumsum(array, axis=1) / 10
    return open_image([write_volume(tmp_path_factory.mktemp("scan") / "scan.nii", array)])


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({}, (40, 13, 21)),
        ({"overlap": 0.3}, (7, 29, 33)),
        *by_night(({}, (16, 16, 16)), ({"batch_size": 1}, (40, 13, 21))),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_labels_do_not_depend_on_the_blocks(scan, settings, side, device):
    inference = InferenceSettings(window=(16, 16, 16), **settings)
    predictor = place(random_checkpoint(), device, inference=inference)
    found = predictor.prepared(scan)
    whole = predictor.begin_block(found, tuple(slice(0, n) for n in SHAPE))()
    assert min(np.bincount(whole.ravel(), minlength=3)) > 1000
    for box in boxes_of(SHAPE, side):
        np.testing.assert_array_equal(predictor.begin_block(found, box)(), whole[box])


def test_a_block_is_read_before_it_is_segmented(scan, monkeypatch):
    reads = threading.Event()
    planes = PreparedImage.planes

    def watched(self, *place):
        reads.set()
        return planes(self, *place)

    monkeypatch.setattr(PreparedImage, "planes", watched)
    predictor = place(random_checkpoint(), inference=InferenceSettings(window=(16, 16, 16)))
    segment = predictor.begin_block(predictor.prepared(scan), (slice(0, 16),) * 3)
    assert reads.wait(10)
    assert segment().shape == (16, 16, 16)
