"""Replaying recorded launches, where making them takes longer than running them.

For volumes that are not large Python needs longer to launch the some thousand kernels of a step
than GPUs need to run them; the more so where one process keeps several GPUs busy. A CUDA graph
records what one stage launches for one micro-batch, forward or backward, and a later step replays
it in one call: the same arithmetic on the same memory.

A micro-batch that is under way needs memory of its own, so each stage has a lane, with its two
graphs, for each micro-batch that it has under way at a time. What goes from stage to stage is
copied into the reading lane's inputs.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.model import LossTerms
from unet3d.parallel.executor import LossFunction, NoObserver
from unet3d.parallel.partition import Stage
from unet3d.parallel.pipeline import PipelineExecutor, sum_of
from unet3d.parallel.schedule import most_alive
from unet3d.parallel.transfer import Transfer

logger = logging.getLogger(__name__)

NUM_WARM_UP_STEPS = 3
"""Of one shape, in a row, before it is recorded: kernels are compiled and algorithms chosen."""
MAX_ELEMENTS = 2**23
"""Of a micro-batch's image; above, the GPUs are slower than Python."""
MAX_SHARE = 0.4
"""Of a GPU's memory, which a step may have taken: a recording keeps as much for itself."""

ERROR_MODE = "thread_local"
"""Other threads, such as those that watch over NCCL, may call CUDA meanwhile."""


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """What one stage does with one micro-batch at a time."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    """Written before forward is replayed."""
    target: Tensor | None
    """Likewise, in the last stage."""
    outputs: dict[str, Tensor]
    """Read after it."""
    terms: LossTerms | None
    """Likewise, in the last stage: the loss, weighted with the micro-batch's share."""
    output_gradients: dict[str, Tensor]
    """Written before backward is replayed; the last stage has its own."""
    input_gradients: dict[str, Tensor]
    """Read after it."""


