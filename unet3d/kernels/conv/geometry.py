"""Which planes of its input a convolution reads along X, and which planes it makes.

Planes are counted from the volume's first; those before it and behind the last are zeros. A volume
can be convolved in slabs: each reads its own planes and those beside them that the kernel reaches.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple


class Slab(NamedTuple):
    """The planes that one call reads and makes."""

    x: range
    """Planes of the convolution's input; those outside the volume are zeros."""
    y: range
    """Planes of its result."""
    wanted: range
    """Planes, of the result or the input, that the call is made for; the others are dropped."""
    padding: int
    """Planes of zeros that the call itself puts before and behind the input's."""


class Axis(NamedTuple):
    """A convolution along one axis."""

    size: int
    """Planes of the input."""
    kernel: int
    """Planes of the kernel."""
    stride: int
    """Planes of the input from one plane of the result to the next."""
    before: int
    """Planes of zeros before the first."""
    after: int
    """Planes of zeros behind the last."""

    @property
    def result(self) -> int:
        """Number of planes of the result."""
        return (self.size + self.before + self.after - self.kernel) // self.stride + 1

    @property
    def symmetric(self) -> int | None:
        """The padding that gives the same result on both sides, or None where none does."""
        both = self._replace(after=self.before)
        return self.before if both.result == self.result else None

    def read_by(self, planes: range) -> range:
        """Return the planes of the input that planes of the result read, zeros included."""
        start = planes.start * self.stride - self.before
        return range(start, (planes.stop - 1) * self.stride - self.before + self.kernel)

    def readers_of(self, planes: range) -> range:
        """Return the planes of the result that read any of some planes of the input."""
        start = -((self.kernel - 1 - self.before - planes.start) // self.stride)
        stop = (planes.stop - 1 + self.before) // self.stride + 1
        return range(max(0, start), min(self.result, stop))

    def inside(self) -> range:
        """Return the planes of the result that read no zeros."""
        first = min(-(-self.before // self.stride), self.result)
        last = (self.size + self.before - self.kernel) // self.stride + 1
        return range(first, max(first, min(last, self.result)))

    def exact(self, first: int, stop: int) -> Slab:
        """Return the slab of some planes of the result and exactly those that they read."""
        planes = range(first, stop)
        return Slab(self.read_by(planes), planes, planes, 0)

    def for_result(self, first: int, stop: int) -> Slab:
        """Return a slab that computes some planes of the result, without a copy where it can."""
        padding = self.symmetric
        if padding is None:
            return self.exact(first, stop)
        # Every call is padded as the volume is. At a slab's ends that is wrong where the volume
        # goes on: the slab starts so early that what is wrong there is not wanted.
        start = max(0, first - -(-padding // self.stride))
        end = min(self.size, (stop - 1) * self.stride - padding + self.kernel)
        x = range(start * self.stride, end)
        made = (len(x) + 2 * padding - self.kernel) // self.stride + 1
        return Slab(x, range(start, start + made), range(first, stop), padding)

    def for_gradient(self, first: int, stop: int) -> Slab:
        """Return a slab that computes the gradient of some planes of the input."""
        padding = self.symmetric
        if padding is None:  # zeros are planes of the input like any other
            full = Axis(self.size + self.before + self.after, self.kernel, self.stride, 0, 0)
            x, y, _, _ = full.for_gradient(first + self.before, stop + self.before)
            x = range(x.start - self.before, x.stop - self.before)
            return Slab(x, y, range(first, stop), 0)
        start = min(self.readers_of(range(first, stop)).start, first // self.stride)
        start = min(start, self.result - 1)
        end = min(self.result, (stop - 1 + padding) // self.stride + 1)
        # The most planes of which a convolution makes as many as are given.
        most = (end - start) * self.stride + self.kernel - 2 * padding - 1
        x = range(start * self.stride, min(start * self.stride + most, self.size))
        return Slab(x, range(start, end), range(first, stop), padding)


def divide(
    slab: Callable[[int, int], Slab], planes: range, fits: Callable[[Slab], bool]
) -> list[Slab]:
    """Return the fewest equal slabs of some planes that are small enough, or one for each plane."""
    slabs: list[Slab] = []
    for num_slabs in range(1, len(planes) + 1):
        bounds = [planes.start + i * len(planes) // num_slabs for i in range(num_slabs + 1)]
        slabs = [slab(start, stop) for start, stop in itertools.pairwise(bounds)]
        if all(fits(one) for one in slabs):
            break
    return slabs
