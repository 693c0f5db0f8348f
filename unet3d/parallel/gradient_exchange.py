"""What happens to a step's gradients after the pipeline, which does not know about it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from unet3d.parallel.partition import Stage


class GradientExchange(Protocol):
    """What is done with a step's gradients besides computing them."""

    num_replicas: int
    """Over how many replicas the gradients are averaged."""

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all replicas from those of this one; each of them calls it in a step.

        Args:
            sums: On the device of the loss, without a graph; of one shape everywhere.
        """
        ...

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step."""
        ...

    def before_last_backward(self, stage: Stage) -> None:
        """Note that the gradients of a stage are about to be complete."""
        ...

    def all_agree(self, wish: bool) -> bool:
        """Return whether all processes whose messages are part of a step wish to capture it.

        Args:
            wish: This one's wish.
        """
        ...

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients that were computed elsewhere to those of a stage's parameters.

        Args:
            stage: The stage.
            gradients: Gradients by parameter; they may become the parameters' own.
        """
        ...


class NoExchange:
    """A single replica, whose gradients need no exchange."""

    num_replicas = 1

    def total(self, sums: Tensor) -> Tensor:
        """Return the sums: there are no others."""
        return sums

    def step(self) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return nullcontext()

    def before_last_backward(self, stage: Stage) -> None:
        """Do nothing."""

    def all_agree(self, wish: bool) -> bool:
        """Return the wish: nobody else takes part in the step."""
        return wish

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients to the parameters' own; see :class:`GradientExchange`.

        Those of a replayed step become the parameters' own, and the next replay overwrites them:
        whoever wants to keep them beyond ``zero_grad`` must copy them.
        """
        add_to_parameters(gradients)


def add_to_parameters(gradients: Mapping[Tensor, Tensor]) -> None:
    """Add gradients to those of parameters; where there are none, they become the parameters' own.

    Args:
        gradients: Gradients by parameter.
    """
    for parameter, gradient in gradients.items():
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
