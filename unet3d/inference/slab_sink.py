"""Slabs on their way from the devices to the host, while the next windows are computed."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt
from torch import Tensor

from unet3d.images.scratch import forget_pages
from unet3d.inputs.ahead import ahead

MAX_WAITING = 2
"""Slabs that are on their way."""


def _unchanged(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array


class SlabSink:
    """Fills an array on the host, slab by slab."""

    def __init__(
        self,
        target: npt.NDArray[Any],
        convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = _unchanged,
    ) -> None:
        """Take the array."""
        self._target = target
        self._convert = convert
        self._done = 0
        self._waiting: deque[Future[None]] = deque()

    def begin(self) -> None:
        """Begin anew, with the first slab."""
        self.finish()
        self._done = 0

    def take(self, slab: Tensor, axis: int) -> None:
        """Take the next planes."""
        dim = slab.ndim - 3 + axis
        planes = slice(self._done, self._done + slab.shape[dim])
        self._done = planes.stop
        target = self._target[(slice(None),) * dim + (planes,)]
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(ahead(lambda: self._store(slab, target)))

    def finish(self) -> None:
        """Wait until all planes are there."""
        while self._waiting:
            self._waiting.popleft().result()

    def _store(self, slab: Tensor, target: npt.NDArray[Any]) -> None:
        if slab.device.type != "cpu":
            # The GPU brings the voxels into the order of the target, which a CPU does slowly.
            order = sorted(range(slab.ndim), key=lambda dim: -abs(target.strides[dim]))
            back = [order.index(dim) for dim in range(slab.ndim)]
            slab = slab.permute(order).contiguous().cpu().permute(back)
        target[...] = self._convert(slab.numpy())
        forget_pages(target)
