"""What happens with a step's gradients behind the pipeline, which knows nothing of it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from unet3d.parallel.partition import Stage


class GradientExchange(Protocol):
    """What is done with a step's gradients beside making them."""

    def step(self) -> AbstractContextManager[None]:
        """Return what is entered around a step."""
        ...

    def before_last_backward(self, stage: Stage) -> None:
        """Take note that the gradients of a stage are about to be complete."""
        ...

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients that were made elsewhere to those of a stage's parameters.

        Args:
            stage: Whose.
            gradients: By parameter; they may become the parameters' own.
        """
        ...


class NoExchange:
    """One replica: its gradients are the gradients."""

    def step(self) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return nullcontext()

    def before_last_backward(self, stage: Stage) -> None:
        """Do nothing."""

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients to the parameters' own; see :class:`GradientExchange`."""
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad is not gradient:
                parameter.grad += gradient