class RecordedPipeline(PipelineExecutor):
    """A pipeline that replays its steps on GPUs; see :class:`~unet3d.parallel.Executor`."""

    _lanes: list[list[_Lane]] | None = None
    _gradients: list[dict[Tensor, Tensor]]
    """Of each stage's parameters; recorded backward passes add to these."""
    _recorded: Any = None
    _last: Any = None
    _num_in_a_row = 0

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> LossTerms:
        """Add one batch's gradients to the module's; see the protocol."""
        key = (image.shape, image.dtype, target.shape, target.dtype, loss_fn, scale)
        if not self._may_replay(image):
            return super().forward_backward(image, target, loss_fn, scale)
        if self._lanes is None or key != self._recorded:
            self._num_in_a_row = self._num_in_a_row + 1 if key == self._last else 1
            self._last = key
            if self._num_in_a_row <= NUM_WARM_UP_STEPS or not self._has_room():
                return super().forward_backward(image, target, loss_fn, scale)
            self._lanes = None  # gives the memory of another shape back
            self._lanes = self._record(image, target, loss_fn, scale)
            self._recorded = key
        return self._replay(self._lanes, image, target)

    def _may_replay(self, image: Tensor) -> bool:
        """Return whether a step like this one could be recorded."""
        last = {block.name for block in self.stages[-1].blocks}
        count = min(self.num_micro_batches, len(image))
        return (
            all(slot.device.type == "cuda" for slot in self.slots)
            # Parking changes the size of memory as it goes, which a recording cannot follow.
            and not self._offloaded_skips
            and image.numel() // count <= MAX_ELEMENTS
            and len(image) % count == 0
            and last.issuperset(self.module.outputs())
            and isinstance(self.observer, NoObserver)
            and self._may_deliver()
        )

    def _may_deliver(self) -> bool:
        """Return whether there are no gradients yet, to which those of a replay would not add."""
        return all(parameter.grad is None for parameter in self.module.parameters())

    def _deliver(self, stage: Stage, gradients: dict[Tensor, Tensor]) -> None:
        """Make what was replayed the gradients of a stage's parameters."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _has_room(self) -> bool:
        return all(
            torch.cuda.max_memory_reserved(device)
            <= MAX_SHARE * torch.cuda.get_device_properties(device).total_memory
            for device in {slot.device for slot in self.slots}
        )

    def _record(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float
    ) -> list[list[_Lane]]:
        count = min(self.num_micro_batches, len(image))
        alive = most_alive(self.schedule, count, len(self.stages))
        lanes = []
        self._gradients = []
        made = {"image": image.tensor_split(count)[0]}
        labels = target.tensor_split(count)[0]
        for stage in self.stages:
            with torch.cuda.device(stage.slot.device), _aliased(stage) as gradients:
                self._gradients.append(gradients)
                number = stage.slot.index
                of_stage = [
                    self._record_lane(
                        stage,
                        made=made,
                        labels=labels,
                        loss_fn=loss_fn,
                        scale=scale / count,
                        weight=1 / count,
                    )
                    for _ in range(alive[number][number])
                ]
            made |= of_stage[0].outputs
            lanes.append(of_stage)
        logger.debug("recorded steps of %d voxels", image.numel())
        return lanes

    def _record_lane(
        self,
        stage: Stage,
        *,
        made: dict[str, Tensor],
        labels: Tensor,
        loss_fn: LossFunction,
        scale: float,
        weight: float,
    ) -> _Lane:
        device = stage.slot.device
        # PyTorch's own is on whichever GPU recorded first; backward must be on that of forward.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        leaves = {
            name: torch.empty_like(made[name], device=device).requires_grad_(name != "image")
            for name in stage.inputs
        }
        target = terms = None
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        if stage is self.stages[-1]:
            target = torch.zeros_like(labels, device=device)
        with torch.cuda.graph(forward, stream=stream, capture_error_mode=ERROR_MODE):
            roots = self._compute(stage, leaves)
            outputs = {name: root.detach() for name, root in roots.items()}
            if target is not None:
                logits = {name: outputs[name].requires_grad_() for name in self.module.outputs()}
                values = list(logits.values())
                loss = loss_fn(values if len(values) > 1 else values[0], target)
                (loss.total * scale).backward()  # type: ignore[no-untyped-call]
                terms = loss.detached().weighted(weight)
        gradients = {
            name: torch.empty_like(output) if output.grad is None else output.grad
            for name, output in outputs.items()
        }
        with torch.cuda.graph(backward, forward.pool(), stream, ERROR_MODE):
            torch.autograd.backward(list(roots.values()), [gradients[name] for name in roots])
        back = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        outputs = {name: output.detach() for name, output in outputs.items()}
        leaves = {name: leaf.detach() for name, leaf in leaves.items()}
        return _Lane(
            forward=forward,
            backward=backward,
            inputs=leaves,
            target=target,
            outputs=outputs,
            terms=terms,
            output_gradients=gradients,
            input_gradients=back,
        )

    def _replay(self, lanes: list[list[_Lane]], image: Tensor, target: Tensor) -> LossTerms:
        for gradients in self._gradients:
            torch._foreach_zero_(list(gradients.values()))
        count = min(self.num_micro_batches, len(image))
        portions, labels = image.tensor_split(count), target.tensor_split(count)
        arriving = {(i, 0, "image"): Transfer(x, self.input_device) for i, x in enumerate(portions)}
        returning: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
        terms: list[LossTerms] = []
        for action in self.schedule(count, len(self.stages)):
            stage, number = self.stages[action.stage], action.micro_batch
            lane = lanes[action.stage][number % len(lanes[action.stage])]
            with torch.cuda.device(stage.slot.device):
                if action.kind == "forward":
                    for name, place in lane.inputs.items():
                        place.copy_(arriving.pop((number, action.stage, name)).wait())
                    if lane.target is not None:
                        lane.target.copy_(labels[number])
                    lane.forward.replay()
                    if lane.terms is not None:
                        terms.append(_copied(lane.terms))
                    for later in self.stages[action.stage + 1 :]:
                        for name in lane.outputs.keys() & set(later.inputs):
                            transfer = Transfer(lane.outputs[name], later.slot.device)
                            arriving[number, later.slot.index, name] = transfer
                else:
                    if lane.target is None:
                        for name, place in lane.output_gradients.items():
                            place.copy_(sum_of(returning.pop((number, name))))
                    lane.backward.replay()
                    for name, gradient in lane.input_gradients.items():
                        maker = self._maker[name].slot.device
                        returning[number, name].append(Transfer(gradient, maker))
        # The last stage first, as where steps are launched: replicas exchange in that order, and
        # two stages on one GPU must do so in the same order everywhere.
        for stage, gradients in zip(self.stages[::-1], self._gradients[::-1], strict=True):
            self._deliver(stage, gradients)
        return sum(terms[1:], start=terms[0])


@contextmanager
def _aliased(stage: Stage) -> Iterator[dict[Tensor, Tensor]]:
    """Put aliases in the place of a stage's parameters, and give back what they add gradients to.

    So no hook of the parameters is called in a recording, nor any that autograd keeps for them in
    another stream, as it does for ``DistributedDataParallel``.
    """
    gradients: dict[Tensor, Tensor] = {}
    owned = [
        (module, name, parameter)
        for block in stage.blocks
        for module in block.module.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, parameter in owned:
        alias = nn.Parameter(parameter.detach())
        alias.grad = gradients[parameter] = torch.zeros_like(parameter)
        setattr(module, name, alias)
    try:
        yield gradients
    finally:
        for module, name, parameter in owned:
            setattr(module, name, parameter)


def _copied(terms: LossTerms) -> LossTerms:
    return LossTerms(
        total=terms.total.clone(),
        dice=terms.dice.clone(),
        cross_entropy=terms.cross_entropy.clone(),
    )
