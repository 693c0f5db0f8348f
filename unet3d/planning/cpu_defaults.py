"""What a training on CPUs takes for settings that its user leaves open.

The defaults in :mod:`unet3d.config.settings` suit a GPU: on two CPU cores they would take a day for
the built-in phantoms. Who names a configuration has decided, so these values are taken only where
there is none.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.config import RATE_DIVISOR_OF_INIT, Config, ParallelSettings, load_config
from unet3d.errors import some
from unet3d.parallel import ParallelDims

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CpuDefault:
    """Values that belong together: what the user sets of them keeps all of them out."""

    values: Mapping[str, Any]
    """Dotted key to value."""
    related: tuple[str, ...] = ()
    """Other settings, or sections, that these values would not suit or not reach."""


CPU_DEFAULTS = (
    # A tenth of the work of 32 channels, and the memory that two patches of 64^3 voxels then take.
    CpuDefault(
        values={"model.base_channels": 8, "patches.memory_gib": 1.1},
        related=("model.channels", "model.max_channels"),
    ),
    CpuDefault(values={"training.epochs": 40}),
    CpuDefault(values={"training.steps_per_epoch": 25}),
    # Too short a training to profit from it.
    CpuDefault(values={"patches.augmentation.enabled": False}, related=("patches.augmentation",)),
    # Converges in fewer steps; the rate is higher than usual for the few that there are.
    CpuDefault(
        values={"training.optimizer": "adamw", "training.learning_rate": 0.003},
        related=("training.momentum", "training.weight_decay"),
    ),
)
"""For two cores: 5 to 15 minutes with a few dozen to a few hundred small cases."""

NETWORK = "model.base_channels"
"""The one of the values that a network to begin with brings itself."""

NUM_SHOWN = 3
"""How many of the values are named at the start; a run's ``config.yaml`` has all."""


def load_settings(
    path: Path | None,
    changes: Iterable[str],
    dims_of: Callable[[ParallelSettings], ParallelDims],
    say: Callable[[str], object] = logger.info,
) -> Config:
    """Read settings, those that suit a CPU where there is no configuration and no GPU is used.

    Args:
        path: A configuration, which decides alone; None: there is none.
        changes: The user's ``section.key=value`` strings, which always stand.
        dims_of: Resolves the devices.
        say: Receives a line on what was taken for a CPU, where something was.

    Raises:
        ConfigError: A setting is refused.
        DeviceError: A device is unknown or absent.
    """
    changes = tuple(changes)
    config = load_config(path, changes)
    if path is not None:
        return config
    replicas = dims_of(config.parallel).replicas
    if any(device.type != "cpu" for devices in replicas for device in devices):
        return config
    # What follows from training.init is not what the user has set.
    has_init = config.training.init is not None
    named = [one for one in changes if one.partition("=")[0].strip() != "training.init"]
    asked = load_config(None, named)
    taken = [
        f"{key}={str(_after_init(key, value) if has_init else value).lower()}"
        for default in CPU_DEFAULTS
        if not any(_is_set(asked, key) for key in default.values)
        and not any(_is_set(config, key) for key in default.related)
        for key, value in default.values.items()
        if not (has_init and key == NETWORK)
    ]
    if not taken:
        return config
    say(
        f"for a CPU, without --config: {some(taken, NUM_SHOWN)}; the full defaults: "
        "unet3d config > full.yaml, then --config full.yaml"
    )
    return load_config(None, [*changes, *taken])


def _after_init(key: str, value: Any) -> Any:
    """Return a value that suits weights which have learnt something already."""
    if key != "training.learning_rate":
        return value
    return float(f"{value / RATE_DIVISOR_OF_INIT:.6g}")  # 0.0003, without a rounded last digit


def _is_set(section: Any, key: str) -> bool:
    """Return whether the user has set something of a key, which may be that of a section."""
    name, _, rest = key.partition(".")
    if name not in section.model_fields_set:
        return False
    return not rest or _is_set(getattr(section, name), rest)
