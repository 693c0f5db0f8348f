"""A training step on one device: a batch in micro-batches, one after the other.

Every mode is based on it: slabs run this step inside a slab's context
(:mod:`unet3d.parallel.spatial`), replicas add an exchange of gradients
(:mod:`unet3d.parallel.exchange`), and stages of a pipeline run their blocks in the same way
(:mod:`unet3d.parallel.pipeline`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.config import Recompute
from unet3d.errors import ConfigError
from unet3d.kernels import convolves_by_hand, recomputed_in_backward
from unet3d.memory.meter import Observer
from unet3d.model import (
    AfterBlock,
    Block,
    BlockNetwork,
    adding_skips,
    deferring,
    in_running_order,
    run_block,
    run_blocks,
)
from unet3d.model.parts import PartsOfPass, recomputed_parts
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.graph import Graph, aliased, give_cached_memory_back, pool_of_kind
from unet3d.parallel.losses import LossFunction, as_loss, total_of, weighted
from unet3d.parallel.offload import SkipOffload
from unet3d.parallel.partition import Stage
from unet3d.parallel.precision import autocast_dtype, lowered_on, lowering, memory_format
from unet3d.torch_private import version


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A portion of a batch, and how its loss is computed."""

    image: Tensor
    """(N, C, X, Y, Z), or another input of the network."""
    target: Tensor
    """The target of the same samples."""
    loss_fn: LossFunction
    """The loss function, a mean over the samples."""
    weight: float
    """The micro-batch's share of the batch's samples."""
    scale: float
    """Factor of the loss before backward, such as a gradient scaler's."""

    def loss(self, logits: Sequence[Tensor], target: Tensor) -> tuple[Tensor, Any]:
        """Return the scalar to run backward from, and the weighted loss without graph and scale."""
        terms = as_loss(self.loss_fn(_one_or_all(logits), target))
        return terms.total * (self.weight * self.scale), weighted(terms, self.weight)

    @torch.no_grad()
    def sums(self, logits: Sequence[Tensor]) -> Any:
        """Return the sums over the samples, for a loss that is computed from sums."""
        loss_fn: Any = self.loss_fn
        return loss_fn.sums(_one_or_all(logits), self.target)

    def emptied(self) -> "MicroBatch":
        """Return a micro-batch of the same shapes in its own memory."""
        image, target = torch.empty_like(self.image), torch.empty_like(self.target)
        return replace(self, image=image, target=target)


def _one_or_all(logits: Sequence[Tensor]) -> Any:
    """Return logits as loss functions take them: a sequence only with deep supervision."""
    return logits if len(logits) > 1 else logits[0]


