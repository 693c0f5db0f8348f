"""Channels-last maps on a CPU, against the formula, and the memory that they allocate."""

import pytest
import torch

from tests.kernels.comparison import assert_near, assert_same, channels_last
from tests.kernels.norm.closed_form import EPS, arguments, compare, in_float64, normed
from unet3d.kernels.maps import is_channels_last
from unet3d.kernels.norm import columns

LAST = torch.channels_last_3d

# Numbers of voxels that can be halved often, seldom or never; channels that fill rows or not.
SHAPES = [(1, 4, 16, 16, 8), (2, 12, 6, 6, 6), (3, 5, 3, 5, 7), (1, 70, 4, 4, 4), (2, 3, 1, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_and_float64_against_the_closed_form(shape):
    # Far from zero, rounding may change a value's sign before LeakyReLU, and values have four
    # digits less.
    for mean, slope, tolerance in [(0.0, 0.01, 2e-6), (0.0, 1.0, 2e-6), (1e3, 1.0, 2e-4)]:
        inputs = arguments(shape, mean, torch.float32, layout=LAST)
        assert is_channels_last(inputs[0])
        before = inputs[3].clone()
        actual = normed(inputs, slope)
        compare(actual, in_float64(inputs, slope), inputs[3], tolerance)
        assert all(actual[index].is_contiguous(memory_format=LAST) for index in (0, 1))
        assert torch.equal(inputs[3], before)  # the incoming gradient is not overwritten
        inputs = arguments(shape, layout=LAST)
        assert_same(normed(inputs, slope), in_float64(inputs, slope), 1e-10)


def test_bfloat16_is_rounded_a_few_times_only():
    inputs = arguments((2, 8, 12, 12, 12), 1.0, torch.bfloat16, layout=LAST)
    actual = normed(inputs, 0.01)
    assert actual[0].dtype == actual[1].dtype == torch.bfloat16
    assert_near(actual, in_float64(inputs, 0.01), 4e-3)


def test_statistics_of_many_voxels_far_from_zero():
    # A single long float32 sum would have a larger error of the mean.
    x = 1e3 + torch.randn(1, 4, 64, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, rstd = torch.ops.unet3d.column_statistics(channels_last(x), EPS)
    exact = x.double()
    assert (mean - exact.mean((2, 3, 4))).abs().max() <= 1e-4
    deviation = (exact.var((2, 3, 4), correction=0) + EPS).sqrt()
    assert (rstd * deviation - 1).abs().max() <= 1e-5


def test_operations_are_registered_as_pytorch_wants():
    x, *affine, dy = arguments((2, 3, 4, 4, 4), 0.0, torch.float32, layout=LAST)
    mean, rstd = torch.ops.unet3d.column_statistics(x, EPS)
    operations = torch.ops.unet3d
    torch.library.opcheck(operations.column_statistics.default, (x, EPS))
    torch.library.opcheck(operations.scale_columns.default, (x, rstd, mean, 0.01))
    given = (dy, x, *affine, mean, rstd, 0.01)
    torch.library.opcheck(operations.column_gradients.default, given)


@pytest.mark.parametrize("slope", [0.01, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parts_of_a_map_are_the_whole(dtype, slope, monkeypatch):
    """Each sample is 432 rows, which are divided by 16: as if a cache were small."""
    inputs = arguments((2, 5, 12, 12, 6), 0.5, dtype, layout=LAST)
    monkeypatch.setattr(columns, "MAX_COLUMNS", 12)
    whole = normed(inputs, slope)
    monkeypatch.setattr(columns, "PART_ELEMENTS", 2 * 5 * 27)
    tolerance = {torch.bfloat16: 4e-3, torch.float32: 2e-6, torch.float64: 1e-10}[dtype]
    assert_near(normed(inputs, slope), in_float64(inputs, slope), tolerance)
    assert_near(whole, in_float64(inputs, slope), tolerance)
