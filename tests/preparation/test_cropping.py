import numpy as np
import pytest
from scipy import ndimage

from tests.images.samples import held_image
from unet3d.preparation.cropping import Box, inside_mask, nonzero_box, takes_much, whole_box

RNG = np.random.default_rng(0)


def test_the_box_holds_all_that_is_not_zero_and_no_plane_more():
    for _ in range(50):
        size = RNG.integers(1, 9, 3)
        image = np.zeros((2, *size), np.float32)
        for channel in range(2):
            for place in RNG.integers(0, size, (RNG.integers(1, 4), 3)):
                image[(channel, *place)] = RNG.choice([-1.0, 1e-30, 7.0])
        places = np.argwhere(image)[:, 1:]
        box = nonzero_box(held_image(image))
        assert box.start == tuple(places.min(0))
        assert box.stop == tuple(places.max(0) + 1)
        assert box.shape == image[0][box.slices].shape
    whole = whole_box((3, 4, 5))
    assert whole.slices == (slice(0, 3), slice(0, 4), slice(0, 5))
    assert nonzero_box(held_image(np.zeros((1, 3, 4, 5), np.float32))) == whole


def test_a_box_is_cut_out_of_another():
    outer, inner = Box.between((1, 2, 3), (9, 9, 9)), Box.between([2, 2, 8], [3, 9, 9])
    assert (inner.shape, inner.is_empty) == ((1, 7, 1), False)
    array = np.arange(1000).reshape(10, 10, 10)
    np.testing.assert_array_equal(array[outer.slices][inner.inside(outer)], array[inner.slices])
    assert Box(start=(1, 1, 1), stop=(2, 1, 3)).is_empty


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_what_is_enclosed_is_inside(share):
    image = np.zeros((2, 12, 11, 13), np.float32)
    image[:, 2:10, 3:9, 1:12] = RNG.random((2, 8, 6, 11)) < share
    numbered, _ = ndimage.label(np.pad(~image.any(axis=0), 1, constant_values=True))
    expected = (numbered != numbered[0, 0, 0])[1:-1, 1:-1, 1:-1]
    assert expected.sum() > image.any(axis=0).sum()  # there are holes
    np.testing.assert_array_equal(inside_mask(held_image(image)), expected)
    box = nonzero_box(held_image(image)).slices
    np.testing.assert_array_equal(inside_mask(held_image(image).cut(box)), expected[box])


def test_a_quarter_of_the_median_case_is_much():
    whole = [(10, 10, 10)] * 3
    assert takes_much(whole, [(10, 10, 10), (10, 10, 7), (10, 5, 5)])
    assert takes_much([(10, 10, 8)] * 3, [(10, 10, 6)] * 3)
    assert not takes_much(whole, [(10, 10, 10), (10, 10, 8), (1, 1, 1)])
