"""The configuration: every setting with its meaning, its limits and its one default."""

from unet3d.config.configuration import Config as Config
from unet3d.config.configuration import load_config as load_config
from unet3d.config.configuration import parsed_changes as parsed_changes
from unet3d.config.configuration import parsed_value as parsed_value
from unet3d.config.configuration import preset_changes as preset_changes
from unet3d.config.settings import AugmentationSettings as AugmentationSettings
from unet3d.config.settings import DataSettings as DataSettings
from unet3d.config.settings import InferenceSettings as InferenceSettings
from unet3d.config.settings import ModelSettings as ModelSettings
from unet3d.config.settings import ParallelSettings as ParallelSettings
from unet3d.config.settings import PatchSettings as PatchSettings
from unet3d.config.settings import Reading as Reading
from unet3d.config.settings import TrainingSettings as TrainingSettings
from unet3d.config.values import MAX_PATCH_VOXELS as MAX_PATCH_VOXELS
from unet3d.config.values import Channels as Channels
from unet3d.config.values import Few as Few
from unet3d.config.values import Fold as Fold
from unet3d.config.values import Normalization as Normalization
from unet3d.config.values import Offload as Offload
from unet3d.config.values import Recompute as Recompute
from unet3d.config.values import Shape as Shape
from unet3d.config.values import Spacing as Spacing
