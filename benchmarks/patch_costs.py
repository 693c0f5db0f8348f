"""What a training patch costs: one core, and where there is one, the GPU that augments it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unet3d.planning.experiment import Experiment
from unet3d.volumes.loader import PatchLoader

NUM_FIRST = 3
"""Patches that are not timed: they read the volumes from the disk."""


def measure(experiment: Experiment, num_patches: int) -> dict[str, Any]:
    """Return seconds that a patch takes.

    Args:
        experiment: Cases, augmentation and the size of patches.
        num_patches: Of how many the mean is taken.
    """
    with one_thread():
        return cpu_seconds(experiment, num_patches)


def cpu_seconds(experiment: Experiment, num_patches: int) -> dict[str, float]:
    """Return what one core takes to cut a patch, and to cut and augment it."""
    sources = {
        "cut_seconds": patches_of(experiment, num_patches, {"enabled": False}),
        "augmented_seconds": patches_of(experiment, num_patches, {}),
    }
    seconds = dict.fromkeys(sources, 0.0)
    for number in range(NUM_FIRST + num_patches):
        for name, patches in sources.items():  # by turns: the speed of a core changes
            began = time.perf_counter()
            next(patches)
            if number >= NUM_FIRST:
                seconds[name] += (time.perf_counter() - began) / num_patches
    return seconds


def patches_of(
    experiment: Experiment, num_patches: int, changes: dict[str, Any]
) -> Iterator[object]:
    """Return patches, one by one, made by this process."""
    values = {f"patches.augmentation.{name}": value for name, value in changes.items()}
    config = experiment.config.with_values(
        values | {"patches.per_case": -(-(NUM_FIRST + num_patches) // len(experiment.training))}
    )
    loader = PatchLoader(
        cases=experiment.training,
        settings=config.patches,
        size=experiment.patch_size,
        stride=experiment.topology.total_stride,
        batch_size=1,
        seed=config.training.seed,
        num_workers=0,
        pin_memory=False,
    )
    return loader.epoch(0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
