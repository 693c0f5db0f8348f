"""Runs a network as stages, with several micro-batches in flight.

Between two stages there is no autograd graph: a stage's inputs are leaves, and what backward
leaves in them is sent to the stage that made them. So the graph of one micro-batch in one stage
can be walked back as soon as its gradients are there, and is freed at once::

    stage 0   image ──[blocks]── encoder.3.1 ─┬─ skip ...       gradients ──► backward
                                        send  │                            ▲ send
    stage 1                        leaf ◄─────┘──[blocks]── head ── loss ── leaf.grad
"""

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unet3d.config import Recompute
from unet3d.errors import ConfigError
from unet3d.kernels import recomputed_in_backward
from unet3d.memory.fake_devices import is_gpu
from unet3d.model import Block, BlockWatcher, LossTerms, UNet3d, run_blocks, run_levels
from unet3d.parallel.executor import LossFunction, NoObserver, Observer
from unet3d.parallel.offload import OffloadedMemory, SkipOffloader, skip_names, supports_offload
from unet3d.parallel.partition import Stage
from unet3d.parallel.placement import Slot
from unet3d.parallel.schedule import Schedule
from unet3d.parallel.transfer import Transfer


@dataclass(kw_only=True)
class _MicroBatch:
    """What is alive of one micro-batch between its first forward and its last backward."""

    target: Tensor
    weight: float
    """Its share of the batch's samples."""
    arriving: dict[tuple[int, str], Transfer] = field(default_factory=dict)
    """Per reading stage and tensor, what is on its way there."""
    leaves: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Per stage, its inputs."""
    roots: dict[int, dict[str, GradientEdge]] = field(default_factory=dict)
    """Per stage, where the graph of each of its outputs begins: it outlives the output."""
    logits: dict[str, Tensor] = field(default_factory=dict)
    """What the loss has still to read."""
    gradients: dict[str, list[Transfer]] = field(default_factory=lambda: defaultdict(list))
    """Per tensor, what its readers send back to its maker."""
    offloaders: dict[int, SkipOffloader] = field(default_factory=dict)
    """Per stage, what it parks in host memory."""
    offloaded: WeakValueDictionary[int, OffloadedMemory] = field(
        default_factory=WeakValueDictionary
    )
    """The same of all stages, by storage."""


class _Sending:
    """Sends what blocks make while the stage still goes forward."""

    def __init__(
        self, offloader: SkipOffloader | None, send: Callable[[str, Tensor], None]
    ) -> None:
        self._offloader = offloader
        self._send = send
        self.sent: set[str] = set()

    def before(self, block: Block) -> None:
        if self._offloader is not None:
            self._offloader.before(block)

    def after(self, block: Block, made: Tensor) -> None:
        if self._offloader is not None:
            self._offloader.after(block, made)
        self._send(block.name, made)
        self.sent.add(block.name)


class PipelineExecutor:
    """The stages of one network on their devices; see :class:`~unet3d.parallel.Executor`."""

    def __init__(
        self,
        *,
        module: UNet3d,
        stages: Sequence[Stage],
        num_micro_batches: int,
        schedule: Schedule,
        autocast: torch.dtype | None,
        recompute: Recompute,
        offloads_skips: bool = False,
    ) -> None:
        """Move each stage's parameters to its device.

        Args:
            module: The network, with all its parameters in one precision.
            stages: Its blocks, divided.
            num_micro_batches: Portions of a training batch.
            schedule: When each of them runs where.
            autocast: Lower precision on the GPU stages, or None.
            recompute: What is made again in backward instead of being kept.
            offloads_skips: Whether GPU stages park skips in host memory while nothing reads them.

        Raises:
            ConfigError: Batch normalisation with more than one micro-batch.
        """
        if num_micro_batches > 1 and module.topology.norm == "batch":
            raise ConfigError(
                f"batch normalisation with {num_micro_batches} micro-batches would take its "
                "statistics from portions of the batch; use model.norm=instance"
            )
        self.module = module
        self.stages = tuple(stages)
        self.slots: Sequence[Slot] = tuple(stage.slot for stage in stages)
        self.input_device = stages[0].slot.device
        self.output_device = stages[-1].slot.device
        self.num_micro_batches = num_micro_batches
        self.schedule = schedule
        self.autocast = autocast
        self.recompute = recompute
        self.observer: Observer = NoObserver()
        self._predictions: deque[torch.cuda.Event] = deque()
        self._offloaded_skips = skip_names(module.blocks()) if offloads_skips else frozenset()
        self._dtype = next(module.parameters()).dtype
        self._maker = {block.name: stage for stage in stages for block in stage.blocks}
        for stage in stages:
            for block in stage.blocks:
                if self._uses_autocast(stage):  # the layout that tensor cores want
                    block.module.to(stage.slot.device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
                else:
                    block.module.to(stage.slot.device)

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> LossTerms:
        """Add one batch's gradients to the module's; see the protocol."""
        self.module.check_shape(image)
        num_samples = len(image)
        count = min(self.num_micro_batches, num_samples)
        alive = []
        for portion, labels in zip(
            image.tensor_split(count), target.tensor_split(count), strict=True
        ):
            micro_batch = _MicroBatch(target=labels, weight=len(portion) / num_samples)
            micro_batch.arriving[0, "image"] = Transfer(portion, self.input_device)
            alive.append(micro_batch)
        terms: list[LossTerms] = []
        num_left = [count] * len(self.stages)
        for action in self.schedule(count, len(self.stages)):
            stage, micro_batch = self.stages[action.stage], alive[action.micro_batch]
            with self.observer.during(stage.slot, action.kind, action.micro_batch):
                if action.kind == "forward":
                    self._forward(stage, micro_batch)
                else:
                    num_left[action.stage] -= 1
                    if not num_left[action.stage]:
                        self._before_last_backward(stage)
                    self._backward(stage, micro_batch)
            if action.kind == "forward" and stage is self.stages[-1]:
                with self.observer.during(stage.slot, "loss", action.micro_batch):
                    terms.append(self._loss(stage, micro_batch, loss_fn, scale))
        return sum(terms[1:], start=terms[0])

    @torch.no_grad()
    def predict(self, image: Tensor) -> Tensor:
        """Return logits without gradients; see the protocol.

        Nothing waits for the result, so the next call's first stage overlaps with this call's
        last; at most as many calls are under way as there are stages.
        """
        self.module.check_shape(image)
        result, *coarse = self.module.outputs()
        tensors = {"image": image}
        for index, stage in enumerate(self.stages):
            received = {
                name: self._as_input(stage, Transfer(tensors[name], stage.slot.device))
                for name in stage.inputs
            }
            later = {name for after in self.stages[index + 1 :] for name in after.inputs}
            tensors = {name: value for name, value in tensors.items() if name in later}
            blocks = [block for block in stage.blocks if block.name not in coarse]
            outputs = [name for name in stage.outputs if name not in coarse]
            with self._autocast(stage):
                tensors |= run_blocks(blocks, received, outputs)
        self._hold_back()
        return tensors[result]

    def _before_last_backward(self, stage: Stage) -> None:
        """Take notice that a stage's gradients will be complete; for replicas."""

    def _hold_back(self) -> None:
        """Wait for an earlier prediction: a fast first stage must not fill the others' memory."""
        if self.output_device.type == "cuda":
            self._predictions.append(torch.cuda.current_stream(self.output_device).record_event())
            if len(self._predictions) > len(self.stages):
                self._predictions.popleft().synchronize()

    def _forward(self, stage: Stage, micro_batch: _MicroBatch) -> None:
        number = stage.slot.index
        leaves = {}
        for name in stage.inputs:
            leaf = self._as_input(stage, micro_batch.arriving.pop((number, name)))
            leaves[name] = leaf
            if name != "image":
                leaf.requires_grad_()
                # Sent as soon as it is there, while the rest of the stage still goes backward.
                send = functools.partial(self._send_back, micro_batch, name)
                leaf.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
        offloader = self._offloader(stage, micro_batch, leaves)
        sending = _Sending(offloader, functools.partial(self._send_on, stage, micro_batch))
        made = self._compute(stage, leaves, sending)
        for name in stage.outputs:
            if name not in sending.sent:
                self._send_on(stage, micro_batch, name, made[name])
        if offloader is not None:
            offloader.end_forward()
        micro_batch.leaves[number] = leaves
        micro_batch.roots[number] = {name: get_gradient_edge(made[name]) for name in made}
        micro_batch.logits |= {name: made[name] for name in self.module.outputs() if name in made}

    def _compute(
        self, stage: Stage, leaves: dict[str, Tensor], watcher: BlockWatcher | None = None
    ) -> dict[str, Tensor]:
        """Run a stage's blocks forward, with all that backward will need."""
        recomputing = recomputed_in_backward() if self.recompute == "norm" else nullcontext()
        with self._autocast(stage), recomputing:
            if self.recompute == "level":
                return run_levels(stage.blocks, dict(leaves), stage.outputs)
            return run_blocks(stage.blocks, dict(leaves), stage.outputs, watcher)

    def _loss(
        self, stage: Stage, micro_batch: _MicroBatch, loss_fn: LossFunction, scale: float
    ) -> LossTerms:
        """Take the loss; its gradients with respect to the logits start the way back."""
        logits = {}
        for name in self.module.outputs():
            # A coarse head may be in an earlier stage than the loss.
            made = micro_batch.logits.pop(name)
            logits[name] = Transfer(made, stage.slot.device).wait().requires_grad_()
        values = list(logits.values())
        terms = loss_fn(values if len(values) > 1 else values[0], micro_batch.target)
        (terms.total * (micro_batch.weight * scale)).backward()  # type: ignore[no-untyped-call]
        for name, leaf in logits.items():
            self._send_back(micro_batch, name, leaf)
        return terms.detached().weighted(micro_batch.weight)

    def _backward(self, stage: Stage, micro_batch: _MicroBatch) -> None:
        roots = micro_batch.roots.pop(stage.slot.index)
        offloader = micro_batch.offloaders.pop(stage.slot.index, None)
        if offloader is not None:
            offloader.begin_backward()
        gradients = [sum_of(micro_batch.gradients.pop(name)) for name in roots]
        torch.autograd.backward(list(roots.values()), gradients)
        if offloader is not None:
            offloader.end_backward()
        del micro_batch.leaves[stage.slot.index]

    def _offloader(
        self, stage: Stage, micro_batch: _MicroBatch, leaves: dict[str, Tensor]
    ) -> SkipOffloader | None:
        if not self._offloaded_skips or not supports_offload(stage.slot.device):
            return None
        offloader = SkipOffloader(
            stage.blocks, self._offloaded_skips, micro_batch.offloaded, self.observer.resized
        )
        offloader.begin(leaves)
        micro_batch.offloaders[stage.slot.index] = offloader
        return offloader

    def _send_on(self, stage: Stage, micro_batch: _MicroBatch, name: str, made: Tensor) -> None:
        """Send what a stage has made to the stages that read it."""
        for later in self.stages[stage.slot.index + 1 :]:
            if name in later.inputs:
                transfer = Transfer(made, later.slot.device)
                micro_batch.arriving[later.slot.index, name] = transfer

    def _send_back(self, micro_batch: _MicroBatch, name: str, leaf: Tensor) -> None:
        """Send the gradient of what a stage has read to the stage that made it."""
        if leaf.grad is not None:
            transfer = Transfer(leaf.grad, self._maker[name].slot.device)
            micro_batch.gradients[name].append(transfer)
            leaf.grad = None

    def _as_input(self, stage: Stage, transfer: Transfer) -> Tensor:
        received = transfer.wait()
        # Without autocast (a CPU stage fed by a GPU) the blocks want their parameters' precision.
        return received if self._uses_autocast(stage) else received.to(self._dtype)

    def _uses_autocast(self, stage: Stage) -> bool:
        return self.autocast is not None and is_gpu(stage.slot.device)

    def _autocast(self, stage: Stage) -> AbstractContextManager[None]:
        if not self._uses_autocast(stage):
            return nullcontext()
        # Its cache of lowered weights lives until the context ends: once per micro-batch and stage.
        return torch.autocast(stage.slot.device.type, dtype=self.autocast)


def sum_of(gradients: Sequence[Transfer]) -> Tensor:
    """Add gradients in the order in which they came, so that a run can be repeated."""
    total = gradients[0].wait()
    for gradient in gradients[1:]:
        total = total + gradient.wait()
    return total
