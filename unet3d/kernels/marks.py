"""What the operation that made a map tells the one that reads it, beside the values.

A mark is on one tensor: a tensor made from it, even by ``detach``, has none.
"""

from torch import Tensor

_MOMENTS = "_moments"


def mark_moments(x: Tensor, moments: Tensor) -> Tensor:
    """Mark a map with its moments, as a normalisation takes them, and return it."""
    setattr(x, _MOMENTS, moments)
    return x


def moments_of(x: Tensor) -> Tensor | None:
    """Return the moments that a map is marked with."""
    return getattr(x, _MOMENTS, None)
