"""Runs a network as stages, with several micro-batches in flight.

The schedule lists what runs when, :class:`~unet3d.parallel.stage_runner.StageRunner` runs it, and
:class:`~unet3d.parallel.mail.Mail` carries tensors between the stages. The list is walked in one
place, :func:`walk`, whether the operations are launched, captured or replayed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unet3d.config import CudaGraphs, Recompute
from unet3d.errors import ConfigError
from unet3d.model import BlockNetwork
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.executor import LossFunction, NoObserver, Observer
from unet3d.parallel.mail import DirectMail, Mail, Routes
from unet3d.parallel.offload import SkipOffload, skip_names
from unet3d.parallel.partition import Stage
from unet3d.parallel.placement import Slot
from unet3d.parallel.schedule import Schedule, all_forward, most_alive, one_forward_one_backward
from unet3d.parallel.stage_runner import EagerStage, Objective, StageRunner
from unet3d.parallel.step_capture import StepCapture
from unet3d.parallel.transfer import Transfer
from unet3d.parallel.whole_batch import (
    SumsStage,
    TotalOfReplicas,
    joins_samples,
    objectives_of_whole,
    refuse_dropout,
)
from unet3d.torch_private import has_dropout


class PipelineExecutor:
    """The stages of one network on their devices; see :class:`~unet3d.parallel.Executor`."""

    def __init__(
        self,
        *,
        module: BlockNetwork,
        stages: Sequence[Stage],
        num_micro_batches: int,
        autocast: torch.dtype | None,
        recompute: Recompute,
        offloads_skips: bool = False,
        cuda_graphs: CudaGraphs = "auto",
        max_captured: int | None = None,
        exchange: Callable[[BlockNetwork, Sequence[Stage]], NoExchange] | None = None,
    ) -> None:
        """Move each stage's parameters to its device.

        Args:
            module: The network, with all its parameters in one precision.
            stages: Its blocks, divided.
            num_micro_batches: Portions of a training batch.
            autocast: Lower precision of the stages whose device has it, or None.
            recompute: What is recomputed in backward instead of being kept.
            offloads_skips: Whether GPU stages keep skips in host memory while nothing reads them.
            cuda_graphs: Whether steps are captured where that is possible and worth it.
            max_captured: Most elements of a micro-batch's image in a step that is captured; None:
                the usual number.
            exchange: Creates the exchange of gradients between replicas; None: one replica.

        Raises:
            ConfigError: The samples of the network are not independent, and there is more than one
                micro-batch; or a level with dropout would be recomputed.
        """
        if num_micro_batches > 1 and not module.samples_are_independent:
            raise ConfigError(
                f"batch normalisation with {num_micro_batches} micro-batches would take its "
                "statistics from portions of the batch; use model.norm=instance"
            )
        if recompute == "level" and has_dropout(module.modules()):
            raise ConfigError(
                "memory.recompute=level would draw other random numbers when it runs a level with "
                "dropout again; use memory.recompute=norm or off"
            )
        self.module = module
        self.stages = tuple(stages)
        self.slots: Sequence[Slot] = tuple(stage.slot for stage in stages)
        self.input_device = stages[0].slot.device
        self.output_device = stages[-1].slot.device
        self.num_micro_batches = num_micro_batches
        self.observer: Observer = NoObserver()
        self._predictions: deque[torch.cuda.Event] = deque()
        self._gpus = {slot.device for slot in self.slots if slot.device.type == "cuda"}
        self._step_ends: list[torch.cuda.Event] = []
        self._routes = Routes(stages, module.outputs())
        skips = skip_names(module.blocks())
        alive = most_alive(num_micro_batches, len(stages))
        self._eager = tuple(
            EagerStage(
                stage=stage,
                autocast=autocast,
                recompute=recompute,
                num_alive=alive[index][index],
                offload=(
                    SkipOffload(stage, skips, lambda tensor: self.observer.resized(tensor))
                    if offloads_skips
                    else None
                ),
            )
            for index, stage in enumerate(stages)
        )
        self.exchange = NoExchange() if exchange is None else exchange(module, self.stages)
        # Offloading resizes memory during a step, which a CUDA graph cannot follow.
        may_capture = cuda_graphs == "auto" and not offloads_skips
        self._capture = (
            StepCapture(self._eager, self._routes, self.exchange, max_captured)
            if may_capture
            else None
        )

    def forward_backward(
        self,
        image: Tensor,
        target: Tensor,
        loss_fn: LossFunction,
        scale: float = 1.0,
        *,
        weight: float = 1.0,
        planes: int | None = None,
    ) -> Any:
        """Add one batch's gradients to the module's; see the protocol.

        Raises:
            RankError: Another rank died or hangs.
            ConfigError: The loss is one of the batch as one, and cannot be taken of this network.
        """
        self.module.check_shape(image)
        images, targets = self._divided(image, target)
        needs_sums = joins_samples(loss_fn) and len(images) > 1
        objectives = self._objectives(loss_fn, images, weight, scale)
        run = partial(walk, one_forward_one_backward, self.stages, objectives)
        captured = None
        if self._capture is not None and not needs_sums:
            captured = self._capture.step(run, images, targets, objectives)
        with self.exchange.step():
            if captured is None:
                self._catch_up()
                if needs_sums:
                    own = self._objectives_by_sums(loss_fn, images, targets, weight, scale)
                    run = partial(walk, one_forward_one_backward, self.stages, own)
                mail = DirectMail(self._routes, images, targets)
                last = self.exchange.before_last_backward
                terms = run(self._eager, mail, observer=self.observer, before_last_backward=last)
                self._step_ends = [torch.cuda.current_stream(g).record_event() for g in self._gpus]
                return terms
            terms = captured.replay(run, images, targets)
            # The last stage comes first, as in a launched step: replicas exchange in that order,
            # and two stages on one GPU must do so in the same order everywhere.
            for stage, gradients in reversed(captured.gradients):
                self.exchange.add(stage, gradients)
            return terms

    def _divided(self, image: Tensor, target: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return images and targets of the micro-batches."""
        count = min(self.num_micro_batches, len(image))
        return image.tensor_split(count), target.tensor_split(count)

    def _objectives(
        self, loss_fn: LossFunction, images: Sequence[Tensor], weight: float, scale: float
    ) -> list[Objective]:
        """Return the objectives of a step in which no sums are needed before."""
        if joins_samples(loss_fn) and self.exchange.num_replicas > 1:
            total, scale = self._total(weight, scale)
            return objectives_of_whole(loss_fn, total, images, scale)
        num_samples = sum(map(len, images))
        shares = [len(image) / num_samples for image in images]
        return [Objective(loss_fn=loss_fn, weight=one, scale=weight * scale) for one in shares]

    def _objectives_by_sums(
        self,
        loss: Any,
        images: Sequence[Tensor],
        targets: Sequence[Tensor],
        weight: float,
        scale: float,
    ) -> list[Objective]:
        """Return the objectives for a loss of the batch as one; all replicas call it in a step."""
        refuse_dropout(self.module)
        total, scale = self._total(weight, scale)
        with torch.no_grad():
            known = total(self._sums(loss, images, targets))
        return objectives_of_whole(loss, lambda own: known, images, scale)

    def _total(self, weight: float, scale: float) -> tuple[TotalOfReplicas, float]:
        """Return what adds up sums, and the scale of a part's loss.

        The exchange takes the mean over replicas, each of which has a part of the sum.
        """
        factor = float(weight > 0)
        total = TotalOfReplicas(exchange=self.exchange, factor=factor)
        return total, scale * factor * self.exchange.num_replicas

    def _sums(self, loss: Any, images: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the sums over all micro-batches, which pass forward for that."""
        objectives = [Objective(loss_fn=loss.sums, weight=1.0, scale=1.0)] * len(images)
        runners = [SumsStage(runner) for runner in self._eager]
        mail = DirectMail(self._routes, images, targets)
        sums: Tensor = walk(
            all_forward, self.stages, objectives, runners, mail, observer=self.observer
        )
        return sums

    @torch.no_grad()
    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return logits without gradients; see the protocol.

        Nothing waits for the result, so the next call's first stage overlaps with this call's
        last; at most as many calls are under way as there are stages.
        """
        self.module.check_shape(image)
        result, *coarse = self.module.outputs()
        tensors = {"image": image}
        for index, runner in enumerate(self._eager):
            stage = runner.stage
            received = {
                name: Transfer(tensors[name], stage.slot.device).wait() for name in stage.inputs
            }
            later = {name for after in self.stages[index + 1 :] for name in after.inputs}
            tensors = {name: value for name, value in tensors.items() if name in later}
            blocks = [block for block in stage.blocks if block.name not in coarse]
            outputs = [name for name in stage.outputs if name not in coarse]
            tensors |= runner.predict(received, blocks, outputs, precision)
        self._hold_back()
        return tensors[result]

    def _catch_up(self) -> None:
        """Wait until the GPUs have come to the end of the step before.

        What one GPU sends to another is kept until it has been read, so a host that queues one step
        after another would fill their memory with what is under way.
        """
        if len(self._gpus) > 1:
            for event in self._step_ends:
                event.synchronize()

    def _hold_back(self) -> None:
        """Wait for an earlier prediction: a fast first stage must not fill the others' memory."""
        if self.output_device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._predictions.append(torch.cuda.current_stream(self.output_device).record_event())
            if len(self._predictions) > len(self.stages):
                self._predictions.popleft().synchronize()


def walk(
    schedule: Schedule,
    stages: Sequence[Stage],
    objectives: Sequence[Objective],
    runners: Sequence[StageRunner],
    mail: Mail,
    *,
    observer: Observer | None = None,
    before_last_backward: Callable[[Stage], None] = lambda stage: None,
) -> Any:
    """Run a schedule: the one place where micro-batches meet stages.

    Args:
        schedule: What runs when.
        stages: The stages in order.
        objectives: Objective of each micro-batch.
        runners: Runner of each stage.
        mail: The mail between them; it has the images and targets already.
        observer: Receives each action; None: there is no observer.
        before_last_backward: Is called where the gradients of a stage are about to be complete.

    Returns:
        The sum of the micro-batches' weighted losses.
    """
    watch = observer or NoObserver()
    terms: list[Any] = []
    num_left = [len(objectives)] * len(stages)
    for action in schedule(len(objectives), len(stages)):
        stage, runner, number = stages[action.stage], runners[action.stage], action.micro_batch
        send_back = partial(mail.send_back, stage, number)
        if action.kind == "forward":
            with watch.during(stage.slot, "forward", number):
                runner.forward(
                    number, mail.inputs(stage, number), partial(mail.send_on, stage, number)
                )
            if stage is stages[-1]:
                with watch.during(stage.slot, "loss", number):
                    target, objective = mail.target(number), objectives[number]
                    terms.append(
                        runner.loss(number, mail.logits(number), target, objective, send_back)
                    )
        else:
            num_left[action.stage] -= 1
            with watch.during(stage.slot, "backward", number):
                if not num_left[action.stage]:
                    before_last_backward(stage)
                runner.backward(number, mail.gradients(stage, number), send_back)
    return sum(terms[1:], start=terms[0])
