"""One stage of the network, forward and backward, for one micro-batch at a time.

The pipeline says when a stage runs; a :class:`StageRunner` runs it. :class:`EagerStage` launches
the stage's operations one by one, as everywhere in PyTorch. :mod:`unet3d.parallel.cuda_graphs` has
the other form, which replays them.

Between two stages there is no autograd graph: a stage's inputs are leaves, and what backward leaves
in them is sent to the stage that made them. So the graph of one micro-batch in one stage can be
walked back as soon as its gradients exist, and is freed at once::

    stage 0   image ──[blocks]── encoder.3.1 ─┬─ skip ...       gradients ──► backward
                                        send  │                            ▲ send
    stage 1                        leaf ◄─────┘──[blocks]── head ── loss ── leaf.grad
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unet3d.config import Recompute
from unet3d.errors import ConfigError
from unet3d.kernels import recomputed_in_backward
from unet3d.model import Block, in_running_order, run_block, run_blocks
from unet3d.model.parts import PartsOfPass, recomputed_parts
from unet3d.parallel.executor import Loss, LossFunction, as_loss
from unet3d.parallel.memory_format import memory_format
from unet3d.parallel.offload import SkipOffload
from unet3d.parallel.partition import Stage
from unet3d.parallel.precision import autocast_dtype, lowered_on, lowering
from unet3d.torch_private import version

Send = Callable[[str, Tensor], None]
"""Takes a tensor by name as soon as it exists: a result, or in backward a gradient."""

Gradients = Mapping[str, Sequence[Tensor]]
"""The gradients of tensors by name, one from each of a tensor's readers."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How the loss of a micro-batch is computed."""

    loss_fn: LossFunction
    """The loss function, a mean over the samples."""
    weight: float
    """The micro-batch's share of the batch's samples."""
    scale: float
    """Factor of the loss before backward, such as a gradient scaler's."""


class StageRunner(Protocol):
    """Runs the actions of one stage."""

    def forward(self, micro_batch: int, inputs: Mapping[str, Tensor], send: Send) -> None:
        """Run the blocks, and keep what backward will need.

        Args:
            micro_batch: Its number, from 0.
            inputs: The stage's inputs by name, on its device, without a graph.
            send: Receives each of the stage's outputs, without a graph.
        """
        ...

    def loss(
        self,
        micro_batch: int,
        logits: Mapping[str, Tensor],
        target: Tensor,
        objective: Objective,
        send: Send,
    ) -> Any:
        """Compute the loss; only the last stage does.

        Args:
            micro_batch: Its number.
            logits: The network's results by name, on the stage's device.
            target: Target of the same samples, on the stage's device.
            objective: The loss, its weight and its scale.
            send: Receives the gradient of each of the logits.

        Returns:
            The weighted :class:`~unet3d.parallel.executor.Loss`, without its scale.
        """
        ...

    def backward(self, micro_batch: int, gradients: Gradients, send: Send) -> None:
        """Add to the gradients of the parameters, and free what forward kept.

        Args:
            micro_batch: Its number.
            gradients: Gradients of the stage's outputs by name, on its device, one from each
                reader.
            send: Receives the gradient of each of the stage's inputs.
        """
        ...


@dataclass(kw_only=True)
class _Alive:
    """What is kept of one micro-batch between forward and backward."""

    leaves: dict[str, Tensor]
    """The stage's inputs."""
    roots: dict[str, GradientEdge]
    """The node of the graph at each output, which outlives the output."""


