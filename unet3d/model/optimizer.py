"""The optimizer, its learning rate, and the scaler of float16."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.config import TrainingSettings

POWER = 0.9
MOMENTUM = 0.99
MAX_GRADIENT_NORM = 12.0
"""Largest norm of all gradients together; larger gradients are clipped to it. nnU-Net's value, like
the momentum."""

WARMUP_STEPS = 250
"""Warm-up steps of a run with ``training.init``: a new head has meaningless gradients."""

MIN_TRAININGS_OF_WARMUP = 10
"""A warm-up takes at most a tenth of a run; otherwise a short run would end before it learns."""

STATES = {
    "sgd": frozenset({"momentum_buffer"}),
    "adamw": frozenset({"step", "exp_avg", "exp_avg_sq"}),
}
"""Names of the tensors that each optimizer keeps for a parameter."""


class Optimization:
    """Turns gradients into steps.

    The learning rate falls from its start to 0 as ``(1 - step / num_steps) ** 0.9``. During a
    warm-up it is multiplied by a factor that rises linearly to 1. Both are pure functions of the
    step, so they have no state to save.
    """

    def __init__(self, module: nn.Module, settings: TrainingSettings, precision: str) -> None:
        """Create the optimizer of a placed network, whose parameters stay on their devices.

        In the precision ``float16`` gradients are scaled.
        """
        self.module = module
        self.settings = settings
        parameters = list(module.parameters())
        self.optimizer: torch.optim.Optimizer
        if settings.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                parameters,
                lr=settings.learning_rate,
                momentum=MOMENTUM,
                weight_decay=settings.weight_decay,
                nesterov=True,
                fused=True,  # one pass over each parameter
            )
        else:
            self.optimizer = torch.optim.AdamW(
                parameters,
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                fused=True,
            )
        first = parameters[0].device
        self.scaler = torch.amp.GradScaler(first.type, enabled=precision == "float16")
        # The executor scales the loss itself; this call only creates the scaler's tensors.
        self.scaler.scale(torch.zeros((), device=first))

    @property
    def scale(self) -> float:
        """Factor of the loss before backward."""
        scale: float = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        return scale

    def learning_rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate of one of the steps 0 to ``num_steps`` - 1 of a training run."""
        rate: float = self.settings.learning_rate * (1 - step / num_steps) ** POWER
        if self.settings.init is None:
            return rate
        warmup_steps = min(WARMUP_STEPS, num_steps // MIN_TRAININGS_OF_WARMUP)
        return rate * min(1.0, (step + 1) / (warmup_steps + 1))

    def step(self, learning_rate: float) -> None:
        """Clip the gradients, take a step, and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRADIENT_NORM)
        self._begin_momentum()
        # With the scaler off, the first is a plain step and the second does nothing.
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _begin_momentum(self) -> None:
        """Set the momentum of parameters that have none yet to zero.

        PyTorch's fused SGD needs momentum for all parameters or none, and leaves it uninitialised
        if the very first gradient overflows.
        """
        if self.settings.optimizer != "sgd":
            return
        for parameter in self.module.parameters():
            state = self.optimizer.state[parameter] if parameter.grad is not None else None
            if state is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, object]:
        """Return the state for resuming a training run."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, onto the parameters' devices.

        Options such as weight decay keep their values from the settings. Raises ValueError if the
        state belongs to another optimizer or network.
        """
        own, stored = self.optimizer.state_dict()["param_groups"], state["optimizer"]
        if [group["params"] for group in own] != [
            list(group["params"]) for group in stored["param_groups"]
        ]:
            raise ValueError("it has another number of parameters")
        self.optimizer.load_state_dict({"state": stored["state"], "param_groups": own})
        for parameter, values in self.optimizer.state.items():
            self._check_state(parameter, values)
            for name, value in values.items():
                # Other devices may store kernels in another memory order, and a fused step ignores
                # strides.
                if value is not None and name != "step":
                    values[name] = torch.empty_like(parameter).copy_(value)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def _check_state(self, parameter: Tensor, values: dict[str, Any]) -> None:
        is_sgd, known = self.settings.optimizer == "sgd", STATES[self.settings.optimizer]
        if not (values.keys() <= known if is_sgd else values.keys() == known):
            raise ValueError(f"it holds {', '.join(values)}, which belongs to another optimizer")
        for name, value in values.items():
            wanted = () if name == "step" else parameter.shape
            if value is not None and value.shape != wanted:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(wanted)}")
