"""The order of axes: nnU-Net's networks take (Z, Y, X) of a file, transposed; ours (X, Y, Z)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Which axis of nnU-Net's network each axis of a file is, the fastest in the file first."""

    order: tuple[int, int, int]

    @classmethod
    def of(cls, transpose_forward: Sequence[int]) -> "Axes":
        """Return the order of a plan: which axis of the array (Z, Y, X) each of its own is."""
        x, y, z = (list(transpose_forward).index(2 - axis) for axis in range(3))
        return cls(order=(x, y, z))

    def from_network(self, values: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return what is said of the network's axes in the order of the file's."""
        x, y, z = (values[axis] for axis in self.order)
        return (x, y, z)

    def to_network(self, values: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return what is said of a file's axes in the order of the network's."""
        return self.inverse.from_network(values)

    @property
    def inverse(self) -> "Axes":
        """Which axis of a file each axis of the network is."""
        x, y, z = (self.order.index(axis) for axis in range(3))
        return Axes(order=(x, y, z))

    def kernel(self, weight: Tensor) -> Tensor:
        """Return a kernel, shape (O, I, ...), with its axes in the order of the file's."""
        return weight.permute(0, 1, *(2 + axis for axis in self.order))
