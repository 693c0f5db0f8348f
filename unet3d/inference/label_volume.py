"""Results on the grid of a scan: label values, and the probability of each class."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unet3d.images.geometry import Geometry
from unet3d.images.image import Box
from unet3d.images.scratch import Scratch, forget_pages, new_mapped, parts
from unet3d.inputs.ahead import ahead
from unet3d.preparation.transform import Preprocessing, classes_of

MAX_WAITING = 2
"""Most slabs that are being stored at once."""


class SlabSink:
    """Fills an array on the host, slab by slab, while the next windows are computed."""

    def __init__(
        self,
        target: npt.NDArray[Any],
        convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]] = lambda slab: slab,
    ) -> None:
        """Take an array to fill, (..., X, Y, Z), in any memory order; slabs are converted first."""
        self._target = target
        self._convert = convert
        self._done = 0
        self._waiting: deque[Future[None]] = deque()

    def begin(self) -> None:
        """Start over with the first slab."""
        self.finish()
        self._done = 0

    def take(self, slab: Tensor, axis: int) -> None:
        """Store the next planes (..., X, Y, Z) along an axis; they must not change afterwards.

        Also raises the error of an earlier slab.
        """
        dim = slab.ndim - 3 + axis
        planes = slice(self._done, self._done + slab.shape[dim])
        self._done = planes.stop
        target = self._target[(slice(None),) * dim + (planes,)]
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(ahead(lambda: self._store(slab, target)))

    def finish(self) -> None:
        """Wait until all planes are stored."""
        while self._waiting:
            self._waiting.popleft().result()

    def _store(self, slab: Tensor, target: npt.NDArray[Any]) -> None:
        if slab.device.type != "cpu":
            # The GPU brings voxels into the target's memory order, which is slow on a CPU.
            order = sorted(range(slab.ndim), key=lambda dim: -abs(target.strides[dim]))
            back = [order.index(dim) for dim in range(slab.ndim)]
            slab = slab.permute(order).contiguous().cpu().permute(back)
        target[...] = self._convert(slab.numpy())
        forget_pages(target)


class LabelVolume(SlabSink):
    """Label values, in memory or on a disk, in the memory order of the scan's file."""

    def __init__(
        self, geometry: Geometry, box: Box, preprocessing: Preprocessing, scratch: Scratch
    ) -> None:
        """Allocate labels for a scan; only ``box`` is segmented, and the rest is background."""
        self._preprocessing = preprocessing
        values = np.array(preprocessing.label_values)
        values = values.astype(np.min_scalar_type(values.max()))
        what = f"{geometry.path}: its segmentation"
        stored = scratch.empty(geometry.stored_shape, values.dtype, what, order="F")
        self.array: npt.NDArray[Any] = geometry.in_ras(stored)
        """Shape (X, Y, Z)."""
        if self.array[box].shape != geometry.shape:
            for part in parts(stored):
                stored[part] = values[0]
        is_index = bool((values == np.arange(len(values))).all())
        convert = (lambda classes: classes) if is_index else values.__getitem__
        super().__init__(self.array[box], convert)

    def add(self, logits: Tensor, axis: int) -> None:
        """Take the logits (K, X, Y, Z) of the next planes along an axis, on any device."""
        classes = classes_of(logits, self._preprocessing)
        if len(self._preprocessing.label_values) <= 256:
            classes = classes.to(torch.uint8)
        self.take(classes, axis)


class ProbabilityVolume(SlabSink):
    """The probability of each class, or of each region, in a NumPy file.

    The array is float16, (K, ...), with the axes of the scan's file in reverse, the slowest first,
    as in SimpleITK and nnU-Net.
    """

    def __init__(
        self, path: Path, geometry: Geometry, box: Box, preprocessing: Preprocessing
    ) -> None:
        """Make the file for a scan, with all its disk space; only ``box`` is segmented."""
        self._of_regions = bool(preprocessing.regions)
        shape = (preprocessing.num_outputs, *reversed(geometry.stored_shape))
        stored = new_mapped(path, shape, np.dtype(np.float16))
        whole = np.moveaxis(geometry.in_ras(stored.T), -1, 0)  # a view (K, X, Y, Z)
        segmented = whole[:, *box]
        if segmented.shape != whole.shape:
            whole[...] = 0
            if not self._of_regions:
                whole[0] = 1
        super().__init__(segmented)

    def add(self, logits: Tensor, axis: int) -> None:
        """Take the logits (K, X, Y, Z) of the next planes along an axis, on any device."""
        probabilities = logits.sigmoid() if self._of_regions else logits.softmax(0)
        self.take(probabilities.to(torch.float16), axis)
