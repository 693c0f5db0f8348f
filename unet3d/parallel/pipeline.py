"""A network as stages on several devices, with several micro-batches in flight.

A step is launched, or replayed as one CUDA graph per action with copies between the graphs. To
capture a step, its schedule is walked once, which also notes the calls of a replay in order. On the
same GPU, a stage reads the output of another in place. Between GPUs there are buffers: each message
takes a buffer that no message in flight uses, the same buffer in each replay.

A tensor is copied to another GPU while the sender computes its next action. That action must not
reuse the tensor's memory, and the action after it waits until the tensor has been read::

    GPU 0   F0 ──► F1 ──► (F0 has been read) B0 ──► ...
               copy   copy
    GPU 1           └► F0 ...
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from unet3d.memory.meter import Observer
from unet3d.model import BlockNetwork
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.graph import (
    Gradients,
    Graph,
    GraphPool,
    aliased,
    give_cached_memory_back,
    pool_of_kind,
)
from unet3d.parallel.losses import total_of, weighted
from unet3d.parallel.mail import Arriving, Buffer, Mail, Reader, Transfer
from unet3d.parallel.partition import Stage
from unet3d.parallel.stages import PipelineStage, Send, walk
from unet3d.parallel.step import MicroBatch, PlacedBlocks


class CapturedPipeline:
    """A step of one shape that can be replayed."""

    averages = False

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        results: Sequence[str],
        batch: Sequence[MicroBatch],
        observer: Observer,
    ) -> None:
        """Capture the step; nothing is computed, and only the shapes of the batch matter.

        Raises:
            torch.OutOfMemoryError: There is too little memory for the graphs.
        """
        devices = dict.fromkeys(runner.stage.slot.device for runner in stages)
        give_cached_memory_back(devices)
        self._notes = _Notes(devices)
        self.gradients: list[Gradients] = []
        own_stages = [runner.stage for runner in stages]
        mail = _NotedMail(own_stages, results, batch, self._notes)
        with ExitStack() as aliases:
            for runner in stages:
                self.gradients.append(aliases.enter_context(aliased(runner.stage)))
            noted = [_NotedStage(runner, mail, self._notes) for runner in stages]
            walk(noted, mail, batch, observer)
        for actions in self._notes.actions.values():
            actions.sent = ()

    def replay(self, batch: Sequence[MicroBatch]) -> Any:
        """Run the step, write its gradients to :attr:`gradients`, and return its loss."""
        notes = self._notes
        notes.batch[:] = batch
        try:
            for call in notes.calls:
                call()
            return total_of(notes.losses)
        finally:
            notes.batch.clear()
            notes.losses.clear()


class _Actions:
    """The actions of one device, in order; sent tensors must outlive the next action."""

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.sent: Sequence[Tensor] = ()
        """During capture: the tensors that the last action has sent."""
        self._unread: deque[list[torch.cuda.Event]] = deque()
        """During replay: events after the reads of the tensors that the last actions have sent."""

    def replay(self, graph: Graph) -> None:
        """Replay an action once all tensors sent before the previous action have been read."""
        with self.pool.current():
            while len(self._unread) > 1:
                for event in self._unread.popleft():
                    self.pool.wait(event)
            graph.replay()
        self._unread.append([])

    def send(self, place: Tensor, buffer: Buffer) -> None:
        """Copy an output of the last action to a buffer."""
        read = buffer.fill(place)
        if read is not None:
            self._unread[-1].append(read)

    def give(self, loss: Any, losses: list[Any]) -> None:
        """Append a copy of the last action's loss, because the next replay overwrites it."""
        with self.pool.current():
            losses.append(weighted(loss, 1.0))


