"""Values of ``auto`` settings for a CPU, and for runs that begin with other weights.

The defaults in :mod:`unet3d.config.settings` suit a GPU: on two CPU cores they would take a day for
the built-in phantoms. Settings of a user, in a file or as an option, are always kept.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from unet3d.config import Config
from unet3d.errors import counted

CPU_DEFAULTS: tuple[tuple[dict[str, Any], str], ...] = (
    # A tenth of the work of 32 channels, and the memory that two patches of 64^3 voxels then take.
    ({"model.base_channels": 8, "patches.memory_gib": 1.1}, "model.channels"),
    ({"training.epochs": 40}, ""),
    ({"training.steps_per_epoch": 25}, ""),
    # A short training run does not profit from augmentation.
    ({"patches.augmentation": "none"}, "patches.augmentation_details"),
    # Converges in fewer steps; the rate is higher than usual because there are few steps.
    ({"training.optimizer": "adamw", "training.learning_rate": 0.003}, "training.weight_decay"),
)
"""On two cores, a training run with these values takes 5 to 15 minutes for a few dozen to a few
hundred small cases. A group of values is used only if the user sets none of them, nor the setting
named with the group."""

NETWORK = "model.base_channels"
"""The only setting in ``CPU_DEFAULTS`` that ``training.init`` determines."""

RATE_DIVISOR_OF_INIT = 10
"""Divides the learning rate in a run with ``training.init``: the rate for random weights would
destroy trained weights."""


def suited_to(config: Config, devices: Sequence[torch.device]) -> tuple[Config, str | None]:
    """Return settings with values of ``auto`` that suit devices and initial weights.

    The second result is a line that counts the values chosen for a CPU and names one of them; None
    if no value was chosen for a CPU.
    """
    has_init = config.training.init is not None
    taken: dict[str, Any] = {}
    if all(device.type == "cpu" for device in devices):
        taken = {
            key: value
            for together, related in CPU_DEFAULTS
            if all(map(config.is_open, together)) and not (related and config.differs(related))
            for key, value in together.items()
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
    line = None
    if taken:
        line = f"{counted(len(named), 'setting')} chosen to suit a CPU, such as {named[0]}"
    return config.with_values(values) if values else config, line
