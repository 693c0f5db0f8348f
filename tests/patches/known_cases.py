"""Prepared cases whose voxels tell their position."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import AugmentationSettings, PatchSettings, Shape
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import PatchSampler
from unet3d.preparation.cache import Cache, PreparedCase

PLAIN = PatchSettings(augmentation="none").random_changes
LIVELY = AugmentationSettings(
    rotation_probability=0.7, scaling_probability=0.7, noise_probability=0.7, mirror_axes=("x",)
)


def probable(probability: float, **changes: object) -> AugmentationSettings:
    """Return settings in which every change has this probability, except for ``changes``."""
    given = {**dict.fromkeys(AugmentationSettings.probabilities(), probability), **changes}
    return AugmentationSettings.model_validate(given)


def patch_settings(augmentation: AugmentationSettings = PLAIN, **fields: object) -> PatchSettings:
    """Return settings of patches with these augmentations."""
    details = augmentation.model_dump(mode="json")
    return PatchSettings.model_validate({**fields, "augmentation_details": details})


def known_volume(shape: Shape) -> npt.NDArray[np.float32]:
    """Return a volume of voxel indices, counted from 1, so that a patch shows its position."""
    return (1 + np.arange(np.prod(shape), dtype=np.float32)).reshape(1, *shape)


def make_cases(
    folder: Path, shapes: Sequence[Shape], labels: Sequence[npt.NDArray[Any]] = ()
) -> list[PreparedCase]:
    store = Cache(folder)
    cases = []
    for number, shape in enumerate(shapes):
        label = labels[number] if labels else np.zeros(shape, np.uint8)
        store.save_case(f"key{number}", known_volume(shape), label, (1.0, 1.0, 1.0), 4)
        case = store.load_case(f"key{number}", f"case_{number}")
        assert case is not None
        cases.append(case)
    return cases


def make_loader(cases: Sequence[PreparedCase], settings: PatchSettings, **more: Any) -> PatchLoader:
    """Return a loader that augments in its own processes; ``more`` are further arguments."""
    given = {"batch_size": 2, "num_steps": 6, "seed": 0, "num_workers": 0, **more}
    of_sampler = {name: given.pop(name) for name in ("size", "stride", "batch_size", "seed")}
    return PatchLoader(
        PatchSampler(cases=cases, settings=settings, **of_sampler),
        device=torch.device("cpu"),
        augments_on_device=False,
        **given,
    )
