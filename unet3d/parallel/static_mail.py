"""Mail of a captured step: every tensor has a fixed place, which the graphs read and write.

Within a GPU a stage reads what another has produced in place. Between GPUs there are buffers:
during capture each message takes one that no message in flight uses; during replay the same
messages take the same buffers.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from unet3d.parallel.mail import Routes
from unet3d.parallel.partition import Stage
from unet3d.parallel.transfer import Buffer

Reader = tuple[Literal["forward", "loss", "backward"], int]
"""The reader of a message: the kind of action, and its stage."""
_Key = tuple[Reader, int, str]
"""The reader, the micro-batch and the name of the tensor."""


def stays(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a reader on a device can read a tensor in place."""
    return tensor.device == device


class StaticMail:
    """Carries the tensors of a step that is captured once and replayed often.

    During capture, tensors and buffers are handed over and nothing is copied. During replay,
    buffers are filled, and return values are not read, because the graphs know the places.
    """

    def __init__(self, routes: Routes) -> None:
        """Begin with no buffers.

        Args:
            routes: The routes between the stages.
        """
        self._routes = routes
        self._images: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self._is_captured = False
        self._places: dict[_Key, list[Buffer]] = defaultdict(list)
        """The buffers of each message, one from each sender."""
        self._handed: dict[_Key, list[Tensor]] = defaultdict(list)
        """During capture: the messages in flight, as tensors on the reader's device or buffers."""
        self._free: dict[tuple[Reader, str], list[Buffer]] = defaultdict(list)
        """During capture: the buffers that no message in flight uses."""
        self._next: dict[_Key, int] = defaultdict(int)
        """During replay: how many senders of a message have sent theirs."""
        self.read: dict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
        """Per device, events after the reads of what its last action has sent."""

    def begin(self, images: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Take the inputs of a step.

        Args:
            images: Image of each micro-batch.
            targets: Target of each micro-batch.
        """
        self._images, self._targets = images, targets

    def end_capture(self) -> None:
        """Fill buffers from now on, and allocate none."""
        self._is_captured = True
        self._handed.clear()
        self._free.clear()

    def inputs(self, stage: Stage, micro_batch: int) -> dict[str, Tensor]:
        """Return the places of a stage's inputs; see :class:`~unet3d.parallel.mail.Mail`."""
        reader: Reader = ("forward", stage.slot.index)
        if "image" in stage.inputs:
            image = self._images[micro_batch]
            self._send(reader, micro_batch, "image", image, stage.slot.device, copies=True)
        return self._take(reader, micro_batch, stage.inputs)

    def logits(self, micro_batch: int) -> dict[str, Tensor]:
        """Return the places of the results; see :class:`~unet3d.parallel.mail.Mail`."""
        return self._take(self._loss_reader, micro_batch, self._routes.results)

    def target(self, micro_batch: int) -> Tensor:
        """Return the place of the target; see :class:`~unet3d.parallel.mail.Mail`."""
        reader, target = self._loss_reader, self._targets[micro_batch]
        self._send(reader, micro_batch, "target", target, self._routes.loss_device, copies=True)
        place = self._take(reader, micro_batch, ("target",))
        return target if self._is_captured else place["target"]

    def gradients(self, stage: Stage, micro_batch: int) -> dict[str, list[Tensor]]:
        """Return the places of the gradients; see :class:`~unet3d.parallel.mail.Mail`."""
        reader: Reader = ("backward", stage.slot.index)
        if self._is_captured:
            self._wait(reader, micro_batch, stage.outputs)
            return {}
        return {name: self._handed.pop((reader, micro_batch, name), []) for name in stage.outputs}

    def send_on(self, stage: Stage, micro_batch: int, name: str, made: Tensor) -> None:
        """Send to every reader; see :class:`~unet3d.parallel.mail.Mail`."""
        for later in self._routes.readers(stage, name):
            reader: Reader = ("forward", later.slot.index)
            self._send(reader, micro_batch, name, made, later.slot.device)
        if name in self._routes.results:
            self._send(self._loss_reader, micro_batch, name, made, self._routes.loss_device)

    def send_back(self, stage: Stage, micro_batch: int, name: str, gradient: Tensor) -> None:
        """Send to the producer; see :class:`~unet3d.parallel.mail.Mail`."""
        maker = self._routes.maker[name].slot
        self._send(("backward", maker.index), micro_batch, name, gradient, maker.device)

    def release(self, stage: Stage, kind: str, micro_batch: int) -> None:
        """Let later messages use the buffers that an action was the last to read.

        Args:
            stage: The stage that has acted.
            kind: What it did.
            micro_batch: The number of the micro-batch.
        """
        index = stage.slot.index
        if kind == "loss":
            self._release(self._loss_reader, micro_batch, ("target", *self._routes.results))
        elif kind == "backward":
            self._release(("forward", index), micro_batch, stage.inputs)
            self._release(("backward", index), micro_batch, stage.outputs)

    @property
    def _loss_reader(self) -> Reader:
        return "loss", self._routes.stages[-1].slot.index

    def _send(
        self,
        reader: Reader,
        micro_batch: int,
        name: str,
        tensor: Tensor,
        device: torch.device,
        *,
        copies: bool = False,
    ) -> None:
        """Hand a tensor over in place, or through a buffer of the reader's device.

        Args:
            reader: What reads it.
            micro_batch: The number of the micro-batch.
            name: Name of the tensor.
            tensor: The tensor; during replay, the place where a graph has written it.
            device: The reader's device.
            copies: Whether it needs a buffer on its own device too, because it is elsewhere in
                every step.
        """
        key: _Key = (reader, micro_batch, name)
        if stays(tensor, device) and not copies:
            if not self._is_captured:
                self._handed[key].append(tensor.detach())
            return
        if self._is_captured:
            places = self._places[key]
            number = self._next[key] % len(places)
            self._next[key] = number + 1
            read = places[number].fill(tensor)
            if read is not None:
                self.read[tensor.device].append(read)
            return
        free = self._free[reader, name]
        buffer = free.pop() if free else Buffer(tensor, device)
        self._places[key].append(buffer)
        self._handed[key].append(buffer.tensor.detach())

    def _take(self, reader: Reader, micro_batch: int, names: Sequence[str]) -> dict[str, Tensor]:
        if self._is_captured:
            self._wait(reader, micro_batch, names)
            return {}
        return {name: self._handed.pop((reader, micro_batch, name))[0] for name in names}

    def _wait(self, reader: Reader, micro_batch: int, names: Sequence[str]) -> None:
        for name in names:
            for buffer in self._places.get((reader, micro_batch, name), ()):
                buffer.wait()

    def _release(self, reader: Reader, micro_batch: int, names: Sequence[str]) -> None:
        for name in names:
            for buffer in self._places.get((reader, micro_batch, name), ()):
                if self._is_captured:
                    buffer.release()
                else:
                    self._free[reader, name].append(buffer)
