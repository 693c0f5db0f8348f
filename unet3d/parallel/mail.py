"""Messages between stages within one step: outputs forward, gradients back.

The pipeline puts in the outputs of a stage and takes out the inputs of the next one. Copies between
the devices of two stages run on separate streams.

Between two GPUs a copy overlaps with the work of both. It starts as soon as its tensor exists, but
the reader's stream waits for it only right before the action that reads it. An earlier wait would
also hold up the reader's device in its work on other micro-batches::

    GPU 0 compute   F0 ─┬─ F1 ────┬─ ...
    GPU 0 copy          └─ copy 0 └─ copy 1
    GPU 1 compute                 └─ (wait) F0 ─ B0 ─ (wait) F1 ...

To and from a CPU the same calls are plain copies.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from unet3d.parallel.partition import Stage
from unet3d.parallel.step import MicroBatch

Reader = tuple[int | str, int]
"""The reader of a message: a stage's index, or ``loss``, and the micro-batch."""


class Arriving(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """Return the tensor, for work that is queued from now on the device's current stream."""
        ...


class Mail:
    """Carries the tensors of one step between its stages: each is copied as soon as it exists."""

    def __init__(
        self, stages: Sequence[Stage], results: Sequence[str], batch: Sequence[MicroBatch]
    ) -> None:
        """Begin a step; the loss reads ``results``, by name and in this order."""
        self._stages = stages
        self._results = results
        self._batch = batch
        self._loss_device = stages[-1].slot.device
        self._maker = {block.name: stage.slot for stage in stages for block in stage.blocks}
        self._arriving: dict[tuple[Reader, str], list[Arriving]] = defaultdict(list)

    def inputs(self, stage: Stage, number: int) -> dict[str, Tensor]:
        """Return a stage's inputs by name, on its device; removes the ones sent by other stages."""
        reader = stage.slot.index, number
        return {
            name: self.image(stage, number) if name == "image" else self._take(reader, name)[0]
            for name in stage.inputs
        }

    def image(self, stage: Stage, number: int) -> Tensor:
        """Return the image of a micro-batch on a stage's device."""
        return Transfer(self._batch[number].image, stage.slot.device).wait()

    def target(self, number: int) -> Tensor:
        """Return the target of a micro-batch, on the last stage's device."""
        return self._batch[number].target

    def logits(self, number: int) -> dict[str, Tensor]:
        """Remove and return the network's results by name, on the last stage's device."""
        return {name: self._take(("loss", number), name)[0] for name in self._results}

    def gradients(self, stage: Stage, number: int) -> dict[str, list[Tensor]]:
        """Remove and return the gradients of a stage's outputs by name, on its device."""
        reader = stage.slot.index, number
        return {name: self._take(reader, f"gradient of {name}") for name in stage.outputs}

    def send_on(self, stage: Stage, number: int, name: str, made: Tensor) -> None:
        """Send an output of a stage to its readers: stages or the loss."""
        for later in self._stages[stage.slot.index + 1 :]:
            if name in later.inputs:
                self._put((later.slot.index, number), name, made, later.slot.device)
        if name in self._results:
            self._put(("loss", number), name, made, self._loss_device)

    def send_back(self, stage: Stage, number: int, name: str, gradient: Tensor) -> None:
        """Send the gradient of an input of a stage, or of the loss, to the stage that made it."""
        maker = self._maker[name]
        self._put((maker.index, number), f"gradient of {name}", gradient, maker.device)

    def _put(self, reader: Reader, message: str, tensor: Tensor, device: torch.device) -> None:
        self._arriving[reader, message].append(self._send(reader, message, tensor, device))

    def _take(self, reader: Reader, message: str) -> list[Tensor]:
        """Remove and return the tensors sent to a reader under a name, in order of sending."""
        return [one.wait() for one in self._arriving.pop((reader, message), [])]

    def _send(self, reader: Reader, message: str, tensor: Tensor, device: torch.device) -> Arriving:
        """Send a tensor to its reader."""
        return Transfer(tensor, device)


class Transfer:
    """One tensor on its way to a device."""

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        """Start to copy a tensor, without its graph, unless it is on the device already."""
        self._arrived: torch.cuda.Event | None = None
        source = tensor.detach()
        if source.device == device:
            self._tensor = source
        elif source.device.type == "cuda" and device.type == "cuda":
            self._tensor = self._between_gpus(source, device)
        else:
            self._tensor = source.to(device)

    def wait(self) -> Tensor:
        """Return the tensor, for work that is queued from now on the device's current stream."""
        if self._arrived is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._arrived)
            # The memory belongs to the copy stream, which must not reuse it before it has been
            # read.
            self._tensor.record_stream(stream)
        return self._tensor

    def _between_gpus(self, source: Tensor, device: torch.device) -> Tensor:
        sending, receiving = _copy_streams(source.device, device)
        sending.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(sending), torch.cuda.stream(receiving):
            # PyTorch copies on the source's current stream; the target's current stream waits for
            # it.
            copy = torch.empty_like(source, device=device).copy_(source, non_blocking=True)
            self._arrived = receiving.record_event()
        # The allocator must not hand the source's memory out again before it has been read.
        source.record_stream(sending)
        return copy


class Buffer:
    """Memory at a fixed address, for tensors of one shape that are sent one after another."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        """Allocate the buffer on a device, with the shape, type and strides of ``like``."""
        self.tensor = torch.empty_like(like, device=device)
        self._arrived: torch.cuda.Event | None = None
        self._released: torch.cuda.Event | None = None
        self.release()  # work that used this memory before may still be queued

    def fill(self, source: Tensor) -> torch.cuda.Event | None:
        """Copy the source to the buffer, after the work that is queued now.

        Returns an event that marks the source as read; None if the copy is on the current stream of
        the source's device, so that later work follows it anyway.
        """
        target = self.tensor
        if not (source.is_cuda and target.is_cuda and source.device != target.device):
            target.copy_(source, non_blocking=True)
            return None
        sending, receiving = _copy_streams(source.device, target.device)
        sending.wait_stream(torch.cuda.current_stream(source.device))
        if self._released is not None:
            receiving.wait_event(self._released)
        with torch.cuda.stream(sending), torch.cuda.stream(receiving):
            target.copy_(source, non_blocking=True)
            self._arrived = receiving.record_event()
            read: torch.cuda.Event = sending.record_event()
        source.record_stream(sending)  # a batch may be freed before it has been read
        return read

    def wait(self) -> None:
        """Make the current stream wait for the tensor that was sent."""
        if self._arrived is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self._arrived)
            self._arrived = None

    def release(self) -> None:
        """Let the next copy overwrite the buffer after the currently queued work has read it."""
        if self.tensor.is_cuda:
            stream = torch.cuda.current_stream(self.tensor.device)
            self._released = stream.record_event()


@cache
def _copy_streams(
    source: torch.device, target: torch.device
) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of one direction between two GPUs, one on each.

    Each direction has its own: on shared streams, gradients on their way back would hold up the
    next micro-batch's activations.
    """
    return torch.cuda.Stream(source), torch.cuda.Stream(target)  # type: ignore[no-untyped-call]
