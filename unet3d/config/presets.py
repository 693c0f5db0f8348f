"""Settings that belong together, under a name: ``--preset quick``."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"training.epochs": 50},
    "full": {"training.epochs": 1000},
}
"""Of each preset, dotted key to value. ``full`` is as long as nnU-Net's training (Isensee et al.,
Nature Methods 2021)."""


def preset_changes(names: Iterable[str]) -> list[str]:
    """Return the settings of presets as ``section.key=value`` strings, in the order of the names.

    Args:
        names: Keys of :data:`PRESETS`.
    """
    return [f"{key}={json.dumps(value)}" for name in names for key, value in PRESETS[name].items()]
