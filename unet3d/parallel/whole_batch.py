"""Losses of the whole batch as one, such as batch Dice, where parts of it are computed apart.

Such a loss is f(T), where T are sums over all voxels of the batch. Its gradient with respect to the
sums S of one part, a micro-batch or a replica's share, depends on T only. So the part's own loss is
f(S + (T - S)), where the difference is taken as a constant: it has the value of the whole batch's,
and the gradients of all parts add up to the whole batch's.

Before the first backward, T must be known. Replicas with one micro-batch tell one another their
sums between forward and loss, in a captured step by a message that is part of its graph. Several
micro-batches pass forward once before, without gradients: their activations are not kept, so it
takes no more memory, but the time of the forward pass, and such a step is launched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import Tensor

from unet3d.errors import ConfigError
from unet3d.model import BlockNetwork
from unet3d.parallel.exchange import NoExchange
from unet3d.parallel.executor import Loss, LossFunction
from unet3d.parallel.partition import Stage
from unet3d.parallel.stage_runner import EagerStage, Gradients, Objective, Send
from unet3d.torch_private import has_dropout


class LossOfSums(Protocol):
    """A loss function that is made of sums over voxels."""

    @property
    def joins_samples(self) -> bool:
        """Whether the sums are added up over the batch, so that it is no mean over samples."""
        ...

    def sums(self, logits: Any, target: Tensor) -> Tensor:
        """Return sums over the samples, which may be differentiated.

        Args:
            logits: The network's results, as for a :data:`~unet3d.parallel.executor.LossFunction`.
            target: The target of the same samples.
        """
        ...

    def from_sums(self, sums: Tensor) -> Loss:
        """Return the loss.

        Args:
            sums: Over the whole batch.
        """
        ...

    def __call__(self, logits: Any, target: Tensor) -> Loss:
        """Return the loss of a whole batch."""
        ...


def joins_samples(loss_fn: LossFunction | LossOfSums) -> TypeGuard[LossOfSums]:
    """Return whether a loss is that of the batch as one, and not a mean over the samples."""
    return bool(getattr(loss_fn, "joins_samples", False))


def refuse_dropout(module: BlockNetwork) -> None:
    """Refuse networks whose forward pass is another one when it is run again.

    Args:
        module: The network.

    Raises:
        ConfigError: It has dropout.
    """
    if has_dropout(module.modules()):
        raise ConfigError(
            "a loss of the whole batch, such as batch Dice, runs micro-batches forward twice, and "
            "dropout would draw other random numbers; use training.batch_dice=false or one "
            "micro-batch"
        )


@dataclass(frozen=True, kw_only=True)
class TotalOfReplicas:
    """Adds up over replicas; equal where the exchange and the factor are, as captured steps ask."""

    exchange: NoExchange
    factor: float
    """Of this replica's sums: 0 where its samples are no part of the batch."""

    def __call__(self, own: Tensor) -> Tensor:
        """Return sums over the batch."""
        return self.exchange.total(own * self.factor)


def objectives_of_whole(
    loss: LossOfSums, total: Callable[[Tensor], Tensor], images: Sequence[Tensor], scale: float
) -> list[Objective]:
    """Return objectives of micro-batches whose gradients add up to those of the whole batch.

    Args:
        loss: The loss of the batch as one.
        total: Returns the sums over the batch; it is given those of a micro-batch.
        images: Image of each micro-batch.
        scale: Factor of the loss before backward.
    """
    part = _PartOfBatch(loss=loss, total=total)
    num_samples = sum(map(len, images))
    # Each micro-batch has the value of the whole, so their weighted values add up to that. Of its
    # gradient each has its own part, without a weight.
    weights = [len(image) / num_samples for image in images]
    return [Objective(loss_fn=part, weight=weight, scale=scale / weight) for weight in weights]


@dataclass(frozen=True, kw_only=True)
class _PartOfBatch:
    """The loss of the batch as a function of what one part contributes."""

    loss: LossOfSums
    total: Callable[[Tensor], Tensor]

    def __call__(self, logits: Any, target: Tensor) -> Loss:
        own = self.loss.sums(logits, target)
        others = self.total(own.detach()) - own.detach()
        return self.loss.from_sums(own + others)


class SumsStage:
    """A stage that goes forward only, for sums; see :class:`StageRunner`."""

    def __init__(self, eager: EagerStage) -> None:
        """Take a stage.

        Args:
            eager: Runs its blocks.
        """
        self._eager = eager

    @property
    def stage(self) -> Stage:
        """The stage."""
        return self._eager.stage

    def forward(self, micro_batch: int, inputs: Mapping[str, Tensor], send: Send) -> None:
        """Run the blocks, and keep nothing."""
        made = self._eager.predict(inputs, self.stage.blocks, self.stage.outputs)
        for name, tensor in made.items():
            send(name, tensor)

    def loss(
        self,
        micro_batch: int,
        logits: Mapping[str, Tensor],
        target: Tensor,
        objective: Objective,
        send: Send,
    ) -> Any:
        """Return the sums; nothing goes back."""
        values = list(logits.values())
        sums: Any = objective.loss_fn(values if len(values) > 1 else values[0], target)
        return sums

    def backward(self, micro_batch: int, gradients: Gradients, send: Send) -> None:
        """Refuse: no schedule that goes forward only asks for it."""
        raise NotImplementedError("sums are taken without gradients")
