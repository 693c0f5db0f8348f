"""The stages of a pipeline, and its schedule: which micro-batch runs where and when.

Between two stages there is no autograd graph: a stage's inputs are leaves, and their gradients are
sent to the stage that made them. So backward of one micro-batch in one stage runs as soon as the
gradients of its outputs exist, and frees the graph::

    stage 0   image ──[blocks]── encoder.3.1 ─┬─ skip ...       gradients ──► backward
                                        send  │                            ▲ send
    stage 1                        leaf ◄─────┘──[blocks]── head ── loss ── leaf.grad

A schedule is a list of actions in the order in which one process queues them. Devices work
asynchronously, so two actions on different stages overlap as far as their data allow. In timetables
a column is one unit of time, F2 is micro-batch 2 forward, B2 backward.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from unet3d.memory.meter import Observer
from unet3d.model import Block
from unet3d.parallel.losses import added, total_of
from unet3d.parallel.mail import Mail
from unet3d.parallel.partition import Stage
from unet3d.parallel.step import MicroBatch, PlacedBlocks

Send = Callable[[str, Tensor], None]
"""Receives a tensor by name as soon as it exists: an output, or in backward a gradient."""


class PipelineStage:
    """Runs the actions of one stage, for one micro-batch at a time."""

    def __init__(self, blocks: PlacedBlocks) -> None:
        """Take the blocks of the stage."""
        self.stage = blocks.stage
        self.blocks = blocks
        self._alive: dict[int, tuple[dict[str, Tensor], dict[str, GradientEdge]]] = {}
        """For each micro-batch before its backward: the inputs, and the graph node of each output,
        which outlives the output."""

    def forward(self, number: int, received: Mapping[str, Tensor], send: Send) -> None:
        """Run the blocks, send each output, and keep what backward will need.

        Inputs and outputs are on the stage's device, without a graph.
        """
        leaves = self.blocks.as_inputs(received)
        for name, leaf in leaves.items():
            if name != "image":
                leaf.requires_grad_()
        sent = set()

        def after(block: Block, made: Tensor) -> None:
            if block.name in self.stage.outputs:
                send(block.name, made.detach())
                sent.add(block.name)

        made = self.blocks.forward(leaves, after)
        for name in self.stage.outputs:
            if name not in sent:
                send(name, made[name].detach())
        roots = {
            name: get_gradient_edge(tensor) for name, tensor in made.items() if tensor.requires_grad
        }
        self._alive[number] = leaves, roots

    def loss(
        self, number: int, logits: Mapping[str, Tensor], target: Tensor, own: MicroBatch, send: Send
    ) -> Any:
        """Return the weighted loss of a micro-batch, and send the gradient of each of its logits.

        Only the last stage has a loss. Logits and target are on its device.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in logits.items()}
        scaled, loss = own.loss(list(leaves.values()), target)
        torch.autograd.backward(scaled)
        for name, leaf in leaves.items():
            _send_gradient(name, send, leaf)
        return loss

    def backward(self, number: int, gradients: Mapping[str, Sequence[Tensor]], send: Send) -> None:
        """Add to the gradients of the parameters, send the inputs' gradients, and free the graph.

        Each output has one gradient from each of its readers.
        """
        leaves, roots = self._alive.pop(number)
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                # Sent as soon as it exists, while the rest of the stage still goes backward.
                leaf.register_post_accumulate_grad_hook(partial(_send_gradient, name, send))  # type: ignore[no-untyped-call]
        # A loss may leave out a result, and frozen blocks in front have no graph.
        names = [name for name in roots if gradients[name]]
        # They are added in order of arrival, so that a run is reproducible.
        values = [added(gradients[name]) for name in names]
        del gradients
        if names:
            torch.autograd.backward([roots[name] for name in names], values)

    def forget(self) -> None:
        """Free the micro-batches of an aborted step."""
        self._alive.clear()


def _send_gradient(name: str, send: Send, leaf: Tensor) -> None:
    """Send the gradient of a leaf without keeping it."""
    if leaf.grad is not None:
        gradient, leaf.grad = leaf.grad, None
        send(name, gradient)


def walk(
    runners: Sequence[PipelineStage],
    mail: Mail,
    batch: Sequence[MicroBatch],
    observer: Observer,
    before_last_backward: Callable[[Stage], None] = lambda stage: None,
) -> Any:
    """Run the schedule of a step, and return its weighted loss.

    Launched and captured steps both use it. ``before_last_backward`` is called just before the
    gradients of a stage are complete.
    """
    losses: list[Any] = []
    num_left = [len(batch)] * len(runners)
    try:
        for action in one_forward_one_backward(len(batch), len(runners)):
            runner, number = runners[action.stage], action.micro_batch
            stage = runner.stage
            send_back = partial(mail.send_back, stage, number)
            if action.kind == "forward":
                with observer.during(stage.slot, "forward", number):
                    send_on = partial(mail.send_on, stage, number)
                    runner.forward(number, mail.inputs(stage, number), send_on)
                if runner is runners[-1]:
                    with observer.during(stage.slot, "loss", number):
                        logits, target = mail.logits(number), mail.target(number)
                        losses.append(runner.loss(number, logits, target, batch[number], send_back))
            else:
                num_left[action.stage] -= 1
                with observer.during(stage.slot, "backward", number):
                    if not num_left[action.stage]:
                        before_last_backward(stage)
                    runner.backward(number, mail.gradients(stage, number), send_back)
    finally:  # an aborted step leaves graphs
        for runner in runners:
            runner.forget()
    return total_of(losses)


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    stage: int


def one_forward_one_backward(num_micro_batches: int, num_stages: int) -> Iterator[Action]:
    """Yield the eager 1F1B schedule (Zhuang et al., arXiv 2211.05322).

    Each stage starts one micro-batch for itself and two for each later stage, then alternates. So
    stage 0 keeps the activations of at most ``2 * num_stages - 1`` micro-batches, and the last
    stage of one, no matter how many micro-batches a batch has::

        stage 0   F0 F1 F2 B0 F3 B1 .. B2 .. B3
        stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    With one micro-batch for each later stage, as in PipeDream-flush (arXiv 2006.09503), stages
    would wait for every copy between them. With one stage this is gradient accumulation: F0 B0 F1
    B1 and so on. The orders of the stages are merged as if every action took one unit of time, so
    no device waits for work that the process could have queued earlier.
    """
    per_stage = []
    for stage in range(num_stages):
        ahead = min(num_micro_batches, 2 * (num_stages - stage) - 1)
        order = deque(Action("forward", i, stage) for i in range(ahead))
        for i in range(num_micro_batches):
            order.append(Action("backward", i, stage))
            if i + ahead < num_micro_batches:
                order.append(Action("forward", i + ahead, stage))
        per_stage.append(order)
    done: set[Action] = set()
    while any(per_stage):
        now = [
            order.popleft() for order in per_stage if order and _can_run(order[0], num_stages, done)
        ]
        yield from now
        done.update(now)


def _can_run(action: Action, num_stages: int, done: set[Action]) -> bool:
    """Return whether the action whose result this action reads is done."""
    source = action.stage + (-1 if action.kind == "forward" else 1)
    return not 0 <= source < num_stages or action._replace(stage=source) in done
