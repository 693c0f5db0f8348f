"""The largest cube that trains at batch 1 on one GPU, or over several, ours and the peers'.

    python benchmarks/capacity.py --json capacity.json
    python benchmarks/capacity.py --variants ours,ours-level --devices 0,1 --json capacity-2.json
    python benchmarks/capacity.py --devices cpu --memory-gib 0.3 --channels 4,8,8 --max-size 160

A cube trains if two steps run, the second of which finds the optimizer's state. Each attempt is a
process of its own, so that one that fails leaves nothing behind, and has a time limit: a cube whose
two steps take longer does not count, and says so.

The search starts where the memory is expected to end: for ours from ``unet3d plan``'s prediction,
for the others from the bytes per voxel of a first, smaller attempt. From there it goes up or down
in growing strides, and halves what is between, until a size that trains stands right below one that
does not; ``complete`` is false where attempts or time ran out before. Several devices are for ours
only: one stage on each. A record that is there already keeps the rows of other variants.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import devices_named, synchronize, tuning_key
from peers import Problem, Trainee, Variant, find_variants

from unet3d.config import TrainingSettings
from unet3d.memory.allocations import UNCOUNTED_BYTES
from unet3d.memory.host import is_out_of_memory
from unet3d.parallel import Layout, resolve_precision
from unet3d.parallel.precision import (
    autocast_dtype,
)
from unet3d.planning.largest import largest_size
from unet3d.planning.memory_estimate import Step

OUT_OF_MEMORY = "out of memory"
NO_TIME = "no time left"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--variants",
        default="ours,ours-level,ours-offload,nnunet-compiled,nnunet-eager,dynunet-eager",
    )
    parser.add_argument("--devices", default="0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--channels", default="32,64,128,256,320,320")
    parser.add_argument("--unit", type=int, default=32, help="sizes are multiples of it")
    parser.add_argument("--probe-size", type=int, default=192, help="the peers' first attempt")
    parser.add_argument("--max-size", type=int, default=1024)
    parser.add_argument("--memory-gib", type=float, help="pretend that each device has no more")
    parser.add_argument("--attempts", type=int, default=4, help="at most, for each variant")
    parser.add_argument("--attempt-seconds", type=float, default=180)
    parser.add_argument("--total-seconds", type=float, default=540)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attempt", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass(kw_only=True)
class Search:
    """The largest size that trains, a multiple of a unit."""

    attempt: Callable[[int], dict[str, Any]]
    """Tries a size, and says what came of it; ``trains`` is true or false."""
    unit: int
    """Of sizes."""
    max_size: int
    """No larger one is tried."""
    num_left: int
    """Attempts that may still be made."""
    tried: list[dict[str, Any]] = field(default_factory=list)
    """What came of each attempt."""

    @property
    def largest(self) -> int:
        """The largest size that trained; 0 if none did."""
        return max((one["size"] for one in self.tried if one["trains"]), default=0)

    @property
    def too_large(self) -> int:
        """The smallest size that did not train, or one beyond the largest that may be tried."""
        failed = (one["size"] for one in self.tried if not one["trains"])
        return min(failed, default=self.max_size // self.unit * self.unit + self.unit)

    @property
    def is_complete(self) -> bool:
        """Whether the next multiple of the largest is known not to train."""
        return self.too_large - self.largest <= self.unit

    def run(self, start: int) -> None:
        """Try sizes from one on until the largest is found, or no attempt is left."""
        size, stride, last_stride = start, self.unit, 0
        while self.num_left and not self.is_complete:
            size = min(max(size, self.largest + self.unit), self.too_large - self.unit)
            last = self.try_size(size)
            if last.get("reason") == NO_TIME:
                return
            middle = (self.largest + self.too_large) // (2 * self.unit) * self.unit
            if last["trains"]:
                is_bounded = any(not one["trains"] for one in self.tried)
                size = min(size + stride, middle) if is_bounded else size + stride
            else:
                size = max(size - stride, middle) if self.largest else size - stride
            # By one, one, two, three, five: the start is most often right or one off.
            stride, last_stride = max(stride + last_stride, self.unit), stride

    def try_size(self, size: int) -> dict[str, Any]:
        """Try one size."""
        self.num_left -= 1
        self.tried.append({"size": size, **self.attempt(size)})
        print(self.tried[-1], file=sys.stderr, flush=True)
        return self.tried[-1]


def try_here(variant: Variant, problem: Problem, devices: list[torch.device]) -> dict[str, Any]:
    """Train two steps in this process."""
    try:
        trainee = Trainee(variant, problem, devices)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            trainee.step()
            synchronize()
            seconds.append(time.perf_counter() - began)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        # On a CPU with little memory oneDNN says only that it could not create something.
        is_cut_off = "could not create a primitive" in text and devices[0].type == "cpu"
        if is_out_of_memory(error) or is_cut_off:
            return {"trains": False, "reason": OUT_OF_MEMORY}
        return {"trains": False, "reason": f"{type(error).__name__}: {text[:300]}"}
    gpus = sorted({device.index for device in devices if device.type == "cuda"})
    return {
        "trains": True,
        "first_step_seconds": seconds[0],
        "second_step_seconds": seconds[1],
        "peak_bytes": [torch.cuda.max_memory_allocated(gpu) for gpu in gpus],
        "reserved_bytes": [torch.cuda.max_memory_reserved(gpu) for gpu in gpus],
    }


def limit_memory(devices: list[torch.device], limit_gib: float) -> None:
    """Let this process have no more of each device, nor of the machine's memory if on the CPU."""
    limit_bytes = int(limit_gib * 2**30)
    for device in set(devices):
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[5])
            limit = pages * resource.getpagesize() + limit_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def try_in_process(
    arguments: argparse.Namespace, key: str, size: int, end: float
) -> dict[str, Any]:
    """Train two steps in a process of its own, and return what it says."""
    seconds = min(arguments.attempt_seconds, end - time.monotonic())
    if seconds <= 1:
        return {"trains": False, "reason": NO_TIME}
    command = [sys.executable, __file__, "--attempt", str(size), "--variants", key]
    command += ["--devices", arguments.devices, "--channels", arguments.channels]
    if arguments.memory_gib is not None:
        command += ["--memory-gib", str(arguments.memory_gib)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        is_last = seconds < arguments.attempt_seconds
        reason = NO_TIME if is_last else f"took longer than {seconds:.0f} s"
        return {"trains": False, "reason": reason}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        said: dict[str, Any] = json.loads(lines[-1])
        return said
    errors = done.stderr.strip().splitlines() or ["no reason given"]
    return {"trains": False, "reason": f"exit status {done.returncode}: {errors[-1][:300]}"}


def device_bytes(devices: list[torch.device], limit_gib: float | None) -> dict[torch.device, int]:
    """Return what each device has for a training.

    Raises:
        SystemExit: A CPU's memory is not limited.
    """
    found = {}
    for device in devices:
        if device.type == "cuda":
            # Asking what is free would take some of it, for this process.
            found[device] = torch.cuda.get_device_properties(device).total_memory
        elif limit_gib is None:
            raise SystemExit("on a CPU, name the memory that it shall have with --memory-gib")
        limit = math.inf if limit_gib is None else limit_gib * 2**30
        found[device] = int(min(found.get(device, limit), limit))
    return found


def predicted_size(
    variant: Variant, channels: tuple[int, ...], devices: list[torch.device], room: dict[Any, int]
) -> int:
    """Return the cube that ``unet3d plan`` would name; 0 where it names none."""
    precision = resolve_precision("auto", devices)
    stride = 2 ** (len(channels) - 1)
    step = Step(
        topology=Problem(size=(4 * stride,) * 3, batch_size=1, channels=channels).topology,
        layout=Layout(
            devices=tuple(devices),
            autocast=autocast_dtype(precision),
            recompute=variant.recompute,
            offload=variant.offload,
        ),
        size=(4 * stride,) * 3,
        batch_size=1,
        settings=TrainingSettings(),
        precision=precision,
    )
    largest = largest_size(step, room)
    return largest[0] if largest else 0


def extrapolated_size(probe: dict[str, Any], room: int, unit: int) -> int:
    """Return the cube at which memory ends if each voxel takes as much as in an attempt."""
    # Weights, gradients and momentum do not grow; leaving them in errs towards the small side.
    voxels = probe["size"] ** 3 * (room - UNCOUNTED_BYTES) / max(probe["peak_bytes"])
    return int(voxels ** (1 / 3)) // unit * unit


def search(
    arguments: argparse.Namespace, variant: Variant, devices: list[torch.device], end: float
) -> dict[str, Any]:
    """Find the largest cube of one variant."""
    channels = tuple(int(number) for number in arguments.channels.split(","))
    unit = arguments.unit
    room = device_bytes(devices, arguments.memory_gib)
    row: dict[str, Any] = {"key": variant.key, "devices": arguments.devices}
    found = Search(
        attempt=lambda size: try_in_process(arguments, variant.key, size, end),
        unit=unit,
        max_size=arguments.max_size,
        num_left=arguments.attempts,
    )
    if variant.network == "ours":
        row["predicted_size"] = predicted_size(variant, channels, devices, room)
        start = row["predicted_size"] // unit * unit
    else:
        probe = found.try_size(arguments.probe_size // unit * unit)
        start = found.largest
        if probe["trains"] and probe["peak_bytes"]:
            start = extrapolated_size(probe, min(room.values()), unit)
    if not found.tried or found.tried[-1].get("reason") in (None, OUT_OF_MEMORY):
        found.run(start or unit)
    row |= {"size": found.largest, "num_voxels": found.largest**3}
    return row | {"complete": found.is_complete, "attempts": found.tried}


def main() -> None:
    """Search for every variant, print the table, write the record after each."""
    arguments = parse_arguments()
    names = tuple(arguments.devices.split(","))
    devices = list(devices_named(names))
    variants = find_variants(arguments.variants)
    if len(devices) > 1 and any(variant.network != "ours" for variant in variants):
        raise SystemExit("only ours runs on several devices; name its variants with --variants")
    if arguments.attempt is not None:
        channels = tuple(int(number) for number in arguments.channels.split(","))
        if arguments.memory_gib is not None:
            limit_memory(devices, arguments.memory_gib)
        problem = Problem(size=(arguments.attempt,) * 3, batch_size=1, channels=channels)
        print(json.dumps(try_here(variants[0], problem, devices)))
        return
    end = time.monotonic() + arguments.total_seconds
    rows: list[dict[str, Any]] = []
    if arguments.json and arguments.json.is_file():
        new = {variant.key for variant in variants}
        earlier = json.loads(arguments.json.read_text())["rows"]
        rows = [row for row in earlier if row["key"] not in new]
    for variant in variants:
        rows.append(search(arguments, variant, devices, end))
        record = {
            **tuning_key(devices, resolve_precision("auto", devices)),
            "channels": arguments.channels,
            "memory_gib": arguments.memory_gib,
            "rows": rows,
        }
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    peers = [row for row in rows if not row["key"].startswith("ours") and row["num_voxels"]]
    heads = "".join(f"{'/ ' + peer['key']:>19}" for peer in peers)
    print(f"{'':20}{'cube':>7}{'Mvoxels':>9}{heads}  why no larger")
    for row in rows:
        ratios = "".join(f"{row['num_voxels'] / peer['num_voxels']:19.2f}" for peer in peers)
        failed = [one for one in row["attempts"] if not one["trains"]]
        why = min(failed, key=lambda one: one["size"])["reason"] if failed else "none was tried"
        why += "" if row["complete"] else " (not all sizes were tried)"
        print(f"{row['key']:20}{row['size']:7}{row['num_voxels'] / 1e6:9.2f}{ratios}  {why}")


if __name__ == "__main__":
    main()
