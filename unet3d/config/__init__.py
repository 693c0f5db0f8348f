"""The configuration: every setting with its meaning, its limits and its one default."""

from unet3d.config.configuration import Config, load_config, overrides_of
from unet3d.config.parallel_settings import ParallelSettings
from unet3d.config.settings import (
    AugmentationSettings,
    DataSettings,
    InferenceSettings,
    MemorySettings,
    ModelSettings,
    PatchSettings,
    PhantomSettings,
    TrainingSettings,
)
from unet3d.config.values import (
    MAX_PATCH_VOXELS,
    Balance,
    Channels,
    CudaGraphs,
    Few,
    Fold,
    Kernel,
    Offload,
    Recompute,
    Shape,
    Spacing,
    Strides,
    Taps,
    Units,
)

__all__ = [
    "MAX_PATCH_VOXELS",
    "AugmentationSettings",
    "Balance",
    "Channels",
    "Config",
    "CudaGraphs",
    "DataSettings",
    "Few",
    "Fold",
    "InferenceSettings",
    "Kernel",
    "MemorySettings",
    "ModelSettings",
    "Offload",
    "ParallelSettings",
    "PatchSettings",
    "PhantomSettings",
    "Recompute",
    "Shape",
    "Spacing",
    "Strides",
    "Taps",
    "TrainingSettings",
    "Units",
    "load_config",
    "overrides_of",
]
