import itertools
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.profiler import ProfilerActivity, profile

from unet3d.preparation import resample
from unet3d.preparation.interpolation import Resampling, line_matrix, resample_classes
from unet3d.preparation.resample import (
    Interpolation,
    median_spacing,
    resampled_shape,
    target_spacing,
    thick_axes,
    visible_shape,
)

RNG = np.random.default_rng(0)
CUBES = (3, 3, 3)


def resample_image(image, shape):
    """Return all planes of the resampled image."""
    resampling = Resampling.of(image.shape, shape, CUBES)
    axis = resampling.best_axis
    along = (slice(None),) * (1 + axis)

    def read(planes):
        return torch.from_numpy(image[(*along, planes)].copy("K"))

    return resampling.planes(read, axis, 0, shape[axis]).numpy()


def test_shapes_follow_the_spacing():
    assert resampled_shape((100, 50, 20), (1, 1, 3), (2, 1, 1)) == (50, 50, 60)
    assert resampled_shape((3, 4, 1), (1, 1, 1), (10, 10, 10)) == (1, 1, 1)
    assert resampled_shape((3, 4, 5), (1, 2, 3), None) == (3, 4, 5)
    # 0.6 / 0.8 is a bit less than 0.75 in floating point; like nnU-Net, the ratio is computed
    # first.
    assert resampled_shape((10, 26, 50), (0.6, 0.6, 0.6), (0.8, 0.8, 0.8)) == (7, 19, 37)
    assert resampled_shape((10, 26, 50), (0.75, 0.75, 0.75), (1, 1, 1)) == (8, 20, 38)


def test_slices_lie_along_one_axis_at_most():
    assert thick_axes((1, 1, 3.1)) == (False, False, True)
    assert thick_axes((5, 1, 1), (1, 1, 3)) == (True, False, False)
    for have_mm, want_mm, axis in (
        ((1, 1, 3), (1, 1, 1), None),
        ((1, 1, 3.1), (1, 1, 1), 2),
        ((1, 1, 1), (4, 1, 1), 0),
        ((1, 5, 1), (4, 1, 1), 1),  # the image's spacing decides
        ((5, 5, 1), (4, 1, 1), None),  # two axes are equally coarse
        ((4, 5, 1), (1, 1, 1), 1),
    ):
        assert Interpolation().slice_axis(have_mm, want_mm) == axis
        assert Interpolation(thick="never").slice_axis(have_mm, want_mm) is None
    always = Interpolation(thick="always")
    assert always.slice_axis((1, 1, 1.1), (5, 1, 1)) == 2
    assert always.slice_axis((1, 1, 1), (5, 1, 1)) is None


def test_long_axes_leave_no_weights_that_slow_everything_down():
    weights = line_matrix(300, 180, 3).abs()
    assert weights[weights > 0].min() > 1e-13
    torch.testing.assert_close(weights.new_ones(180), line_matrix(300, 180, 3).sum(1))


def test_classes_are_the_argmax_of_linear_masks():
    """The argmax of the classes' linear masks, so no class appears between two others."""
    values = [0, 1, 5, 300]
    blurred = [ndimage.gaussian_filter(RNG.normal(size=(16, 20, 12)), 2) for _ in values]
    classes = np.take(values, np.argmax(blurred, 0)).astype(np.uint16)
    for shape in ((23, 30, 14), (9, 8, 7), (40, 8, 24)):
        resampled = resample_classes(classes, shape)
        assert resampled.dtype == np.uint16
        factors = [new / old for new, old in zip(shape, classes.shape, strict=True)]
        zoom = partial(ndimage.zoom, zoom=factors, order=1, mode="nearest", grid_mode=True)
        masks = np.stack([zoom((classes == value).astype(float)) for value in values])
        first, second = np.sort(masks, axis=0)[[-1, -2]]
        clear = first - second > 1e-4  # where two masks are equal, rounding decides
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(resampled[clear], np.take(values, masks.argmax(0))[clear])


@pytest.mark.parametrize(
    ("shape", "channels"), [((40, 50, 60), 1), ((60, 8, 3), 3), ((5, 90, 20), 1)]
)
def test_resampling_takes_about_the_memory_that_is_counted(shape, channels, monkeypatch):
    counted = []
    monkeypatch.setattr(resample, "refuse_beyond_memory", lambda size, *_: counted.append(size))
    x, y, z = (old / new for old, new in zip((30, 20, 10), shape, strict=True))
    assert visible_shape((30, 20, 10), (1, 1, 1), (x, y, z), channels) == shape
    image = RNG.normal(size=(channels, 30, 20, 10)).astype(np.float32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as events:
        tracemalloc.start()
        resample_image(image, shape)
        _, of_numpy = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    of_torch = max(itertools.accumulate(one.self_cpu_memory_usage for one in events.events()))
    assert max(of_numpy, of_torch) < counted[0]


def nnunet_target_spacing(spacings_mm, shapes):
    """nnU-Net's rule, from the supplement of its paper; axes are sorted by spacing."""
    spacings, median_mm = np.array(spacings_mm), np.median(spacings_mm, axis=0)
    order = np.argsort(median_mm, kind="stable")
    sizes = np.median(shapes, axis=0)[order]
    _, fine, coarse = median_mm[order]
    if coarse / fine > 3 and sizes[:2].min() / sizes[2] > 3:
        coarse = max(np.quantile(spacings[:, order[2]], 0.1), fine)
    median_mm[order[2]] = coarse
    return median_mm.tolist()


def test_target_spacings_are_those_of_nnunet():
    rng = np.random.default_rng(1)
    changed = 0
    for _ in range(300):
        number = int(rng.integers(1, 12))
        scale = rng.permutation([1, 1, rng.uniform(1, 8)])
        spacings_mm = (scale * rng.uniform(0.7, 1.3, (number, 3))).tolist()
        shapes = [(200 / scale ** rng.uniform(0, 2)).astype(int).tolist()] * number
        target_mm = target_spacing(spacings_mm, shapes, "median")
        assert target_mm == pytest.approx(nnunet_target_spacing(spacings_mm, shapes), rel=1e-5)
        changed += target_mm != median_spacing(spacings_mm)
    assert 50 < changed < 250
    assert target_spacing(spacings_mm, shapes, "native") is None
    assert target_spacing(spacings_mm, shapes, (1, 2, 3)) == (1, 2, 3)


def test_a_plane_needs_its_neighbourhood_and_not_the_whole_image():
    spline = Resampling.of((1, 500, 8, 8), (1000, 8, 8), CUBES).needed(0, 500, 501)
    assert spline.start < 250 < spline.stop and spline.stop - spline.start < 50
    linear = Resampling.of((1, 500, 8, 8), (1000, 8, 8), (1, 3, 3)).needed(0, 500, 501)
    assert linear.stop - linear.start == 2
    assert Resampling.of((1, 500, 8, 8), (500, 8, 8), CUBES).needed(0, 3, 9) == slice(3, 9)
