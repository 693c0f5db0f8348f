"""Settings that are ``auto``, where a CPU or weights to begin with call for other values.

The defaults in :mod:`unet3d.config.settings` suit a GPU: on two CPU cores they would take a day for
the built-in phantoms. What a user sets is always obeyed, in a file as in an option.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from unet3d.config import Config


@dataclass(frozen=True, kw_only=True)
class CpuDefault:
    """Values that belong together: what the user sets of them keeps all of them out."""

    values: Mapping[str, Any]
    """Dotted key to value."""
    related: tuple[str, ...] = ()
    """Other settings, or sections: values would not suit or not reach what differs from these."""


CPU_DEFAULTS = (
    # A tenth of the work of 32 channels, and the memory that two patches of 64^3 voxels then take.
    CpuDefault(
        values={"model.base_channels": 8, "patches.memory_gib": 1.1},
        related=("model.channels",),
    ),
    CpuDefault(values={"training.epochs": 40}),
    CpuDefault(values={"training.steps_per_epoch": 25}),
    # Too short a training to profit from it.
    CpuDefault(values={"patches.augmentation": "none"}, related=("patches.augmentation_details",)),
    # Converges in fewer steps; the rate is higher than usual for the few that there are.
    CpuDefault(
        values={"training.optimizer": "adamw", "training.learning_rate": 0.003},
        related=("training.weight_decay",),
    ),
)
"""For two cores: 5 to 15 minutes with a few dozen to a few hundred small cases."""

NETWORK = "model.base_channels"
"""The one of the values that a network to begin with brings itself."""

RATE_DIVISOR_OF_INIT = 10
"""Of the learning rate where a training begins with the weights of another one: a rate that suits
random weights would destroy what they have learnt."""


def suited_to(config: Config, devices: Sequence[torch.device]) -> tuple[Config, str | None]:
    """Return settings whose ``auto`` ones suit some devices and weights to begin with.

    The line says what was taken for a CPU; None: nothing.
    """
    has_init = config.training.init is not None
    taken: dict[str, Any] = {}
    if all(device.type == "cpu" for device in devices):
        taken = {
            key: value
            for default in CPU_DEFAULTS
            if all(map(config.is_open, default.values))
            and not any(map(config.differs, default.related))
            for key, value in default.values.items()
            if not (has_init and key == NETWORK)
        }
    values = dict(taken)
    rate = "training.learning_rate"
    if has_init and config.is_open(rate):
        usual = taken.get(rate, config.training.learning_rate)
        values[rate] = float(f"{usual / RATE_DIVISOR_OF_INIT:.6g}")  # without a rounded last digit
    named = [
        f"{key}={str(values[key]).lower()} instead of {str(attrgetter(key)(config)).lower()}"
        for key in taken
    ]
    line = f"{len(named)} setting(s) suit a CPU, such as {named[0]}" if taken else None
    return config.with_values(values) if values else config, line