class _Notes:
    """The calls of a replay, in order."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.actions = {device: _Actions(pool_of_kind(device)) for device in devices}
        self.calls: list[Callable[[], object]] = []
        # Calls refer to these lists, not to the notes: a reference cycle would keep graphs alive.
        self.batch: list[MicroBatch] = []
        """The batch of the current replay."""
        self.losses: list[Any] = []
        """The losses of the current replay."""


class _NotedStage(PipelineStage):
    """A stage whose actions are captured."""

    def __init__(self, launched: PipelineStage, mail: "_NotedMail", notes: _Notes) -> None:
        super().__init__(launched.blocks)
        self._launched = launched
        self._mail = mail
        self._notes = notes
        self._actions = notes.actions[self.stage.slot.device]

    def forward(self, number: int, received: Mapping[str, Tensor], send: Send) -> None:
        with self._capture(send) as keep:
            self._launched.forward(number, received, keep)

    def loss(
        self, number: int, logits: Mapping[str, Tensor], target: Tensor, own: MicroBatch, send: Send
    ) -> Any:
        with self._capture(send, ("loss", number)) as keep:
            loss = self._launched.loss(number, logits, target, own, keep)
        self._notes.calls.append(partial(self._actions.give, loss, self._notes.losses))
        return loss

    def backward(self, number: int, gradients: Mapping[str, Sequence[Tensor]], send: Send) -> None:
        with self._capture(send, (self.stage.slot.index, number)) as keep:
            self._launched.backward(number, gradients, keep)

    def forget(self) -> None:
        self._launched.forget()

    @contextmanager
    def _capture(self, send: Send, last_reader_of: Reader | None = None) -> Iterator[Send]:
        """Capture an action, and then send its outputs."""
        actions, sent = self._actions, list[tuple[str, Tensor]]()
        with actions.pool.current(), actions.pool.capture() as graph:
            yield lambda name, tensor: sent.append((name, tensor))
        actions.sent = [tensor for _, tensor in sent]
        self._notes.calls.append(partial(actions.replay, graph))
        if last_reader_of is not None:
            self._mail.release(last_reader_of)
        for name, tensor in sent:
            send(name, tensor)


class _NotedMail(Mail):
    """Passes tensors in place, or through buffers that a replay fills."""

    def __init__(
        self,
        stages: Sequence[Stage],
        results: Sequence[str],
        batch: Sequence[MicroBatch],
        notes: _Notes,
    ) -> None:
        super().__init__(stages, results, batch)
        self._notes = notes
        self._buffers: dict[Reader, list[tuple[str, Buffer]]] = defaultdict(list)
        """Buffers that a stage or the loss still has to read, by the name of the message."""
        self._free: dict[tuple[int | str, str], list[Buffer]] = defaultdict(list)
        """Buffers that no message in flight uses, by reader and message."""

    def image(self, stage: Stage, number: int) -> Tensor:
        reader, image = (stage.slot.index, number), self._batch[number].image
        return self._read_by(reader, "image", image, stage.slot.device)

    def target(self, number: int) -> Tensor:
        target = self._batch[number].target
        return self._read_by(("loss", number), "target", target, self._loss_device)

    def _read_by(
        self,
        reader: Reader,
        message: Literal["image", "target"],
        like: Tensor,
        device: torch.device,
    ) -> Tensor:
        """Return memory for a part of the batch, which every replay fills."""
        buffer = self._buffer(reader, message, like, device)
        batch, number = self._notes.batch, reader[1]

        def fill() -> None:
            buffer.fill(getattr(batch[number], message))

        self._notes.calls += [fill, buffer.wait]
        return buffer.tensor.detach()

    def release(self, reader: Reader) -> None:
        """Let later messages reuse the buffers whose last reader was this action."""
        for message, buffer in self._buffers.pop(reader, ()):
            self._notes.calls.append(buffer.release)
            self._free[reader[0], message].append(buffer)

    def _send(self, reader: Reader, message: str, tensor: Tensor, device: torch.device) -> Arriving:
        if stays(tensor, device):
            return super()._send(reader, message, tensor, device)
        actions = self._notes.actions[tensor.device]
        buffer = self._buffer(reader, message, tensor, device)
        self._notes.calls.append(partial(actions.send, actions.pool.place_of(tensor), buffer))
        return _Buffered(buffer, self._notes)

    def _buffer(self, reader: Reader, message: str, like: Tensor, device: torch.device) -> Buffer:
        free = self._free[reader[0], message]
        buffer = free.pop() if free else Buffer(like, device)
        self._buffers[reader].append((message, buffer))
        return buffer


def stays(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a device can read a tensor in place."""
    return tensor.device == device


