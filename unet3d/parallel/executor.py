"""The interface of a network that is placed on devices.

Here is also the executor of one process: on one device, or as a pipeline over several.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unet3d.errors import ConfigError
from unet3d.memory.meter import Observer, Slot
from unet3d.model import BlockNetwork
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.graph import StepCapture
from unet3d.parallel.losses import LossFunction, PartOfBatch, added, joins_samples
from unet3d.parallel.offload import SkipOffload, skip_names
from unet3d.parallel.partition import Stage, default_cuts, make_stages
from unet3d.parallel.pipeline import Pipeline
from unet3d.parallel.placement import Layout
from unet3d.parallel.step import DeviceStep, MicroBatch, PlacedBlocks
from unet3d.torch_private import has_dropout


class Executor(Protocol):
    """A network that is placed on devices, for training and prediction.

    Every placement is transparent: loss and gradients are as with the plain network on the whole
    batch.
    """

    @property
    def module(self) -> BlockNetwork:
        """The network; its parameters have their plain names, whatever the devices."""
        ...

    input_device: torch.device
    """The device where images are expected."""
    output_device: torch.device
    """The device where targets are expected and logits are returned."""
    slots: Sequence[Slot]
    """The slots; the memory report has a row for each."""
    observer: Observer
    """Receives every action of :meth:`forward_backward` that is launched."""

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
        """Add the gradients of one batch to the module's.

        Args:
            image: (N, C, X, Y, Z), or another input of the network, on the input device.
            target: (N, ...) on the output device, such as class indices (N, X, Y, Z).
            loss_fn: A mean over samples, or a loss of the whole batch; called on the device of the
                logits.
            scale: Factor of the loss before backward, for a gradient scaler. The returned loss does
                not include it.
            weight: This replica's share of the batch's samples, divided by the mean share; see
                :attr:`unet3d.patches.patches.Batch.weight`. 0: the samples do not count. The
                returned loss does not include it.
            planes: Number of planes along X of the whole volume, if image and target are this
                process's slab of it; None: they are whole. Only
                :class:`~unet3d.parallel.spatial.executor.SpatialExecutor` takes slabs.

        Returns:
            The loss of the batch, a named tuple without a graph on the output device; a plain
            scalar becomes its ``total``. The host does not wait for it.
        """
        ...

    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return logits (N, K, ...) on the output device, without gradients.

        With batch normalisation or dropout, call ``executor.module.eval()`` first, as usual.

        Args:
            image: (N, C, X, Y, Z), or another input of the network, on the input device.
            precision: Resolved number type of activations, such as ``float32``; None: as in
                training.
        """
        ...


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
        ``max_captured`` is ``max_elements`` of :class:`StepCapture`.
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
        self.observer = Observer()
        self.num_micro_batches = layout.num_micro_batches
        offloads = layout.offload == "skips"
        own = weakref.proxy(self)  # no reference cycle, which would keep process groups alive
        placed = [
            PlacedBlocks(
                stage,
                autocast=layout.autocast,
                recompute=layout.recompute,
                num_alive=min(layout.num_micro_batches, len(self.stages) - index),
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
            batch = _parts(whole, batch, scale)
        with self.exchange.step():
            captured = None
            if self._capture is not None and not needs_sums:
                captured = self._capture.of(batch, self.observer)
            with _apart(self.module):
                if captured is not None:
                    with nullcontext() if captured.averages else self.exchange.averaging():
                        loss = captured.replay(batch)
                        for gradients in captured.gradients:
                            for parameter, own in gradients.items():
                                # The next replay overwrites ``own``; stages may share a parameter.
                                others = parameter.grad
                                parameter.grad = own if others is None else others.add_(own)
                        return loss
                if needs_sums:
                    known = whole.total(self._sums(batch))
                    batch = _parts(replace(whole, known=known), batch, scale)
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
        portions = zip(image.tensor_split(count), target.tensor_split(count), strict=True)
        return [
            MicroBatch(
                image=own, target=of_own, loss_fn=loss_fn, weight=len(own) / len(image), scale=scale
            )
            for own, of_own in portions
        ]

    def _sums(self, batch: Sequence[MicroBatch]) -> Tensor:
        """Return the sums of a loss over all micro-batches, from an extra forward pass."""
        if has_dropout(self.module.modules()):
            raise ConfigError(
                "a loss of the whole batch, such as batch Dice, runs micro-batches forward twice, "
                "and dropout would draw other random numbers; use training.batch_dice=false or one "
                "micro-batch"
            )
        return added([self._step.sums(one) for one in batch])


@contextmanager
def _apart(module: BlockNetwork) -> Iterator[None]:
    """Set existing gradients aside during a step, and add the step's gradients to them afterwards.

    Otherwise ranks would average them again, or a replay would overwrite them.
    """
    before = {one: one.grad.clone() for one in module.parameters() if one.grad is not None}
    for parameter in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _parts(whole: PartOfBatch, batch: Sequence[MicroBatch], scale: float) -> list[MicroBatch]:
    """Return micro-batches whose gradients add up to the whole batch's, times a scale.

    Each micro-batch has the loss value of the whole batch, so the weighted values add up to it.
    Each has its own part of the gradient, without a weight; the exchange takes the mean over
    replicas.
    """
    factor = scale * whole.factor * whole.exchange.num_replicas
    return [replace(one, loss_fn=whole, scale=factor / one.weight) for one in batch]
