"""The normalisation as a formula, and arguments for it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.kernels.comparison import results

EPS = 1e-5


def closed_form(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    space = (2, 3, 4)
    mean = x.mean(space, keepdim=True)
    variance = ((x - mean) ** 2).mean(space, keepdim=True)
    shape = (1, -1, 1, 1, 1)
    y = (x - mean) / torch.sqrt(variance + eps) * weight.view(shape) + bias.view(shape)
    return torch.where(y > 0, y, slope * y)


def arguments(
    shape: tuple[int, ...],
    mean: float = 2.0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """Return x, weight, bias and the gradient of the result; the affine ones are never rounded."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    weight, bias = torch.randn(2, shape[1], generator=generator)
    gradient = torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.float64:
        weight, bias = weight.double(), bias.double()
    x, gradient = (value.contiguous(memory_format=layout) for value in (x, gradient))
    return [value.to(device) for value in (x, weight, bias, gradient)]


def value_and_gradients(
    inputs: Sequence[Tensor], function: Callable[..., Tensor], slope: float
) -> list[Tensor]:
    *values, dy = inputs
    return results(lambda *given: function(*given, EPS, slope), values, dy)


def in_float64(inputs: Sequence[Tensor], slope: float) -> list[Tensor]:
    """Return the values and gradients of the formula, on the CPU."""
    return value_and_gradients([value.cpu().double() for value in inputs], closed_form, slope)


def assert_as_in_float64(
    actual: Sequence[Tensor], expected: Sequence[Tensor], dy: Tensor, tolerance: float
) -> None:
    """Compare by norms, but gradients of weight and bias, sums that may cancel, by their terms."""
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        scale = max(b.norm().item(), dy.float().norm().item() if b.dim() == 1 else 0)
        assert (a.detach().cpu().double() - b).norm().item() <= tolerance * scale, number