class _Buffered:
    """A tensor that a replay sends through a buffer."""

    def __init__(self, buffer: Buffer, notes: _Notes) -> None:
        self._buffer = buffer
        self._notes = notes

    def wait(self) -> Tensor:
        self._notes.calls.append(self._buffer.wait)
        return self._buffer.tensor.detach()


class Pipeline:
    """The step of a network whose stages have a device each."""

    def __init__(self, module: BlockNetwork, placed: Sequence[PlacedBlocks]) -> None:
        """Take the network and its blocks, divided into stages."""
        self.stages = tuple(blocks.stage for blocks in placed)
        self._runners = [PipelineStage(blocks) for blocks in placed]
        self._results = module.outputs()
        self._gpus = {s.slot.device for s in self.stages if s.slot.device.type == "cuda"}
        self._step_ends: list[torch.cuda.Event] = []
        self._predictions: deque[torch.cuda.Event] = deque()

    def run(
        self,
        batch: Sequence[MicroBatch],
        observer: Observer,
        before_last_backward: Callable[[Stage], None] = lambda stage: None,
    ) -> Any:
        """Add a batch's gradients to the gradients of the parameters; return its weighted loss.

        A tensor that one GPU sends to another is kept until it has been read. Steps that are queued
        ahead would fill memory with such tensors, so the host waits for the step before.
        """
        if len(self._gpus) > 1:
            for event in self._step_ends:
                event.synchronize()
        mail = Mail(self.stages, self._results, batch)
        loss = walk(self._runners, mail, batch, observer, before_last_backward)
        self._step_ends = [torch.cuda.current_stream(g).record_event() for g in self._gpus]
        return loss

    def sums(self, one: MicroBatch) -> Any:
        """Return the sums of a micro-batch's loss, without gradients."""
        made = self._forward(one.image)
        return one.sums([made[name] for name in self._results])

    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return the logits of the full resolution.

        The host does not wait for the result, so the first stage of the next call overlaps with the
        last stage of this call. The number of calls in flight is at most the number of stages, so
        that a fast first stage does not fill the memory of the others.
        """
        result, *coarse = self._results
        logits = self._forward(image, coarse, precision)[result]
        if logits.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._predictions.append(torch.cuda.current_stream(logits.device).record_event())
            if len(self._predictions) > len(self.stages):
                self._predictions.popleft().synchronize()
        return logits

    def capture(
        self, batch: Sequence[MicroBatch], observer: Observer, exchange: NoExchange
    ) -> CapturedPipeline:
        """Capture the step of a batch whose micro-batches have one shape; nothing is computed."""
        return CapturedPipeline(self._runners, self._results, batch, observer)

    def _forward(
        self, image: Tensor, left_out: Sequence[str] = (), precision: str | None = None
    ) -> dict[str, Tensor]:
        """Return the results except for ``left_out``, on the last stage's device."""
        tensors = {"image": image}
        for index, runner in enumerate(self._runners):
            device = runner.stage.slot.device
            received = {
                name: Transfer(tensors[name], device).wait() for name in runner.stage.inputs
            }
            later = {name for after in self.stages[index + 1 :] for name in after.inputs}
            later.update(self._results)
            tensors = {name: value for name, value in tensors.items() if name in later}
            tensors |= runner.blocks.predict(received, left_out, precision)
        device = self.stages[-1].slot.device
        return {
            name: Transfer(tensors[name], device).wait()
            for name in self._results
            if name not in left_out
        }