class PlacedBlocks:
    """The blocks of a stage on its device, in the precision that it computes in."""

    def __init__(
        self,
        stage: Stage,
        *,
        autocast: torch.dtype | None,
        recompute: Recompute,
        num_alive: int = 1,
        offload: SkipOffload | None = None,
    ) -> None:
        """Move the parameters; at most ``num_alive`` micro-batches are kept for backward."""
        self.stage = stage
        self._autocast = lowered_on(stage.slot.device, autocast)
        blocks: Sequence[Block] = stage.blocks
        # With offloading a skip must be read early and only once, so its convolution stays apart.
        if offload is None and convolves_by_hand(stage.slot.device, self._autocast):
            blocks = adding_skips(blocks, stage.outputs)
        self._predicted = deferring(blocks, stage.outputs)
        # Recomputed parts may begin and end at any block, so these are not fused.
        self._blocks = in_running_order(stage.blocks if recompute == "level" else self._predicted)
        self._recompute = recompute
        self._parts = recomputed_parts(self._blocks, num_alive) if recompute == "level" else ()
        self._offload = offload
        self._dtype = place(stage, self._autocast)
        self._copied = _copied_inputs(stage)

    def as_inputs(self, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return inputs in the type that the blocks need in training."""
        return self._as_inputs(received, self._autocast)

    def forward(
        self, inputs: Mapping[str, Tensor], after: AfterBlock | None = None
    ) -> dict[str, Tensor]:
        """Return the stage's outputs by name, and keep what backward needs."""

        def passed(block: Block, made: Tensor) -> None:
            if self._offload is not None:
                self._offload.after(block, made)
            if after is not None:
                after(block, made)

        run = PartsOfPass(self._parts, self._lowered).run if self._parts else self._run
        recomputing = nullcontext() if self._recompute == "off" else recomputed_in_backward()
        versions = {name: version(tensor) for name, tensor in inputs.items()}
        try:
            with self._lowered(), recomputing:
                made = run_blocks(self._blocks, dict(inputs), self.stage.outputs, passed, run)
        finally:
            if self._offload is not None:
                self._offload.forget()
        for name, before in versions.items():
            if version(inputs[name]) != before:
                raise ConfigError(_OVERWRITTEN.format(name))
        return made

    def predict(
        self,
        received: Mapping[str, Tensor],
        left_out: Sequence[str] = (),
        precision: str | None = None,
    ) -> dict[str, Tensor]:
        """Return the stage's outputs except those of ``left_out``; nothing is kept for backward.

        ``precision`` must not be ``auto``; None: the precision of training.
        """
        device, autocast = self.stage.slot.device, self._autocast
        if precision is not None:
            autocast = lowered_on(device, autocast_dtype(precision))
        blocks = [block for block in self._predicted if block.name not in left_out]
        outputs = [name for name in self.stage.outputs if name not in left_out]
        inputs = self._as_inputs(received, autocast)
        with torch.no_grad(), lowering(device, autocast):
            return run_blocks(blocks, inputs, outputs, run=self._run)

    def _as_inputs(
        self, received: Mapping[str, Tensor], autocast: torch.dtype | None
    ) -> dict[str, Tensor]:
        # Without autocast (a CPU stage fed by a GPU) the blocks need their parameters' type.
        if autocast is not None or self._dtype is None:
            return dict(received)
        return {name: tensor.to(self._dtype) for name, tensor in received.items()}

    def _run(self, block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run a block; copy inputs that it may overwrite and that other blocks read too."""
        copies = {name: inputs[name].clone() for name in self._copied[block.name]}
        try:
            return run_block(block, {**inputs, **copies})
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise ConfigError(_OVERWRITTEN.format(" or ".join(block.inputs))) from error

    def _lowered(self) -> AbstractContextManager[None]:
        # Weights are lowered once per micro-batch and stage.
        return lowering(self.stage.slot.device, self._autocast)


class DeviceStep:
    """The step of a network that one device runs."""

    def __init__(self, module: BlockNetwork, blocks: PlacedBlocks) -> None:
        """Take the network and all its blocks."""
        self.stages = (blocks.stage,)
        self._blocks = blocks
        self._result, *self._coarse = module.outputs()

    def run(
        self,
        batch: Sequence[MicroBatch],
        observer: Observer,
        before_last_backward: Callable[[Stage], None] = lambda stage: None,
    ) -> Any:
        """Add a batch's gradients to the gradients of the parameters; return its weighted loss."""
        (stage,) = self.stages
        losses: list[Any] = []
        for number, one in enumerate(batch):
            with observer.during(stage.slot, "forward", number):
                made = self._blocks.forward(self._blocks.as_inputs({"image": one.image}))
            with observer.during(stage.slot, "loss", number):
                # After the loss, only the graph keeps the logits alive.
                logits = [made.pop(name) for name in (self._result, *self._coarse)]
                scaled, loss = one.loss(logits, one.target)
                del logits
            losses.append(loss)
            with observer.during(stage.slot, "backward", number):
                if number + 1 == len(batch):
                    before_last_backward(stage)
                torch.autograd.backward(scaled)
            del scaled
        return total_of(losses)

    def sums(self, one: MicroBatch) -> Any:
        """Return the sums of a micro-batch's loss, without gradients."""
        made = self._blocks.predict({"image": one.image})
        return one.sums([made[name] for name in (self._result, *self._coarse)])

    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return the logits of the full resolution."""
        return self._blocks.predict({"image": image}, self._coarse, precision)[self._result]

    def capture(
        self, batch: Sequence[MicroBatch], observer: Observer, exchange: NoExchange
    ) -> "CapturedDeviceStep":
        """Capture the step of a batch whose micro-batches have one shape; nothing is computed."""
        return CapturedDeviceStep(self, batch, observer, exchange)


class CapturedDeviceStep:
    """The step of one device as CUDA graphs: for the first, the middle and the last micro-batches.

    The first graph makes the gradients, the others add to them, and the last also exchanges them
    with other ranks. All middle micro-batches replay one graph.
    """

    averages = True

    def __init__(
        self,
        step: DeviceStep,
        batch: Sequence[MicroBatch],
        observer: Observer,
        exchange: NoExchange,
    ) -> None:
        """Capture the step; only the shapes and the loss of a batch matter."""
        (stage,) = step.stages
        give_cached_memory_back((stage.slot.device,))
        self._pool = pool_of_kind(stage.slot.device)
        self._graphs: list[tuple[Graph, Any]] = []
        with self._pool.current(), aliased(stage) as gradients:
            self._read = batch[0].emptied()
            for _ in range(min(len(batch) - 1, 2)):
                with self._pool.capture() as graph:
                    loss = step.run([self._read], observer)
                self._graphs.append((graph, loss))
            with self._pool.capture() as graph, exchange.averaging():
                loss = step.run([self._read], observer, exchange.before_last_backward)
            self._last = graph, loss
        self.gradients = [gradients]

    def replay(self, batch: Sequence[MicroBatch]) -> Any:
        """Run the step, write its gradients to :attr:`gradients`, and return its loss."""
        losses = []
        with self._pool.current():
            for number, one in enumerate(batch):
                is_last = number + 1 == len(batch)
                graph, loss = self._last if is_last else self._graphs[min(number, 1)]
                self._read.image.copy_(one.image, non_blocking=True)
                self._read.target.copy_(one.target, non_blocking=True)
                graph.replay()
                losses.append(weighted(loss, 1.0))  # the next replay overwrites it
            return total_of(losses)


def place(stage: Stage, autocast: torch.dtype | None) -> torch.dtype | None:
    """Move a stage's parameters, all of one type, to its device; return the type.

    The type is None without parameters, as in a stage that only pools and accepts any type.
    """
    parameters = [value for block in stage.blocks for value in block.module.parameters()]
    dtype = parameters[0].dtype if parameters else None
    device = stage.slot.device
    layout = memory_format(device, autocast or dtype or torch.float32)
    for block in stage.blocks:
        if not _is_placed(block.module, device, layout):
            block.module.to(device, memory_format=layout)  # type: ignore[call-overload]
    return dtype


def _is_placed(module: nn.Module, device: torch.device, layout: torch.memory_format) -> bool:
    tensors = (*module.parameters(), *module.buffers())
    return all(
        tensor.device == device
        and (
            tensor.dim() != 5
            # Even if an axis has one voxel, because operations look at its stride.
            or tensor.stride()
            == torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
        )
        for tensor in tensors
    )


_OVERWRITTEN = (
    "the network changes the tensor {} in place, but other blocks read that tensor, too; let it "
    "write into a copy, x.clone()"
)


def _copied_inputs(stage: Stage) -> dict[str, list[str]]:
    """Return the inputs that each block would overwrite although other blocks read them."""
    reads = Counter(name for block in stage.blocks for name in block.inputs)
    shared = {name for name, number in reads.items() if number > 1}
    shared.update(stage.inputs, stage.outputs)
    return {
        block.name: [
            name for name in block.inputs if name in shared and _begins_in_place(block.module)
        ]
        for block in stage.blocks
    }


def _begins_in_place(module: nn.Module) -> bool:
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return bool(getattr(module, "inplace", False))
