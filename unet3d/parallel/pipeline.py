"""A network as stages on several devices, with several micro-batches in flight."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.model import BlockNetwork
from unet3d.parallel.captured_pipeline import CapturedPipeline
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.executor import Observer
from unet3d.parallel.mail import Mail
from unet3d.parallel.partition import Stage
from unet3d.parallel.pipeline_stage import PipelineStage, walk
from unet3d.parallel.step import MicroBatch, PlacedBlocks
from unet3d.parallel.transfer import Transfer


class Pipeline:
    """The step of a network whose stages have a device each."""

    def __init__(self, module: BlockNetwork, placed: Sequence[PlacedBlocks]) -> None:
        """Take the network and its blocks, divided into stages."""
        self.stages = tuple(blocks.stage for blocks in placed)
        self._runners = [PipelineStage(blocks) for blocks in placed]
        self._results = module.outputs()
        self._gpus = {s.slot.device for s in self.stages if s.slot.device.type == "cuda"}
        self._step_ends: list[torch.cuda.Event] = []
        self._predictions: deque[torch.cuda.Event] = deque()

    def run(
        self,
        batch: Sequence[MicroBatch],
        observer: Observer | None = None,
        before_last_backward: Callable[[Stage], None] = lambda stage: None,
    ) -> Any:
        """Add the gradients of a batch to the parameters', and return its weighted loss.

        What one GPU sends to another is kept until it has been read, so a host that queues one step
        after another would fill their memory with what is under way: it waits for the step before.
        """
        if len(self._gpus) > 1:
            for event in self._step_ends:
                event.synchronize()
        mail = Mail(self.stages, self._results, batch)
        loss = walk(self._runners, mail, batch, observer, before_last_backward)
        self._step_ends = [torch.cuda.current_stream(g).record_event() for g in self._gpus]
        return loss

    def sums(self, one: MicroBatch) -> Any:
        """Return the sums of a micro-batch's loss, without gradients."""
        made = self._forward(one.image)
        return one.sums([made[name] for name in self._results])

    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return the logits of the full resolution.

        Nothing waits for the result, so the next call's first stage overlaps with this call's last;
        at most as many calls are under way as there are stages, so that a fast first stage does not
        fill the memory of the others.
        """
        result, *coarse = self._results
        logits = self._forward(image, coarse, precision)[result]
        if logits.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._predictions.append(torch.cuda.current_stream(logits.device).record_event())
            if len(self._predictions) > len(self.stages):
                self._predictions.popleft().synchronize()
        return logits

    def capture(
        self, batch: Sequence[MicroBatch], observer: Observer, exchange: NoExchange
    ) -> CapturedPipeline:
        """Capture the step of a batch whose micro-batches have one shape; nothing is computed."""
        return CapturedPipeline(self._runners, self._results, batch, observer)

    def _forward(
        self, image: Tensor, left_out: Sequence[str] = (), precision: str | None = None
    ) -> dict[str, Tensor]:
        """Return the results but for those left out, on the last stage's device."""
        tensors = {"image": image}
        for index, runner in enumerate(self._runners):
            device = runner.stage.slot.device
            received = {
                name: Transfer(tensors[name], device).wait() for name in runner.stage.inputs
            }
            later = {name for after in self.stages[index + 1 :] for name in after.inputs}
            later.update(self._results)
            tensors = {name: value for name, value in tensors.items() if name in later}
            tensors |= runner.blocks.predict(received, left_out, precision)
        device = self.stages[-1].slot.device
        return {
            name: Transfer(tensors[name], device).wait()
            for name in self._results
            if name not in left_out
        }
