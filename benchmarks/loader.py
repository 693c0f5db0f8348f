"""How many training patches are made a second, and how long a training waits for them.

    python benchmarks/loader.py --workers 0,4,8,16 --json loader.json
    python benchmarks/loader.py --device cpu --step-seconds 0.05 --shape 32,32,32 \
        --volume 48,48,48 --workers 0,1 --batches 4

The patches are those of training: cut from prepared, memory-mapped phantom volumes with the default
augmentation, handed over in batches. *Alone*, nobody does anything with them; the first batches,
for which the workers start, are not counted. *In training*, each batch is copied to the device and
a step of the network is made (or, with ``--step-seconds``, one is slept through, as a device of
that speed would need). The same number of steps on one batch that lies on the device already takes
``busy`` seconds; the share of the time beyond that is what the device waited.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import parse_shape, synchronize, tuning_key

from unet3d.config import Config
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.model.optimizer import (
    Optimization,
)
from unet3d.parallel import Layout, parallelize, resolve_precision
from unet3d.parallel.precision import (
    autocast_dtype,
)
from unet3d.planning.experiment import Experiment, plan_experiment
from unet3d.volumes.loader import PatchLoader
from unet3d.volumes.patches import Batch

PATCHES_PER_CASE = 10**4
"""More than are taken: a new epoch would begin with an empty queue."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", default="128,128,128", help="of a patch")
    parser.add_argument("--volume", default="256,256,256", help="of a case")
    parser.add_argument("--num-cases", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--workers", default="0,4,8,16", help="numbers of processes to try")
    parser.add_argument("--batches", type=int, default=100, help="that are timed; 0 workers: 1/5")
    parser.add_argument("--no-augmentation", action="store_true")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--step-seconds", type=float, help="sleep so long instead of training")
    parser.add_argument("--cache", type=Path, help="keep the volumes there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def make_experiment(arguments: argparse.Namespace, cache: Path) -> Experiment:
    """Prepare the volumes, or find them prepared."""
    values = {
        "data.cache": str(cache),
        "data.phantom.num_cases": arguments.num_cases,
        "data.phantom.shape": parse_shape(arguments.volume),
        "data.num_folds": 2,
        "patches.size": parse_shape(arguments.shape),
        "patches.per_case": PATCHES_PER_CASE,
        "patches.augmentation.enabled": not arguments.no_augmentation,
        "training.batch_size": arguments.batch_size,
    }
    return plan_experiment(Config().with_values(values), num_workers=0)


class Training:
    """Steps of the network on a device, or sleeps."""

    def __init__(
        self, experiment: Experiment, device: torch.device, step_seconds: float | None
    ) -> None:
        self.step_seconds = step_seconds
        self.device = device
        precision = resolve_precision("auto", [device])
        layout = Layout(devices=(device,), autocast=autocast_dtype(precision))
        self.executor = parallelize(UNet3d(experiment.topology), layout)
        self.optimization = Optimization(
            self.executor.module, experiment.config.training, precision
        )

    def step(self, batch: Batch) -> None:
        """Take a step, and do not wait for the device."""
        image = batch.image.to(self.device, non_blocking=True)
        target = batch.target.to(self.device, non_blocking=True)
        if self.step_seconds is not None:
            time.sleep(self.step_seconds)
            return
        self.executor.forward_backward(image, target, dice_cross_entropy, self.optimization.scale)
        self.optimization.step(1e-3)

    def busy_seconds(self, batch: Batch, num_steps: int) -> float:
        """Return what a step takes where no batch has to be waited for."""
        there = Batch(
            image=batch.image.to(self.device),
            target=batch.target.to(self.device),
            names=batch.names,
        )
        return _seconds_each(lambda: self.step(there), num_steps)


def _seconds_each(action: Callable[[], object], count: int, num_before: int = 5) -> float:
    """Return the mean time of an action after a few that are not counted."""
    for _ in range(num_before):
        action()
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        action()
    synchronize()
    return (time.perf_counter() - began) / count


def measure(
    loader: PatchLoader, training: Training, num_workers: int, num_batches: int
) -> dict[str, Any]:
    """Take batches alone, then in training."""
    batches: Iterator[Batch] = loader.epoch(0)
    # Workers begin with a queue of two batches each, which would not last.
    num_queued = 2 * num_workers + 1
    first = next(batches)
    alone = _seconds_each(lambda: next(batches), num_batches, num_queued)
    num_bytes = first.image.nbytes + first.target.nbytes
    busy = training.busy_seconds(first, min(num_batches, 20))
    in_training = _seconds_each(lambda: training.step(next(batches)), num_batches, num_queued)
    num_patches = len(first.image)
    return {
        "num_workers": num_workers,
        "patches_per_second": num_patches / alone,
        "bytes_per_second": num_bytes / alone,
        "busy_step_seconds": busy,
        "step_seconds": in_training,
        "waiting_share": max(0.0, 1 - busy / in_training),
    }


def main() -> None:
    """Try every number of workers, print the table, write the record."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = make_experiment(arguments, arguments.cache or Path(folder))
        training = Training(experiment, device, arguments.step_seconds)
        for num_workers in map(int, arguments.workers.split(",")):
            loader = PatchLoader(
                cases=experiment.training,
                settings=experiment.config.patches,
                size=experiment.patch_size,
                stride=experiment.topology.total_stride,
                batch_size=arguments.batch_size,
                seed=0,
                num_workers=num_workers,
                pin_memory=device.type == "cuda",
            )
            num_batches = arguments.batches if num_workers else -(-arguments.batches // 5)
            rows.append(measure(loader, training, num_workers, num_batches))
            print(rows[-1], file=sys.stderr)
            del loader
    print("workers  patches/s     MB/s  busy ms  step ms  waiting")
    for row in rows:
        print(
            f"{row['num_workers']:7}{row['patches_per_second']:11.1f}"
            f"{row['bytes_per_second'] / 1e6:9.0f}{1000 * row['busy_step_seconds']:9.1f}"
            f"{1000 * row['step_seconds']:9.1f}{row['waiting_share']:9.1%}"
        )
    record = {
        **tuning_key([device], resolve_precision("auto", [device])),
        "size": arguments.shape,
        "volume": arguments.volume,
        "batch_size": arguments.batch_size,
        "augmentation": not arguments.no_augmentation,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
