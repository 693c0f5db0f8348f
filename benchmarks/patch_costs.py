"""What a training patch costs: one core, and where there is one, the GPU that augments it."""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unet3d.config import AugmentationSettings
from unet3d.planning.experiment import Experiment
from unet3d.volumes.augment import Cut
from unet3d.volumes.patches import CutBatch, PatchSampler

NUM_FIRST = 3
"""Patches that are not timed: they read the volumes from the disk, and compile kernels."""
BUSY_CYCLES = 20_000_000
"""Of a GPU: about 0.01 s."""
MAX_TRIES = 1000
"""How many patches are drawn to find those in which everything happens."""


def measure(experiment: Experiment, num_patches: int, device: torch.device) -> dict[str, Any]:
    """Return seconds that a patch takes, and what the prepared cases take of the disk.

    Args:
        experiment: Cases, augmentation and the size of patches.
        num_patches: Of how many the mean is taken.
        device: A GPU augments patches too.
    """
    with one_thread():
        row: dict[str, Any] = dict(cpu_seconds(sampler_of(experiment), num_patches))
    if device.type == "cuda":
        row |= gpu_seconds(experiment, num_patches, device)
    cases = (*experiment.training, *experiment.validation)
    files = (path for case in cases for path in case.folder.iterdir())
    return row | {"prepared_bytes": sum(path.stat().st_size for path in files)}


def sampler_of(experiment: Experiment, changes: dict[str, Any] | None = None) -> PatchSampler:
    """Return what cuts the patches of an experiment, perhaps augmented in another way."""
    values = {f"patches.augmentation.{name}": value for name, value in (changes or {}).items()}
    config = experiment.config.with_values(values)
    return PatchSampler(
        cases=experiment.training,
        settings=config.patches,
        size=experiment.patch_size,
        stride=experiment.topology.total_stride,
        batch_size=config.training.num_patches,
        seed=config.training.seed,
    )


def cpu_seconds(sampler: PatchSampler, num_patches: int) -> dict[str, float]:
    """Return what this process takes to cut a patch, and to cut and augment it, on average."""
    cutting, all_of_it = [], []
    for index in range(NUM_FIRST + num_patches):
        began = time.perf_counter()
        cut = sampler.cut(0, index)
        cutting.append(time.perf_counter() - began)
        batch_of(cut).augmented()
        all_of_it.append(time.perf_counter() - began)
    return {
        "cut_seconds": statistics.mean(cutting[NUM_FIRST:]),
        "augmented_seconds": statistics.mean(all_of_it[NUM_FIRST:]),
    }


def gpu_seconds(experiment: Experiment, num_patches: int, device: torch.device) -> dict[str, float]:
    """Return what a GPU takes to augment a patch, and the host to launch it.

    On average, and for patches in which everything is drawn.
    """
    usual = sampler_of(experiment)
    names = AugmentationSettings.model_fields
    certain = sampler_of(experiment, {n: 1 for n in names if n.endswith("_probability")})
    of_usual = (usual.cut(0, index) for index in range(NUM_FIRST + num_patches))
    of_certain = (certain.cut(0, index) for index in range(MAX_TRIES))
    full = itertools.islice(filter(has_everything, of_certain), NUM_FIRST + num_patches // 4)
    seconds = {}
    # The first launch of a kernel takes long, and those of everything are those of all.
    for name, cuts in (("gpu_everything", full), ("gpu", of_usual)):
        on_gpu, on_host = [], []
        for cut in cuts:
            batch = batch_of(cut.to(device))
            gpu, host = timed_on(device, batch)
            on_gpu.append(gpu)
            on_host.append(host)
        seconds[f"{name}_seconds"] = statistics.mean(on_gpu[NUM_FIRST:])
        seconds[f"{name}_host_seconds"] = statistics.mean(on_host[NUM_FIRST:])
    return seconds


def timed_on(device: torch.device, batch: CutBatch) -> tuple[float, float]:
    """Return seconds of the GPU and of the host to augment a batch that is on the GPU."""
    first: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    # Launches are ahead of the GPU, as in training.
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    first.record()
    began = time.perf_counter()
    batch.augmented()
    host = time.perf_counter() - began
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1000, host


def has_everything(cut: Cut) -> bool:
    """Return whether every channel is blurred and loses resolution, where all else is certain."""
    return all(
        channel.blur_sigma is not None and min(channel.resolution) < 1 for channel in cut.channels
    )


def batch_of(cut: Cut) -> CutBatch:
    """Return a batch of one patch."""
    return CutBatch(cuts=(cut,), shape=cut.size)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