class EagerStage:
    """A stage whose operations are launched one by one; see :class:`StageRunner`."""

    def __init__(
        self,
        *,
        stage: Stage,
        autocast: torch.dtype | None,
        recompute: Recompute,
        num_alive: int,
        offload: SkipOffload | None,
    ) -> None:
        """Move the stage's parameters to its device.

        Args:
            stage: Slot and blocks; the parameters are all of one precision.
            autocast: Lower precision where the device has it, or None.
            recompute: What is recomputed in backward instead of being kept.
            num_alive: How many micro-batches the stage keeps at a time.
            offload: Offloads the stage's skips to host memory and back; None: no offload.
        """
        self.stage = stage
        self.recompute = recompute
        self.offload = offload
        self._blocks = in_running_order(stage.blocks)
        self._parts = recomputed_parts(self._blocks, num_alive) if recompute == "level" else ()
        self._alive: dict[int, _Alive] = {}
        self.autocast = lowered_on(stage.slot.device, autocast)
        self._dtype = place(stage, self.autocast)
        self._copied = _copied_inputs(stage)

    def forward(self, micro_batch: int, inputs: Mapping[str, Tensor], send: Send) -> None:
        """Run the blocks; see :class:`StageRunner`."""
        leaves = {name: self._as_input(tensor, self.autocast) for name, tensor in inputs.items()}
        for name, leaf in leaves.items():
            if name != "image":
                leaf.requires_grad_()
        sending = _Sending(self.offload, send)
        made = self._compute(leaves, sending)
        for name in self.stage.outputs:
            if name not in sending.sent:
                send(name, made[name].detach())
        roots = {
            name: get_gradient_edge(tensor) for name, tensor in made.items() if tensor.requires_grad
        }
        self._alive[micro_batch] = _Alive(leaves=leaves, roots=roots)

    def loss(
        self,
        micro_batch: int,
        logits: Mapping[str, Tensor],
        target: Tensor,
        objective: Objective,
        send: Send,
    ) -> Loss:
        """Compute the loss; its gradients with respect to the logits start backward."""
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in logits.items()}
        values = list(leaves.values())
        terms = as_loss(objective.loss_fn(values if len(values) > 1 else values[0], target))
        torch.autograd.backward(terms.total * (objective.weight * objective.scale))
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradient, leaf.grad = leaf.grad, None
                send(name, gradient)
        return terms.detached().weighted(objective.weight)

    def backward(self, micro_batch: int, gradients: Gradients, send: Send) -> None:
        """Walk the graph of one micro-batch backward; see :class:`StageRunner`."""
        alive = self._alive.pop(micro_batch)
        for name, leaf in alive.leaves.items():
            if leaf.requires_grad:
                # Sent as soon as it exists, while the rest of the stage still goes backward.
                leaf.register_post_accumulate_grad_hook(_sender(name, send))  # type: ignore[no-untyped-call]
        # A loss may leave out a result, and frozen blocks in front have no graph.
        names = [name for name in alive.roots if gradients[name]]
        # They are added in the order in which they came, so that a run can be repeated.
        values = [functools.reduce(torch.add, gradients[name]) for name in names]
        del gradients
        if names:
            torch.autograd.backward([alive.roots[name] for name in names], values)

    def forget(self) -> None:
        """Free micro-batches that will not go backward, because their step was given up."""
        self._alive.clear()

    def predict(
        self,
        inputs: Mapping[str, Tensor],
        blocks: Sequence[Block],
        outputs: Sequence[str],
        precision: str | None = None,
    ) -> dict[str, Tensor]:
        """Return some outputs of the stage without keeping anything.

        Args:
            inputs: The stage's inputs by name, on its device.
            blocks: The blocks of the stage that run.
            outputs: Names of the results to return.
            precision: What is computed in; None: that of training.
        """
        device, autocast = self.stage.slot.device, self.autocast
        if precision is not None:
            autocast = lowered_on(device, autocast_dtype(precision))
        received = {name: self._as_input(tensor, autocast) for name, tensor in inputs.items()}
        with lowering(device, autocast):
            return run_blocks(blocks, received, outputs, run=self._run)

    def _as_input(self, received: Tensor, autocast: torch.dtype | None) -> Tensor:
        """Return an input in the precision that the stage needs."""
        # Without autocast (a CPU stage fed by a GPU) the blocks need their parameters' precision.
        if autocast is not None or self._dtype is None:
            return received
        return received.to(self._dtype)

    def _compute(self, leaves: dict[str, Tensor], sending: "_Sending") -> dict[str, Tensor]:
        """Run the blocks forward, and keep all that backward will need."""
        sending.wanted = frozenset(self.stage.outputs)
        run = PartsOfPass(self._parts, self._lowered).run if self._parts else self._run
        recomputing = nullcontext() if self.recompute == "off" else recomputed_in_backward()
        versions = {name: version(leaf) for name, leaf in leaves.items()}
        with self._lowered(), recomputing:
            made = run_blocks(self._blocks, dict(leaves), self.stage.outputs, sending.after, run)
        for name, before in versions.items():
            if version(leaves[name]) != before:
                raise ConfigError(_OVERWRITTEN.format(name))
        return made

    def _run(self, block: Block, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run a block; one that may overwrite what others read too gets a copy of that."""
        copies = {name: inputs[name].clone() for name in self._copied[block.name]}
        try:
            return run_block(block, {**inputs, **copies})
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise ConfigError(_OVERWRITTEN.format(" or ".join(block.inputs))) from error

    def _lowered(self) -> AbstractContextManager[None]:
        # Weights are lowered once per micro-batch and stage.
        return lowering(self.stage.slot.device, self.autocast)


def place(stage: Stage, autocast: torch.dtype | None) -> torch.dtype | None:
    """Move a stage's parameters to its device, and return their type.

    Args:
        stage: Slot and blocks; the parameters are all of one precision.
        autocast: Lower precision that its operations have, or None.

    Returns:
        None where there are no parameters, as in a stage that pools: it accepts any type.
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
            # Also where an axis has one voxel, because operations look at its stride.
            or tensor.stride()
            == torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
        )
        for tensor in tensors
    )


_OVERWRITTEN = (
    "the network changes its tensor {} in place, which others read too; let it write into a copy, "
    "x.clone()"
)


def _copied_inputs(stage: Stage) -> dict[str, list[str]]:
    """Return which inputs each block would overwrite though others read them too."""
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


class _Sending:
    """Sends what blocks produce while the stage still goes forward."""

    def __init__(self, offload: SkipOffload | None, send: Send) -> None:
        self.wanted: frozenset[str] = frozenset()
        self.sent: set[str] = set()
        self._offload = offload
        self._send = send

    def after(self, block: Block, made: Tensor) -> None:
        if self._offload is not None:
            self._offload.after(block, made)
        if block.name in self.wanted:
            self._send(block.name, made.detach())
            self.sent.add(block.name)


def _sender(name: str, send: Send) -> Callable[[Tensor], None]:
    """Return a hook that sends a leaf's gradient and removes it from the leaf."""

    def hook(leaf: Tensor) -> None:
        if leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            send(name, gradient)

    return hook
