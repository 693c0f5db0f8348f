"""Predicted memory against what CUDA's allocator measures, for several ways of training.

    python benchmarks/memory.py --json out.json

Steps of the real executor on random data, from an empty allocator, for each way: two are measured;
after some more, which are captured and replayed where volumes are small, it is noted what the
allocator has reserved.
Ways that need more GPUs than there are here are left out.
"""

import argparse
import datetime
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import tuning_key  # noqa: F401 - sets up the allocator

from unet3d.config import ModelSettings, TrainingSettings
from unet3d.memory.measurement import measured_steps
from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
from unet3d.model.optimizer import (
    Optimization,
)
from unet3d.parallel import Layout, parallelize
from unet3d.parallel.precision import (
    autocast_dtype,
    image_dtype,
)
from unet3d.planning.memory_estimate import Step, predict_memory

CHANNELS = (32, 64, 128, 256, 320, 320)

NUM_LATER_STEPS = 5

WAYS: tuple[dict[str, Any], ...] = (
    {"size": 128, "batch_size": 2},
    {"size": 128, "batch_size": 2, "precision": "float32"},
    {"size": 128, "batch_size": 2, "precision": "float16"},
    {"size": 192, "batch_size": 1},
    {"size": 192, "batch_size": 8, "num_micro_batches": 8},
    {"size": 128, "batch_size": 2, "model": {"norm": "group"}},
    {"size": 128, "batch_size": 2, "model": {"norm": "batch"}},
    {"size": 128, "batch_size": 2, "model": {"encoder": "residual"}},
    {"size": 128, "batch_size": 2, "optimizer": "adamw"},
    {"size": 256, "batch_size": 1},
    {"size": 192, "batch_size": 2, "num_gpus": 2},
    {"size": 192, "batch_size": 8, "num_gpus": 2, "num_micro_batches": 8},
    {"size": 192, "batch_size": 4, "num_gpus": 2, "num_micro_batches": 4, "precision": "float32"},
    {"size": 256, "batch_size": 2, "num_gpus": 2, "num_micro_batches": 2},
)


def make_step(way: dict[str, Any]) -> Step:
    size = (way["size"],) * 3
    precision = way.get("precision", "bfloat16")
    settings = ModelSettings(channels=CHANNELS, deep_supervision=False, **way.get("model", {}))
    devices = tuple(torch.device("cuda", index) for index in range(way.get("num_gpus", 1)))
    layout = Layout(
        devices=devices,
        num_micro_batches=way.get("num_micro_batches", 1),
        autocast=autocast_dtype(precision),
    )
    topology = plan_topology(settings, size, (1.0, 1.0, 1.0), 1, 3)
    training = TrainingSettings(optimizer=way.get("optimizer", "sgd"))
    return Step(
        topology=topology,
        layout=layout,
        size=size,
        batch_size=way["batch_size"],
        settings=training,
        precision=precision,
    )


def measure(step: Step) -> list[dict[str, int]]:
    executor = parallelize(UNet3d(step.topology), step.layout)
    optimization = Optimization(executor.module, step.settings, step.precision)
    image = torch.randn(step.batch_size, 1, *step.size)
    image = image.to(executor.input_device, image_dtype(executor.module))
    target = torch.zeros(step.batch_size, *step.size, dtype=torch.uint8)
    target = target.to(executor.output_device)

    def take_step() -> None:
        executor.forward_backward(image, target, dice_cross_entropy, optimization.scale)
        optimization.step(0.01)

    with measured_steps(executor, optimization.optimizer) as meter:
        for _ in range(2):
            take_step()
    measured = meter.read(optimization.optimizer)
    for _ in range(NUM_LATER_STEPS):  # of small volumes they are captured and replayed
        take_step()
    rows = []
    for slot in executor.slots:
        torch.cuda.synchronize(slot.device)
        free, total = torch.cuda.mem_get_info(slot.device)
        reserved = torch.cuda.memory_reserved(slot.device)
        row = measured[slot.index].to_dict()
        row["beside_allocator_bytes"] = total - free - reserved
        row["later_reserved_bytes"] = torch.cuda.max_memory_reserved(slot.device)
        rows.append(row)
    return rows


def main() -> None:
    """Measure every way that the machine has GPUs for, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    rows = []
    pair = ("predicted", "ratio")
    names = ("activations GiB", "predicted", "peak GiB", *pair, "reserved", *pair, "beside")
    print(f"{'':76}" + "".join(f"{name:>16}" for name in names))
    for way in WAYS:
        if way.get("num_gpus", 1) > torch.cuda.device_count():
            continue
        step = make_step(way)
        predicted = predict_memory(step)
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
        try:
            measured = measure(step)
        except torch.OutOfMemoryError:
            print(f"{way}: does not fit", file=sys.stderr)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        for slot, found in zip(predicted.slots, measured, strict=True):
            expected = predicted.memory[slot.index]
            numbers = (
                found["activations_bytes"] / 2**30,
                expected.activations_bytes / 2**30,
                found["peak_bytes"] / 2**30,
                expected.peak_bytes / 2**30,
                expected.peak_bytes / found["peak_bytes"],
                found["later_reserved_bytes"] / 2**30,
                expected.reserved_bytes / 2**30,
                expected.reserved_bytes / found["later_reserved_bytes"],
                found["beside_allocator_bytes"] / 2**30,
            )
            name = ", ".join(f"{key} {value}" for key, value in way.items())
            print(f"{name:66}{slot.device!s:>10}" + "".join(f"{n:16.3f}" for n in numbers))
            rows.append(
                {**way, "slot": slot.index, "predicted": expected.to_dict(), "measured": found}
            )
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
