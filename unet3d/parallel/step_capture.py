"""When a step is captured as CUDA graphs: where launching it takes longer than running it."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.parallel.captured_step import CapturedStep, Run
from unet3d.parallel.cuda_graphs import POOLS
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.mail import Routes
from unet3d.parallel.stage_runner import EagerStage, Objective

logger = logging.getLogger(__name__)

NUM_WARM_UP_STEPS = 3
"""Steps of one shape in a row before a capture; they compile kernels and choose algorithms."""
MAX_ELEMENTS = 2**23
"""Most elements of a micro-batch's image; above, the GPUs are slower than Python."""
MAX_MICRO_BATCHES = 64
"""Most micro-batches; each has graphs of its own, which take time to capture and memory."""
MAX_SHARE = 0.45
"""Share of the memory that this process can have on a GPU that launched steps may have reserved: a
captured step takes as much, and a smaller last batch is launched beside it."""


class StepCapture:
    """Decides when a step is captured, and keeps the one that was captured last."""

    def __init__(
        self,
        stages: Sequence[EagerStage],
        routes: Routes,
        exchange: NoExchange,
        max_elements: int | None = None,
    ) -> None:
        """Begin with nothing captured.

        Args:
            stages: The stages to capture.
            routes: The routes between them.
            exchange: Says what all processes whose messages are part of a step agree on.
            max_elements: Most elements of a micro-batch's image; larger steps are launched. None:
                the usual number.
        """
        self._max_elements = MAX_ELEMENTS if max_elements is None else max_elements
        self._exchange = exchange
        self._stages = tuple(stages)
        self._routes = routes
        self._devices = dict.fromkeys(runner.stage.slot.device for runner in stages)
        self._modules = [
            module
            for runner in stages
            for block in runner.stage.blocks
            for module in block.module.modules()
        ]
        self._captured: CapturedStep | None = None
        self._captured_key: Any = None
        self._last_key: Any = None
        self._num_in_a_row = 0
        self._refused_keys: list[Any] = []

    def step(
        self,
        run: Run,
        images: Sequence[Tensor],
        targets: Sequence[Tensor],
        objectives: Sequence[Objective],
    ) -> "CapturedStep | None":
        """Return a captured step for the next step, or None if that is to be launched.

        Args:
            run: Walks its schedule.
            images: Image of each micro-batch.
            targets: Target of each micro-batch.
            objectives: Objective of each micro-batch.
        """
        if not self._is_possible(images):
            return None
        tensors = (images[0], targets[0])
        layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        key = (len(images), layouts, list(objectives), self._network_state())
        if self._captured is not None and key == self._captured_key:
            return self._captured
        self._num_in_a_row = self._num_in_a_row + 1 if key == self._last_key else 1
        self._last_key = key
        if self._num_in_a_row <= NUM_WARM_UP_STEPS or key in self._refused_keys:
            return None
        if not self._exchange.all_agree(self._has_room()):
            self._refused_keys.append(key)
            return None
        self._captured = None  # frees the memory of another shape
        captured = None
        try:
            captured = CapturedStep(
                run=run,
                stages=self._stages,
                routes=self._routes,
                images=images,
                targets=targets,
            )
        except torch.OutOfMemoryError:
            logger.debug("no memory to capture steps of %d voxels", images[0].numel())
        except RuntimeError as error:  # such as of a loss that reads a value back to the host
            logger.warning(
                "steps of batches %s cannot be captured as CUDA graphs, so they are launched: %s; "
                "parallel.cuda_graphs=off does not try",
                "x".join(map(str, images[0].shape)),
                " ".join(str(error).split())[:200],
            )
        if self._exchange.all_agree(captured is not None):
            self._captured, self._captured_key = captured, key
        else:
            self._refused_keys.append(key)
        return self._captured

    def _network_state(self) -> list[tuple[Any, ...]]:
        """Return what a graph takes from the network as it was when it was captured."""
        return [
            (module.training, *((p.data_ptr(), p.requires_grad) for p in module.parameters(False)))
            for module in self._modules
        ]

    def _is_possible(self, images: Sequence[Tensor]) -> bool:
        return (
            len(images) <= MAX_MICRO_BATCHES
            and images[0].numel() <= self._max_elements
            and all(image.shape == images[0].shape for image in images)
            and all(device.type in POOLS for device in self._devices)
        )

    def _has_room(self) -> bool:
        for device in self._devices:
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info(device)
                reserved = torch.cuda.memory_reserved(device)
                allowed = torch.cuda.get_per_process_memory_fraction(device) * total
                if reserved > MAX_SHARE * min(free + reserved, allowed):
                    return False
        return True
