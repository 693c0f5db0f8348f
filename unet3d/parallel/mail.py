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
from unet3d.parallel.transfer import Transfer


class Mail(Protocol):
    """Carries the tensors of one step between its stages."""

    def inputs(self, stage: Stage, micro_batch: int) -> dict[str, Tensor]:
        """Return the inputs of a stage by name, on its device; each is taken out."""
        ...

    def logits(self, micro_batch: int) -> dict[str, Tensor]:
        """Return the network's results by name, on the last stage's device; they are taken out."""
        ...

    def target(self, micro_batch: int) -> Tensor:
        """Return the target of a micro-batch, on the last stage's device."""
        ...

    def gradients(self, stage: Stage, micro_batch: int) -> dict[str, list[Tensor]]:
        """Return the gradients of a stage's outputs by name, on its device; they are taken out."""
        ...

    def send_on(self, stage: Stage, micro_batch: int, name: str, made: Tensor) -> None:
        """Send what a stage has produced to the stages, and the loss, that read it."""
        ...

    def send_back(self, stage: Stage, micro_batch: int, name: str, gradient: Tensor) -> None:
        """Send the gradient of what a stage, or the loss on it, has read to the producer."""
        ...


class Routes:
    """The producer and the readers of each tensor that travels between stages."""

    def __init__(self, stages: Sequence[Stage], results: Sequence[str]) -> None:
        """Find producers and readers by the names of the tensors.

        Args:
            stages: The stages in order.
            results: Names of the tensors that the loss reads, in its order.
        """
        self.stages = tuple(stages)
        self.results = tuple(results)
        self.maker = {block.name: stage for stage in stages for block in stage.blocks}

    def readers(self, stage: Stage, name: str) -> list[Stage]:
        """Return the later stages that read what a stage produces.

        Args:
            stage: The producer.
            name: Name of the tensor.
        """
        return [later for later in self.stages[stage.slot.index + 1 :] if name in later.inputs]

    @property
    def loss_device(self) -> torch.device:
        """The device where the loss is computed."""
        return self.stages[-1].slot.device


class DirectMail:
    """Mail of a step whose operations are launched: each tensor is copied as it is produced."""

    def __init__(self, routes: Routes, images: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Begin a step.

        Args:
            routes: The routes between the stages.
            images: Image of each micro-batch.
            targets: Target of each micro-batch, on the last stage's device.
        """
        self._routes = routes
        self._targets = targets
        self._onward: dict[tuple[int, int, str], Transfer] = {}
        self._logits: dict[int, dict[str, Transfer]] = defaultdict(dict)
        self._back: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
        for stage in routes.stages:
            if "image" in stage.inputs:
                for number, image in enumerate(images):
                    transfer = Transfer(image, stage.slot.device)
                    self._onward[stage.slot.index, number, "image"] = transfer

    def inputs(self, stage: Stage, micro_batch: int) -> dict[str, Tensor]:
        """Return a stage's inputs by name; see :class:`Mail`."""
        index = stage.slot.index
        return {name: self._onward.pop((index, micro_batch, name)).wait() for name in stage.inputs}

    def logits(self, micro_batch: int) -> dict[str, Tensor]:
        """Return the results of one micro-batch by name; see :class:`Mail`."""
        arrived = self._logits.pop(micro_batch)
        return {name: arrived[name].wait() for name in self._routes.results}

    def target(self, micro_batch: int) -> Tensor:
        """Return the target of one micro-batch; see :class:`Mail`."""
        return self._targets[micro_batch]

    def gradients(self, stage: Stage, micro_batch: int) -> dict[str, list[Tensor]]:
        """Return the gradients of a stage's outputs by name; see :class:`Mail`."""
        return {
            name: [gradient.wait() for gradient in self._back.pop((micro_batch, name), [])]
            for name in stage.outputs
        }

    def send_on(self, stage: Stage, micro_batch: int, name: str, made: Tensor) -> None:
        """Start the copies of what a stage has produced; see :class:`Mail`."""
        for later in self._routes.readers(stage, name):
            transfer = Transfer(made, later.slot.device)
            self._onward[later.slot.index, micro_batch, name] = transfer
        if name in self._routes.results:
            self._logits[micro_batch][name] = Transfer(made, self._routes.loss_device)

    def send_back(self, stage: Stage, micro_batch: int, name: str, gradient: Tensor) -> None:
        """Start the copy of a gradient to the producer of its tensor; see :class:`Mail`."""
        transfer = Transfer(gradient, self._routes.maker[name].slot.device)
        self._back[micro_batch, name].append(transfer)
