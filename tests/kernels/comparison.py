"""Feature maps, and the comparison of an operation on them with what it must be."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.kernels.pad import padded_copy
from unet3d.kernels.padding import detached, mark_padded

Size = tuple[int, int, int]

LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]
SIDES = [(1, 0), (0, 1), (0, 0), (1, 1), (2, 0), (2, 1)]
"""Planes of zeros before and behind X."""


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return noise in float64; a map, of five axes, with its channels last in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return channels_last(x) if len(shape) == 5 else x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def padded(x: Tensor) -> Tensor:
    """Return a copy of a map that is stored with zeros around Z."""
    return mark_padded(padded_copy(x))


def results(
    function: Callable[..., Tensor], values: Sequence[Tensor], dy: Tensor | None = None
) -> list[Tensor]:
    """Return the value of a function, and its gradients by all of its arguments.

    Args:
        function: It must not write to its arguments.
        values: Its arguments; zeros around a map are marked in what the function gets, too.
        dy: The gradient of the value; None: noise.
    """
    leaves = [detached(value).requires_grad_() for value in values]
    y = function(*leaves)
    dy = tensor(*y.shape, seed=9).to(y) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_same(
    actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-11
) -> None:
    """Compare a value and its gradients, all in float64, number by number."""
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=number: f"{_name(n)}: {m}"
        )


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Compare a value and its gradients with the same in float64, by the norms of differences.

    Args:
        actual: Of any precision, on any device.
        expected: In float64.
        tolerance: Largest norm of a difference, as a share of the norm of what is expected.
    """
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        error = (a.detach().cpu().double() - b.detach().cpu()).norm() / b.detach().norm().cpu()
        assert error <= tolerance, f"{_name(number)}: {error:.1e}"


def _name(number: int) -> str:
    return f"gradient {number}" if number else "value"
