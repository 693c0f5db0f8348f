"""The normalisation as a formula, and arguments for it."""

import torch

from tests.kernels.comparison import results
from unet3d.kernels import instance_norm

EPS = 1e-5


def closed_form(x, weight, bias, eps, slope):
    space = (2, 3, 4)
    mean = x.mean(space, keepdim=True)
    variance = ((x - mean) ** 2).mean(space, keepdim=True)
    shape = (1, -1, 1, 1, 1)
    y = (x - mean) / torch.sqrt(variance + eps) * weight.view(shape) + bias.view(shape)
    return torch.where(y > 0, y, slope * y)


def arguments(shape, mean=2.0, dtype=torch.float64, device="cpu", layout=torch.contiguous_format):
    """Return x, weight, bias and the result's gradient; weight and bias are never rounded."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + mean).to(dtype)
    weight, bias = torch.randn(2, shape[1], generator=generator)
    gradient = torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.float64:
        weight, bias = weight.double(), bias.double()
    x, gradient = (value.contiguous(memory_format=layout) for value in (x, gradient))
    return [value.to(device) for value in (x, weight, bias, gradient)]


def normed(inputs, slope, function=instance_norm):
    """Return the value and the gradients of a normalisation."""
    *values, dy = inputs
    return results(lambda *given: function(*given, EPS, slope), values, dy)


def in_float64(inputs, slope):
    """Return value and gradients of the formula in float64, on the CPU."""
    return normed([value.cpu().double() for value in inputs], slope, closed_form)


def compare(actual, expected, dy, tolerance):
    """Compare by norms; gradients of weight and bias, whose sums may cancel, by their terms."""
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        scale = max(b.norm().item(), dy.float().norm().item() if b.dim() == 1 else 0)
        assert (a.detach().cpu().double() - b).norm().item() <= tolerance * scale, number


def called(function, *args, **named):
    """Check that an operation is registered as PyTorch requires, and return its result."""
    # Without symbolic sizes: the division of a map among programs is cached by its size.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(function, args, named, test_utils=checks)
    return function(*args, **named)
