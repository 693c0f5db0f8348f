"""Scans for which a network was probably not trained: segmented, with a warning."""

import numpy as np
import pytest

from tests.images.samples import noise
from tests.networks import place, random_checkpoint
from unet3d.images.image import image_of
from unet3d.images.nifti import open_array


def warnings_for(array, caplog, spacing_mm=1.0, target_mm=None, **network):
    predictor = place(random_checkpoint(spacing_mm=target_mm, **network))
    caplog.clear()
    image = image_of([open_array(array, np.diag([spacing_mm] * 3 + [1]))])
    assert predictor.segment(image).shape == array.shape
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


def test_a_scan_that_is_like_those_of_the_training_needs_no_word(caplog):
    for shape in ((20, 18, 16), (16, 16, 16), (12, 8, 10)):
        assert warnings_for(noise(shape), caplog) == []
    whole = np.arange(4000).reshape(20, 20, 10) % 40
    assert warnings_for(whole, caplog) == []
    assert warnings_for((whole % 3).astype(np.float32) / 2, caplog) == []
    assert warnings_for(noise((3, 4, 5)), caplog, patch_size=None) == []


@pytest.mark.parametrize(
    ("array", "spacing_mm", "words"),
    [
        (noise((30, 1, 20)), 1.0, "the image is a single slice"),
        (noise((7, 6, 5)), 1.0, "the image has 7x6x5 voxels at the spacing of the network, far"),
        (noise((70, 60, 50)), 0.1, "the image has 7x6x5 voxels at the spacing of the network, "),
        (np.arange(6000).reshape(20, 20, 15) % 3, 1.0, "holds the whole numbers 0, 1, 2 only, as"),
        (np.full((16, 16, 16), 7.0), 1.0, "the image holds the whole numbers 7 only"),
    ],
    ids=["slice", "small", "unit", "labels", "constant"],
)
def test_a_scan_that_is_not_is_pointed_out(array, spacing_mm, words, caplog):
    (warning,) = warnings_for(array, caplog, spacing_mm, target_mm=(1.0,) * 3)
    assert words in warning
