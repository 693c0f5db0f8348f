"""A training whose steps are timed by turns: on loaded batches, and on one that is there."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import peaks_of, synchronize
from patch_costs import sampler_of

from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.model import UNet3d
from unet3d.parallel import Layout, ParallelDims, parallelize, resolve_precision
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.experiment import Experiment
from unet3d.planning.tuning_cache import TuningKey, resolve_auto
from unet3d.runs.run_folder import RunFolder
from unet3d.training.cores import leave_cores
from unet3d.training.loop import TrainingLoop
from unet3d.training.waiting import DataClock
from unet3d.volumes.augment import augments_on_device
from unet3d.volumes.patches import Batch, CutBatch

NUM_WARM_UP_STEPS = 10
"""After which steps of small volumes are replayed."""


def for_steps(experiment: Experiment, num_steps: int) -> Experiment:
    """Return an experiment whose epochs have so many steps."""
    config = experiment.config.with_values({"training.steps_per_epoch": num_steps})
    return replace(experiment, config=config)


def make_loop(experiment: Experiment, num_workers: int, folder: Path) -> TrainingLoop:
    """Build what a training on one device consists of, as ``unet3d train`` does."""
    dims = ParallelDims.resolve(experiment.config.parallel)
    precision = resolve_precision(experiment.config.training.precision, dims.devices)
    config = resolve_auto(
        TuningKey(
            config=experiment.config,
            topology=experiment.topology,
            size=experiment.largest_patch(experiment.config.training.num_patches),
            devices=dims.devices,
            precision=precision,
            num_replicas=1,
        )
    )
    torch.manual_seed(config.training.seed)
    model = UNet3d(experiment.topology)
    to_parameter_dtype(model, precision)
    leave_cores(num_workers, dims.devices, 1)
    return TrainingLoop(
        experiment=replace(experiment, config=config),
        executor=parallelize(model, Layout.of(config, dims, precision)),
        folder=RunFolder(folder),
        precision=precision,
        num_workers=num_workers,
        prediction=None,
        dims=dims,
        group=Group(Ranks()),
    )


def batch_on_host(experiment: Experiment) -> Batch:
    """Return a batch that this process makes."""
    sampler, batch_size = sampler_of(experiment), experiment.config.training.num_patches
    cuts = (sampler.cut(0, index) for index in range(batch_size))
    return CutBatch(cuts=tuple(cuts), shape=experiment.largest_patch(batch_size)).augmented()


class Measurement:
    """A training, timed by turns on what its loader yields and on a batch that is there."""

    def __init__(self, loop: TrainingLoop, there: Batch, num_workers: int, num_steps: int) -> None:
        """Take the first steps on a batch.

        Args:
            loop: What trains; its loader has not begun.
            there: The batch of turns without the loader, on the host.
            num_workers: The loader's processes.
            num_steps: Of each turn.
        """
        self.loop = loop
        self.there = there
        self.device = loop.executor.input_device
        self.num_steps = num_steps
        self.num_before = max(1, num_workers)
        self.num_epochs = 0
        self.alone(NUM_WARM_UP_STEPS)

    def start_loader(self) -> None:
        """Have the loader's processes start: each makes a batch that nobody trains on."""
        for _ in self.epoch(self.loop.loader.num_steps - self.num_before):
            pass

    def epoch(self, first_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch of which none is made yet.

        It is not the next one, for which the loader makes batches ahead.
        """
        self.num_epochs += 2
        return self.loop.loader.epoch(self.num_epochs, first_step)

    def alone(self, num_steps: int) -> dict[str, Any]:
        """Take steps on one batch that is on the device.

        The memory of those before the loader has started is the network's alone.
        """
        image, target = self.there.image.to(self.device), self.there.target.to(self.device)
        there = replace(self.there, image=image, target=target)
        self._reset_memory()
        began = time.perf_counter()
        for _ in range(num_steps):
            self.loop._step(there)
        synchronize()
        return {"seconds": (time.perf_counter() - began) / num_steps, **peaks_of(self.device)}

    def loaded(self) -> dict[str, Any]:
        """Take the steps of an epoch, of which those in the middle count."""
        self._reset_memory()
        last = self.num_before + self.num_steps
        clock, ended = DataClock(self.device), 0.0
        for index, batch in enumerate(clock.timed(self.epoch())):
            if index in (self.num_before, last):
                synchronize()
                began, ended = ended, time.perf_counter()
                waited = clock.read()
            if index < last:
                self.loop._step(batch)
        del batch
        return {
            "seconds": (ended - began) / self.num_steps,
            "waiting_share": waited / (ended - began),
            **peaks_of(self.device),
        }

    def _reset_memory(self) -> None:
        synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def measure(
    experiment: Experiment, num_workers: int, num_steps: int, num_turns: int
) -> dict[str, Any]:
    """Return the row of one training."""
    # Processes deliver in bursts: whole bursts are timed.
    burst = max(1, num_workers)
    num_steps = -(-num_steps // burst) * burst
    batch_size = experiment.config.training.num_patches
    experiment = for_steps(experiment, burst + num_steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        loop = make_loop(experiment, num_workers, Path(folder) / "run")
        measurement = Measurement(loop, batch_on_host(experiment), num_workers, num_steps)
        alone, loaded = [measurement.alone(num_steps)], []
        measurement.start_loader()
        for _ in range(num_turns):
            loaded.append(measurement.loaded())
            alone.append(measurement.alone(num_steps))
    device = loop.executor.input_device
    is_on_device = augments_on_device(loop.config.patches.augmentation, device)
    seconds = statistics.median(turn["seconds"] for turn in loaded)
    alone_seconds = statistics.median(turn["seconds"] for turn in alone)
    return {
        "augmented_on": "gpu" if is_on_device else "cpu",
        "samples_per_second": batch_size / seconds,
        "alone_samples_per_second": batch_size / alone_seconds,
        "ratio": alone_seconds / seconds,
        "waiting_share": statistics.median(turn["waiting_share"] for turn in loaded),
        **{f"alone_{name}": alone[0][name] for name in alone[0] if name != "seconds"},
        **{name: number for name, number in loaded[-1].items() if name.endswith("bytes")},
        "all_seconds": [turn["seconds"] for turn in loaded],
        "all_alone_seconds": [turn["seconds"] for turn in alone],
    }
