"""Replaying a recorded step, where launching its kernels takes longer than running them.

For small patches Python needs longer to launch the two thousand kernels of a step than a GPU needs
to run them. A CUDA graph records the launches of one step, and later steps of the same shapes
replay them in one call: the same arithmetic, on the same memory each time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unet3d.model import LossTerms, UNet3d
from unet3d.parallel.executor import LossFunction, NoObserver, Observer
from unet3d.parallel.pipeline import PipelineExecutor
from unet3d.parallel.placement import Slot

logger = logging.getLogger(__name__)

NUM_WARM_UP_STEPS = 3
"""Of one shape, in a row, before it is recorded: kernels are compiled and algorithms chosen."""
MAX_ELEMENTS = 2**23
"""Of a batch's image; above, the GPU is the slower of the two."""
MAX_SHARE = 0.4
"""Of the GPU's memory, which a step may have taken: a recording keeps as much for itself."""


@dataclass(frozen=True)
class _Recording:
    """One step: what is written before a replay, and what is read after it."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    target: Tensor
    terms: LossTerms
    gradients: tuple[Tensor | None, ...]


class GraphedExecutor:
    """One network on one GPU; see :class:`~unet3d.parallel.Executor`."""

    def __init__(self, executor: PipelineExecutor) -> None:
        """Record nothing yet.

        Args:
            executor: Of a single stage on a GPU; it does all that is not replayed.
        """
        self._executor = executor
        self.module: UNet3d = executor.module
        self.input_device = executor.input_device
        self.output_device = executor.output_device
        self.slots: Sequence[Slot] = executor.slots
        self._recorded: Any = None
        self._recording: _Recording | None = None
        self._last: Any = None
        self._num_in_a_row = 0

    @property
    def observer(self) -> Observer:
        """Is told of every action of a step; while there is one, nothing is replayed."""
        return self._executor.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self._executor.observer = observer

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> LossTerms:
        """Add one batch's gradients to the module's; see the protocol."""
        key = (image.shape, image.dtype, target.shape, target.dtype, loss_fn, scale)
        if not self._may_replay(image):
            return self._executor.forward_backward(image, target, loss_fn, scale)
        if self._recording is not None and key == self._recorded:
            return self._replay(self._recording, image, target)
        self._num_in_a_row = self._num_in_a_row + 1 if key == self._last else 1
        self._last = key
        if self._num_in_a_row <= NUM_WARM_UP_STEPS or not self._has_room():
            return self._executor.forward_backward(image, target, loss_fn, scale)
        self._recording = None  # frees the memory of one of another shape
        self._recording, self._recorded = self._record(image, target, loss_fn, scale), key
        return self._replay(self._recording, image, target)

    def predict(self, image: Tensor) -> Tensor:
        """Return logits without gradients; see the protocol."""
        return self._executor.predict(image)

    def _may_replay(self, image: Tensor) -> bool:
        return (
            image.numel() <= MAX_ELEMENTS
            and isinstance(self.observer, NoObserver)
            # A recording sets gradients, and does not add to them.
            and all(parameter.grad is None for parameter in self.module.parameters())
        )

    def _has_room(self) -> bool:
        device = self.input_device
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_reserved(device) <= MAX_SHARE * total

    def _record(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float
    ) -> _Recording:
        image, target = image.clone(), target.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.input_device), torch.cuda.graph(graph):
            terms = self._executor.forward_backward(image, target, loss_fn, scale)
        gradients = tuple(parameter.grad for parameter in self.module.parameters())
        logger.debug("recorded a step of %d voxels", image.numel())
        return _Recording(graph, image, target, terms, gradients)

    def _replay(self, recording: _Recording, image: Tensor, target: Tensor) -> LossTerms:
        recording.image.copy_(image)
        recording.target.copy_(target)
        recording.graph.replay()
        for parameter, gradient in zip(self.module.parameters(), recording.gradients, strict=True):
            parameter.grad = gradient
        terms = recording.terms
        return LossTerms(terms.total.clone(), terms.dice.clone(), terms.cross_entropy.clone())
