"""Batches made on a GPU, beside the step before.

The copies and the augmentation of a batch run on a separate stream. The step waits for them on the
GPU, not on the host. Two buffers alternate::

    copies, augmentation   A1   B2   A3 ...      A is free again when step 1 has been taken
    steps                       A1   B2   A3 ...

If several GPUs make slabs of a batch, their messages are queued on the stream of the steps:
messages on two streams might run in a different order on each GPU and deadlock. So the augmentation
after the first message runs between two steps.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from unet3d.patches.augment.intensity import Gather
from unet3d.patches.patches import Batch, PackedBatch


class DeviceBatches:
    """Makes batches on one GPU."""

    def __init__(self, device: torch.device, gather: Gather | None = None) -> None:
        """Begin with empty buffers.

        ``gather`` gathers statistics of the slabs of a patch, on the stream that steps are queued
        on; None: batches are whole, or need no statistics.
        """
        self._device = device
        self._gather = gather
        self._stream = _stream(device)
        self._buffers = (_Buffer(), _Buffer())
        self._number = 0

    def made(self, batches: Iterable[PackedBatch]) -> Iterator[Batch]:
        """Yield a batch for each cut batch in page-locked memory.

        Queue all work on a batch before asking for the next one.
        """
        for cut in batches:
            buffer = self._buffers[self._number % 2]
            self._number += 1
            try:
                yield self._made(cut, buffer)
            finally:
                buffer.is_read = torch.cuda.current_stream(self._device).record_event()

    def _made(self, batch: PackedBatch, buffer: "_Buffer") -> Batch:
        steps = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if buffer.is_read is None:  # an earlier run may have used this memory
                self._stream.wait_stream(steps)
            else:
                self._stream.wait_event(buffer.is_read)
            outline = batch.outline
            image = buffer.tensor("image", outline.image, self._device)
            target = buffer.tensor("target", outline.target, self._device)
            made = batch.made(image, target, self._gather and self._between(steps))
            is_made = self._stream.record_event()
        steps.wait_event(is_made)
        return made

    def _between(self, steps: torch.cuda.Stream) -> Gather:
        """Return a function that gathers numbers of the augmentation on the stream of the steps."""

        def gathered(numbers: Tensor) -> Tensor:
            assert self._gather is not None
            steps.wait_stream(self._stream)
            with torch.cuda.stream(steps):
                result = self._gather(numbers)
            # Later work on the stream of the steps waits until the result has been read.
            self._stream.wait_stream(steps)
            return result

        return gathered


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU makes batches.

    There is one for each GPU, because cuBLAS keeps a workspace for each stream that it was ever
    used on.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _Buffer:
    """Memory of one batch; it grows, but never shrinks."""

    def __init__(self) -> None:
        self.is_read: torch.cuda.Event | None = None
        """Completes when the last batch in it has been used."""
        self._memory: dict[str, Tensor] = {}

    def tensor(self, name: str, outline: Tensor, device: torch.device) -> Tensor:
        """Return memory of the shape and type of an outline."""
        size, memory = outline.numel(), self._memory.get(name)
        if memory is None or len(memory) < size or memory.dtype != outline.dtype:
            memory = torch.empty(size, dtype=outline.dtype, device=device)
            self._memory[name] = memory
        return memory[:size].view(outline.shape)
