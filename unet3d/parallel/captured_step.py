"""A training step as CUDA graphs: captured once, replayed often.

For small volumes Python takes longer to launch the thousands of kernels of a step than GPUs take to
run them, even more so where one process keeps several GPUs busy. A CUDA graph captures what one
stage launches for one micro-batch in one action, and a later step replays it in one call: the same
arithmetic on the same memory.

A step is captured by walking its schedule once, and replayed by walking it again. All graphs of a
GPU share one pool of memory. While a graph is captured, memory that earlier ones of the step no
longer need is reused, as in a step that is launched. Because the replay has the same order, no
graph overwrites what another one still needs. So a captured step takes as much memory as a launched
one, however many micro-batches there are.

What one GPU sends to another is copied while the sender already works on. Its memory is therefore
not reused by the sender's next action, and the one after that waits until it has been read::

    GPU 0   F0 ──► F1 ──► (F0 has been read) B0 ──► ...
               copy   copy
    GPU 1           └► F0 ...
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.parallel.cuda_graphs import Graph, GraphPool, pool_of_kind
from unet3d.parallel.executor import ActionKind
from unet3d.parallel.mail import Routes
from unet3d.parallel.partition import Stage
from unet3d.parallel.stage_runner import EagerStage, Gradients, Objective, Send, StageRunner
from unet3d.parallel.static_mail import StaticMail

logger = logging.getLogger(__name__)

Run = Callable[[Sequence[StageRunner], StaticMail], Any]
"""Walks the schedule of a step."""


class CapturedStep:
    """A step of one shape that can be replayed."""

    def __init__(
        self,
        *,
        run: Run,
        stages: Sequence[EagerStage],
        routes: Routes,
        images: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> None:
        """Capture a step; nothing is computed.

        Args:
            run: Walks its schedule.
            stages: The stages to capture.
            routes: The routes between them.
            images: Image of each micro-batch; only their shapes matter.
            targets: Target of each micro-batch; only their shapes matter.

        Raises:
            torch.OutOfMemoryError: There is too little memory for the graphs.
        """
        devices = dict.fromkeys(runner.stage.slot.device for runner in stages)
        _give_cached_memory_back(devices)
        actions = {device: _DeviceActions(pool_of_kind(device)) for device in devices}
        self._mail = StaticMail(routes)
        self._mail.begin(images, targets)
        self._stages = [
            _CapturedStage(runner, actions[runner.stage.slot.device], self._mail)
            for runner in stages
        ]
        self.gradients: list[tuple[Stage, dict[Tensor, Tensor]]] = []
        """Gradients of each stage's parameters, which replays overwrite."""
        try:
            with ExitStack() as aliases:
                for runner in stages:
                    own = aliases.enter_context(aliased(runner.stage))
                    self.gradients.append((runner.stage, own))
                run(self._stages, self._mail)
        finally:
            for runner in stages:
                runner.forget()  # in case the capture ended too early
        self._mail.end_capture()
        for stage in self._stages:
            stage.end_capture()
        logger.debug("captured steps of %d voxels", sum(image.numel() for image in images))

    def replay(self, run: Run, images: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Take the step, and leave its gradients in :attr:`gradients`.

        Args:
            run: Walks its schedule.
            images: Image of each micro-batch.
            targets: Target of each micro-batch.

        Returns:
            The loss.
        """
        for _, gradients in self.gradients:
            for parameter, own in gradients.items():
                if parameter.grad is own:  # and has not been cleared, so it is to be added to
                    parameter.grad = own.clone()
        self._mail.begin(images, targets)
        return run(self._stages, self._mail)


class _DeviceActions:
    """The actions of one device, in order: what they have sent must outlive the next action."""

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.sent: Sequence[Tensor] = ()
        """During capture: what the last action has sent."""
        self._unread: list[list[torch.cuda.Event]] = [[]]
        """During replay: events after the reads of what the last actions have sent."""

    def begin_replay(self) -> None:
        """Wait until what the action before the last has sent has been read."""
        while len(self._unread) > 1:
            for event in self._unread.pop(0):
                self.pool.wait(event)

    def end_replay(self, read: list[torch.cuda.Event]) -> None:
        """Note what an action has sent.

        Args:
            read: Events after the reads.
        """
        self._unread.append(read)


class _CapturedStage:
    """A stage whose actions are captured once and then replayed; see :class:`StageRunner`."""

    def __init__(self, eager: EagerStage, actions: _DeviceActions, mail: StaticMail) -> None:
        self._eager = eager
        self._actions = actions
        self._mail = mail
        self._is_captured = False
        self._graphs: dict[tuple[ActionKind, int], Graph] = {}
        self._sent: dict[tuple[ActionKind, int], list[tuple[str, Tensor]]] = {}
        self._terms: dict[int, Any] = {}

    def end_capture(self) -> None:
        """Replay from now on."""
        self._is_captured = True
        self._actions.sent = ()

    def forward(self, micro_batch: int, inputs: Mapping[str, Tensor], send: Send) -> None:
        if self._is_captured:
            self._replay("forward", micro_batch, send)
            return
        with self._capture("forward", micro_batch, send) as keep:
            self._eager.forward(micro_batch, inputs, keep)

    def loss(
        self,
        micro_batch: int,
        logits: Mapping[str, Tensor],
        target: Tensor,
        objective: Objective,
        send: Send,
    ) -> Any:
        if self._is_captured:
            self._replay("loss", micro_batch, send)
            with self._actions.pool.current():
                return self._terms[micro_batch].weighted(1.0)  # the next step overwrites it
        with self._capture("loss", micro_batch, send) as keep:
            terms = self._eager.loss(micro_batch, logits, target, objective, keep)
        self._terms[micro_batch] = terms
        return terms

    def backward(self, micro_batch: int, gradients: Gradients, send: Send) -> None:
        if self._is_captured:
            self._replay("backward", micro_batch, send)
            return
        with self._capture("backward", micro_batch, send) as keep:
            self._eager.backward(micro_batch, gradients, keep)

    @contextmanager
    def _capture(self, kind: ActionKind, micro_batch: int, send: Send) -> Iterator[Send]:
        pool, sent = self._actions.pool, list[tuple[str, Tensor]]()
        with pool.current(), pool.capture() as graph:
            yield lambda name, tensor: sent.append((name, tensor))
        self._graphs[kind, micro_batch] = graph
        self._sent[kind, micro_batch] = [(name, pool.place_of(tensor)) for name, tensor in sent]
        self._actions.sent = [tensor for _, tensor in sent]
        for name, tensor in sent:
            send(name, tensor)
        self._mail.release(self._eager.stage, kind, micro_batch)

    def _replay(self, kind: ActionKind, micro_batch: int, send: Send) -> None:
        device = self._eager.stage.slot.device
        with self._actions.pool.current():
            self._actions.begin_replay()
            self._graphs[kind, micro_batch].replay()
            self._mail.release(self._eager.stage, kind, micro_batch)
            for name, place in self._sent[kind, micro_batch]:
                send(name, place)
            self._actions.end_replay(self._mail.read.pop(device, []))


@contextmanager
def aliased(stage: Stage) -> Iterator[dict[Tensor, Tensor]]:
    """Replace a stage's parameters by aliases in the context; collect the gradients of these.

    So a capture calls no hook of the parameters, nor any that autograd keeps for them in another
    stream, as it does for ``DistributedDataParallel``. An alias takes the first gradient that
    reaches it as its own, so nothing has to be cleared first, nor added.

    Args:
        stage: The stage. Its parameters are restored after the context.

    Yields:
        The gradient of each parameter that has got one; filled when the context ends.
    """
    gradients: dict[Tensor, Tensor] = {}
    owned = [
        (module, name, parameter)
        for block in stage.blocks
        for module in block.module.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    aliases: dict[Tensor, nn.Parameter] = {}  # one for each, though modules may share it
    for module, name, parameter in owned:
        if parameter not in aliases:
            aliases[parameter] = nn.Parameter(
                parameter.detach(), requires_grad=parameter.requires_grad
            )
        setattr(module, name, aliases[parameter])
    try:
        yield gradients
        gradients |= {owner: own.grad for owner, own in aliases.items() if own.grad is not None}
    finally:
        for module, name, parameter in owned:
            setattr(module, name, parameter)


def _give_cached_memory_back(devices: Iterable[torch.device]) -> None:
    """Return to the devices what launched steps have left in the allocator's cache."""
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.synchronize(device)
    if gpus:
        gc.collect()
        torch.cuda.empty_cache()
