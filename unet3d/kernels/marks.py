"""What the operation that made a map tells the one that reads it, beside the values.

A mark is on one tensor: a tensor made from it, even by ``detach``, has none. Moments and sums are
forgotten where the values are changed in place: a hook may do it, and so does autograd where it
adds up gradients.
"""

from typing import NamedTuple

from torch import Tensor

from unet3d.torch_private import version

_MOMENTS, _DEFERRED, _SUMS = "_moments", "_deferred", "_sums"


class Deferred(NamedTuple):
    """A normalisation with LeakyReLU that is left to the reader of a map."""

    affine: tuple[Tensor, Tensor, Tensor, Tensor]
    """What the stages of a normalisation take: weight, bias, mean and 1 / deviation."""
    slope: float
    """Of LeakyReLU."""


def mark_moments(x: Tensor, moments: Tensor) -> Tensor:
    """Mark a map with its moments, as a normalisation takes them, and return it."""
    setattr(x, _MOMENTS, (moments, version(x)))
    return x


def take_moments(x: Tensor) -> Tensor | None:
    """Return the moments that a map is marked with, and let them go before backward lets it."""
    moments = _told(x, _MOMENTS)
    if hasattr(x, _MOMENTS):
        delattr(x, _MOMENTS)
    return moments


def mark_deferred(x: Tensor, deferred: Deferred) -> Tensor:
    """Mark a map whose only reader normalises what it loads, and return it.

    To autograd it is the normalised map: the reader returns the gradient of that.
    """
    setattr(x, _DEFERRED, deferred)
    return x


def deferred_of(x: Tensor) -> Deferred | None:
    """Return what a map's reader has to do with its values first."""
    return getattr(x, _DEFERRED, None)


def mark_sums(gradient: Tensor, sums: Tensor) -> Tensor:
    """Mark the gradient of a normalised map with its sums, as a normalisation takes them."""
    setattr(gradient, _SUMS, (sums, version(gradient)))
    return gradient


def sums_of(gradient: Tensor) -> Tensor | None:
    """Return the sums that a gradient is marked with."""
    return _told(gradient, _SUMS)


def _told(x: Tensor, mark: str) -> Tensor | None:
    """Return what a mark says of the values of a tensor, unless they have changed since."""
    numbers, marked_at = getattr(x, mark, (None, None))
    return numbers if marked_at == version(x) else None
