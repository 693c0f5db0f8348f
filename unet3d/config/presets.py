"""Settings that belong together, under a name: ``--preset quick``."""

from collections.abc import Iterable, Mapping
from typing import Any

from unet3d.config.configuration import overrides_of
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import shown

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"training.epochs": 50},
    "full": {"training.epochs": 1000},
    "resenc-m": {"model.encoder": "residual", "patches.memory_gib": 8.38},
    "resenc-l": {"model.encoder": "residual", "patches.memory_gib": 22.35},
}
"""Of each preset, dotted key to value. ``full`` is as long as nnU-Net's training (Isensee et al.,
Nature Methods 2021). ``resenc-m`` and ``resenc-l`` are its residual encoders, planned to 9 and 24
GB (10^9 bytes) of a GPU (Isensee et al., arXiv 2404.09556)."""


def preset_changes(names: Iterable[str]) -> list[str]:
    """Return the settings of presets, in their order, as ``section.key=value`` strings."""
    changes: list[str] = []
    for name in names:
        if name not in PRESETS:
            raise ConfigError(f"there is no preset {shown(name)}; take one of {', '.join(PRESETS)}")
        changes += overrides_of(PRESETS[name])
    return changes
