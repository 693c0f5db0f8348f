"""Channels-last maps on a CPU: values and gradients of the formula, and what they allocate."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.norm.closed_form import (
    EPS,
    arguments,
    closed_form,
    relative_error,
    value_and_gradients,
)
from unet3d.kernels import instance_norm
from unet3d.kernels.norm import columns
from unet3d.kernels.padding import is_channels_last

LAST = torch.channels_last_3d

# Voxels that divide by many powers of two, by few, and by none; channels that fill rows, or do not.
SHAPES = [(1, 4, 16, 16, 8), (2, 12, 6, 6, 6), (3, 5, 3, 5, 7), (1, 70, 4, 4, 4), (2, 3, 1, 4, 4)]


def last(inputs: list[Tensor]) -> list[Tensor]:
    """Return x and the gradient of the result in channels-last memory."""
    return [value.contiguous(memory_format=LAST) if value.dim() == 5 else value for value in inputs]


# So far from zero, rounding moves a value over LeakyReLU's kink now and then.
@pytest.mark.parametrize(("mean", "slope"), [(0.0, 0.01), (0.0, 1.0), (1e3, 1.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_against_float64(shape: tuple[int, ...], mean: float, slope: float) -> None:
    inputs = last(arguments(shape, mean, torch.float32, "cpu"))
    assert is_channels_last(inputs[0])
    expected = value_and_gradients([value.double() for value in inputs], closed_form, slope)
    actual = value_and_gradients(inputs, instance_norm, slope)
    # With such a mean the values themselves have four digits less.
    tolerance = 2e-6 if mean == 0 else 2e-4
    for name, a, b in zip(("y", "x", "weight", "bias"), actual, expected, strict=True):
        scale = max(b.norm().item(), inputs[3].norm().item()) if b.dim() == 1 else b.norm().item()
        assert (a.double() - b).norm().item() <= tolerance * scale, name
    assert all(actual[index].is_contiguous(memory_format=LAST) for index in (0, 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64_is_the_closed_form(shape: tuple[int, ...]) -> None:
    inputs = last([value.double() for value in arguments(shape, 2.0, torch.float32, "cpu")])
    expected = value_and_gradients(inputs, closed_form, 0.01)
    actual = value_and_gradients(inputs, instance_norm, 0.01)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_bfloat16_is_rounded_a_few_times_only() -> None:
    inputs = last(arguments((2, 8, 12, 12, 12), 1.0, torch.bfloat16, "cpu"))
    expected = value_and_gradients([value.double() for value in inputs], closed_form, 0.01)
    actual = value_and_gradients(inputs, instance_norm, 0.01)
    assert actual[0].dtype == actual[1].dtype == torch.bfloat16
    for name, a, b in zip(("y", "x", "weight", "bias"), actual, expected, strict=True):
        assert relative_error(a, b) <= 4e-3, name


def test_statistics_of_many_voxels_far_from_zero() -> None:
    # In one long float32 sum the mean would be off by more than that.
    x = 1e3 + torch.randn(1, 4, 64, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, rstd = torch.ops.unet3d.column_statistics(x.contiguous(memory_format=LAST), EPS)
    exact = x.double()
    assert (mean - exact.mean((2, 3, 4))).abs().max() <= 1e-4
    deviation = (exact.var((2, 3, 4), correction=0) + EPS).sqrt()
    assert (rstd * deviation - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_the_gradient_that_comes_in_is_not_written_to(slope: float) -> None:
    inputs = last(arguments((2, 4, 4, 4, 4), 0.0, torch.float32, "cpu"))
    before = inputs[3].clone()
    value_and_gradients(inputs, instance_norm, slope)
    assert torch.equal(inputs[3], before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fakes_are_laid_out_as_the_real_ones(dtype: torch.dtype) -> None:
    def properties() -> list[tuple[object, ...]]:
        x = torch.zeros(2, 4, 6, 4, 2, dtype=dtype).contiguous(memory_format=LAST)
        affine = torch.ones(2, 4, dtype=torch.promote_types(dtype, torch.float32))
        made = columns.forward(x, *affine, EPS, 0.01)
        back = columns.backward(torch.ones_like(x), x, *affine, *made[1:], slope=0.01)
        return [(v.shape, v.stride(), v.dtype) for v in (*made, *back)]

    real = properties()
    with FakeTensorMode():
        assert properties() == real


@pytest.mark.parametrize("op", ["column_statistics", "scale_columns"])
def test_operations_are_registered_as_pytorch_wants(op: str) -> None:
    x = arguments((2, 3, 4, 4, 4), 0.0, torch.float32, "cpu")[0].contiguous(memory_format=LAST)
    scale, shift = torch.ones(2, 3), torch.zeros(2, 3)
    given = {
        "column_statistics": (x, EPS),
        "scale_columns": (torch.empty_like(x), x, scale, shift),
    }
    torch.library.opcheck(getattr(torch.ops.unet3d, op).default, given[op])
