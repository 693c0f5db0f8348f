"""The configuration: every setting with its meaning, its limits and its one default."""

from unet3d.config.settings import (
    AugmentationSettings,
    Balance,
    Config,
    DataSettings,
    InferenceSettings,
    MemorySettings,
    ModelSettings,
    Offload,
    ParallelSettings,
    PatchSettings,
    PhantomSettings,
    Recompute,
    Shape,
    Spacing,
    TrainingSettings,
    load_config,
)

__all__ = [
    "AugmentationSettings",
    "Balance",
    "Config",
    "DataSettings",
    "InferenceSettings",
    "MemorySettings",
    "ModelSettings",
    "Offload",
    "ParallelSettings",
    "PatchSettings",
    "PhantomSettings",
    "Recompute",
    "Shape",
    "Spacing",
    "TrainingSettings",
    "load_config",
]
