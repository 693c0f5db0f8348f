"""``nn.DataParallel``: a replica on each GPU, in one process, with a thread for each device."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import ConfigError
from unet3d.memory.meter import Observer, Slot
from unet3d.model import BlockNetwork
from unet3d.parallel.losses import LossFunction, as_loss, weighted
from unet3d.parallel.precision import autocast_dtype, lowering, memory_format


class DataParallelExecutor:
    """Copies of a network in threads; see :class:`~unet3d.parallel.Executor`.

    The network stays on the first device and is copied to the others in every forward pass; the
    output device gathers the logits and computes the loss of the whole batch.
    """

    def __init__(
        self,
        module: BlockNetwork,
        devices: Sequence[torch.device],
        output_device: torch.device | None,
        autocast: torch.dtype | None,
    ) -> None:
        """Move the network to the first device, which is also the default output device."""
        if not module.samples_are_independent:
            raise ConfigError(
                f"batch normalisation with {len(devices)} replicas would take its statistics from "
                "portions of the batch; use model.norm=instance"
            )
        # cuDNN caches its fastest algorithms per thread, and each step starts new threads.
        torch.backends.cudnn.benchmark = False
        computed_in = autocast or next(iter(module.parameters())).dtype
        layout = memory_format(devices[0], computed_in)
        self.module = module.to(devices[0], memory_format=layout)  # type: ignore[call-overload]
        self.input_device = devices[0]
        self.output_device = output_device or devices[0]
        names = tuple(block.name for block in module.blocks())
        self.slots: Sequence[Slot] = tuple(
            Slot(index=index, device=device, blocks=names) for index, device in enumerate(devices)
        )
        self.observer = Observer()
        self._network = _Lowered(self, autocast)
        self._replicated: nn.Module = nn.DataParallel(
            self._network, [device.index or 0 for device in devices], self.output_device
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
        """Add one batch's gradients to the module's; see the protocol."""
        self.module.check_shape(image)
        logits = self._replicated(image)
        with self.observer.during(self.slots[0], "loss", 0):
            terms = as_loss(loss_fn(logits, target))
        with self.observer.during(self.slots[0], "backward", 0):
            torch.autograd.backward(terms.total * (scale * weight))
        return weighted(terms, 1.0)

    @torch.no_grad()
    def predict(self, image: Tensor, precision: str | None = None) -> Tensor:
        """Return logits without gradients, from the first device alone; see the protocol."""
        was_training = self.module.training
        self.module.eval()
        try:
            logits: Tensor = self._network(image, precision)
        finally:
            self.module.train(was_training)
        return logits.to(self.output_device)


class _Lowered(nn.Module):
    """The network in lower precision; autocast must be entered in each replica's own thread."""

    def __init__(self, executor: DataParallelExecutor, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = executor.module
        self._autocast = autocast
        self._executor = weakref.proxy(executor)  # which owns this object

    def forward(self, image: Tensor, precision: str | None = None) -> Tensor | tuple[Tensor, ...]:
        autocast = self._autocast if precision is None else autocast_dtype(precision)
        (slot,) = (one for one in self._executor.slots if one.device == image.device)
        watched = self._executor.observer.during(slot, "forward", 0)
        with watched, lowering(image.device, autocast):
            return self.network(image)  # type: ignore[no-any-return]
