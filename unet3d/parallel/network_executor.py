"""A network on the devices of one process: one device, or a pipeline over several."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unet3d.errors import ConfigError
from unet3d.model import BlockNetwork
from unet3d.parallel.exchange import NoExchange, add_gradients
from unet3d.parallel.executor import LossFunction, NoObserver, Observer
from unet3d.parallel.graph import StepCapture
from unet3d.parallel.offload import SkipOffload, skip_names
from unet3d.parallel.partition import Stage, default_cuts, make_stages
from unet3d.parallel.pipeline import Pipeline
from unet3d.parallel.placement import Layout, Slot
from unet3d.parallel.schedule import most_alive
from unet3d.parallel.step import DeviceStep, MicroBatch, PlacedBlocks, total_of
from unet3d.parallel.whole_batch import PartOfBatch, joins_samples
from unet3d.torch_private import has_dropout


class NetworkExecutor:
    """The network of one process; see :class:`~unet3d.parallel.Executor`."""

    def __init__(
        self,
        module: BlockNetwork,
        layout: Layout,
        exchange: Callable[[Sequence[Stage]], NoExchange] | None = None,
        max_captured: int | None = None,
    ) -> None:
        """Move each stage's parameters, all of one type, to its device.

        ``exchange`` creates the exchange of gradients between ranks (None: there is one rank);
        ``max_captured`` is :class:`StepCapture`'s.
        """
        if layout.num_micro_batches > 1 and not module.samples_are_independent:
            raise ConfigError(
                f"batch normalisation with {layout.num_micro_batches} micro-batches would take its "
                "statistics from portions of the batch; use model.norm=instance"
            )
        if layout.recompute == "level" and has_dropout(module.modules()):
            raise ConfigError(
                "memory.recompute=level would draw other random numbers when it runs a level with "
                "dropout again; use memory.recompute=norm or off"
            )
        cuts = default_cuts(module, layout) if layout.cuts is None else layout.cuts
        blocks = module.blocks()
        self.stages = make_stages(blocks, layout.devices, cuts, module.outputs())
        self.module = module
        self.slots: Sequence[Slot] = tuple(stage.slot for stage in self.stages)
        self.input_device = self.slots[0].device
        self.output_device = self.slots[-1].device
        self.observer: Observer = NoObserver()
        self.num_micro_batches = layout.num_micro_batches
        offloads = layout.offload == "skips"
        own = weakref.proxy(self)  # a circle would keep process groups after they are gone
        alive = most_alive(layout.num_micro_batches, len(self.stages))
        placed = [
            PlacedBlocks(
                stage,
                autocast=layout.autocast,
                recompute=layout.recompute,
                num_alive=alive[index][index],
                offload=(
                    SkipOffload(stage, skip_names(blocks), lambda one: own.observer.resized(one))
                    if offloads
                    else None
                ),
            )
            for index, stage in enumerate(self.stages)
        ]
        self._step = DeviceStep(module, placed[0]) if len(placed) == 1 else Pipeline(module, placed)
        self.exchange = NoExchange() if exchange is None else exchange(self.stages)
        self._capture: StepCapture | None = None
        # Offloading resizes memory during a step, which a CUDA graph cannot follow.
        if layout.captures and not offloads:
            capture = partial(self._step.capture, exchange=self.exchange)
            self._capture = StepCapture(self.stages, capture, self.exchange.all_agree, max_captured)

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
        """Add one batch's gradients to the module's; see the protocol."""
        self.module.check_shape(image)
        batch = self._divided(image, target, loss_fn, weight * scale)
        whole = PartOfBatch(loss=loss_fn, exchange=self.exchange, factor=float(weight > 0))
        joins = joins_samples(loss_fn)
        needs_sums = joins and len(batch) > 1
        if joins and not needs_sums and self.exchange.num_replicas > 1:
            batch = whole.of(batch, scale)
        with self.exchange.step():
            captured = None
            if self._capture is not None and not needs_sums:
                captured = self._capture.of(batch, self.observer)
            for gradients in captured.gradients if captured is not None else ():
                for parameter, own in gradients.items():
                    if parameter.grad is own:  # and has not been cleared, so it is to be added to
                        parameter.grad = own.clone()
            with self.exchange.apart():
                if captured is not None:
                    with nullcontext() if captured.averages else self.exchange.averaging():
                        loss = captured.replay(batch)
                        for gradients in captured.gradients:
                            add_gradients(gradients)
                        return loss
                if needs_sums:
                    known = whole.total(self._sums(batch))
                    batch = replace(whole, known=known).of(batch, scale)
                with self.exchange.averaging():
                    last = self.exchange.before_last_backward
                    return self._step.run(batch, self.observer, last)

    @torch.no_grad()
    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return logits without gradients; see the protocol."""
        self.module.check_shape(image)
        return self._step.predict(image, precision)

    def _divided(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float
    ) -> list[MicroBatch]:
        count = min(self.num_micro_batches, len(image))
        return [
            MicroBatch(
                image=own,
                target=its_target,
                loss_fn=loss_fn,
                weight=len(own) / len(image),
                scale=scale,
            )
            for own, its_target in zip(
                image.tensor_split(count), target.tensor_split(count), strict=True
            )
        ]

    def _sums(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Return the sums of a loss over all micro-batches, which pass forward for that."""
        if has_dropout(self.module.modules()):
            raise ConfigError(
                "a loss of the whole batch, such as batch Dice, runs micro-batches forward twice, "
                "and dropout would draw other random numbers; use training.batch_dice=false or one "
                "micro-batch"
            )
        sums: Tensor = total_of([self._step.sums(one) for one in batch])
        return sums
