"""What stages send to each other within one step: outputs forward, gradients back.

The pipeline puts in what a stage produces and takes out what the next one reads. Copies between
devices start as soon as their tensor exists; see :mod:`unet3d.parallel.transfer`.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from unet3d.parallel.partition import Stage
from unet3d.parallel.step import MicroBatch
from unet3d.parallel.transfer import Transfer

Reader = tuple[int | str, int]
"""What reads a message: a stage's index, or ``loss``, and the micro-batch."""


class Arriving(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """Return it; work queued from now on its device's current stream sees it."""
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
        self._onward: dict[tuple[int, int, str], Arriving] = {}
        self._logits: dict[int, dict[str, Arriving]] = defaultdict(dict)
        self._back: dict[tuple[int, str], list[Arriving]] = defaultdict(list)

    def inputs(self, stage: Stage, number: int) -> dict[str, Tensor]:
        """Return a stage's inputs by name, on its device; those of other stages are taken out."""
        index = stage.slot.index
        return {
            name: self.image(stage, number)
            if name == "image"
            else self._onward.pop((index, number, name)).wait()
            for name in stage.inputs
        }

    def image(self, stage: Stage, number: int) -> Tensor:
        """Return the image of a micro-batch on a stage's device."""
        return Transfer(self._batch[number].image, stage.slot.device).wait()

    def target(self, number: int) -> Tensor:
        """Return the target of a micro-batch, on the last stage's device."""
        return self._batch[number].target

    def logits(self, number: int) -> dict[str, Tensor]:
        """Take out the network's results by name, on the last stage's device."""
        arrived = self._logits.pop(number)
        return {name: arrived[name].wait() for name in self._results}

    def gradients(self, stage: Stage, number: int) -> dict[str, list[Tensor]]:
        """Take out the gradients of a stage's outputs by name, on its device."""
        return {
            name: [gradient.wait() for gradient in self._back.pop((number, name), [])]
            for name in stage.outputs
        }

    def send_on(self, stage: Stage, number: int, name: str, made: Tensor) -> None:
        """Send what a stage has produced to the stages, and the loss, that read it."""
        for later in self._stages[stage.slot.index + 1 :]:
            if name in later.inputs:
                index = later.slot.index
                arriving = self._send((index, number), name, made, later.slot.device)
                self._onward[index, number, name] = arriving
        if name in self._results:
            arriving = self._send(("loss", number), name, made, self._loss_device)
            self._logits[number][name] = arriving

    def send_back(self, stage: Stage, number: int, name: str, gradient: Tensor) -> None:
        """Send the gradient of what a stage, or the loss on it, has read to the producer."""
        maker = self._maker[name]
        message = f"gradient of {name}"
        arriving = self._send((maker.index, number), message, gradient, maker.device)
        self._back[number, name].append(arriving)

    def _send(self, reader: Reader, message: str, tensor: Tensor, device: torch.device) -> Arriving:
        """Send a tensor to its reader."""
        return Transfer(tensor, device)
