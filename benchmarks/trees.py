"""One training step of two versions of unet3d, by turns, in processes of their own.

    git worktree add /tmp/before REVISION
    python benchmarks/trees.py /tmp/before . --json out.json

Each folder holds a package ``unet3d``. A change of structure must not cost time or memory: the
medians of both should agree within the spread of the runs. Cases that need more GPUs than there are
here are left out.
"""

import argparse
import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHANNELS = (32, 64, 128, 256, 320, 320)
CASES = (
    # GPUs, micro-batches, edge of a cube, batch, steps
    (1, 1, 256, 1, 12),
    (1, 1, 128, 2, 30),
    (1, 8, 192, 8, 8),
    (2, 8, 192, 8, 8),
)
NUM_WARM_UP_STEPS = 8


def measure(num_gpus: int, num_micro_batches: int, edge: int, batch: int, steps: int) -> Any:
    """Time steps of the package that is on the path."""
    import torch

    from unet3d.config import ModelSettings
    from unet3d.model import UNet3d, dice_cross_entropy, plan_topology
    from unet3d.parallel import Layout, parallelize

    devices = tuple(torch.device("cuda", index) for index in range(num_gpus))
    settings = ModelSettings(channels=CHANNELS, deep_supervision=False)
    topology = plan_topology(settings, (edge,) * 3, (1.0, 1.0, 1.0), 1, 3)
    layout = Layout(devices=devices, num_micro_batches=num_micro_batches, autocast=torch.bfloat16)
    torch.manual_seed(0)
    executor = parallelize(UNet3d(topology), layout)
    parameters = list(executor.module.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.99, nesterov=True, foreach=True)
    shape = (batch, *(edge,) * 3)
    image = torch.randn(batch, 1, *shape[1:], device=executor.input_device)
    target = torch.randint(3, shape, dtype=torch.uint8, device=executor.output_device)

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(NUM_WARM_UP_STEPS + steps):
        wait()
        began = time.perf_counter()
        executor.forward_backward(image, target, dice_cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        seconds.append(time.perf_counter() - began)
    timed = seconds[NUM_WARM_UP_STEPS:]
    return {
        "num_gpus": num_gpus,
        "num_micro_batches": num_micro_batches,
        "edge": edge,
        "batch_size": batch,
        "median_seconds": statistics.median(timed),
        "all_seconds": timed,
        "reserved_gib": [torch.cuda.max_memory_reserved(device) / 2**30 for device in devices],
    }


def run_cases() -> None:
    """Measure every case that this machine has GPUs for, a line of JSON for each."""
    import torch

    for case in CASES:
        if case[0] <= torch.cuda.device_count():
            print(json.dumps(measure(*case)), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)


def main() -> None:
    """Run both versions by turns, print the table, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "folders", nargs="*", type=Path, help="The version before, and the one after."
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.folders:  # the package is on the path: one turn of one version
        run_cases()
        return
    before, after = (folder.resolve() for folder in arguments.folders)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for name, folder in (("before", before), ("after", after)):
            environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            done = subprocess.run(
                [sys.executable, __file__],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for line in done.stdout.splitlines():
                rows.append({"version": name, "round": number, **json.loads(line)})
                print({**rows[-1], "all_seconds": None}, file=sys.stderr)
    keys = ("num_gpus", "num_micro_batches", "edge", "batch_size")
    print("GPUs  micro-batches  edge  batch  before ms  after ms  ratio")
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        of_case = [row for row in rows if tuple(row[key] for key in keys) == case]
        old, new = (
            statistics.median(
                second for row in of_case if row["version"] == name for second in row["all_seconds"]
            )
            for name in ("before", "after")
        )
        print(
            f"{case[0]:4} {case[1]:14} {case[2]:5} {case[3]:6} {1000 * old:10.2f} "
            f"{1000 * new:9.2f} {new / old:6.3f}"
        )
    if arguments.json:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        arguments.json.write_text(json.dumps({"date": date, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
