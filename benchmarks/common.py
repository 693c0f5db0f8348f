"""What the benchmarks share."""

import datetime
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from unet3d.config import ParallelSettings, Shape
from unet3d.memory.allocator import use_expandable_segments
from unet3d.parallel import ParallelDims

use_expandable_segments()  # as the command line does


def synchronize() -> None:
    """Wait until every GPU is idle."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def peaks_of(device: torch.device) -> dict[str, int]:
    """Return what CUDA's allocator held at most, of its own and of the GPU; nothing of a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def parse_shape(text: str) -> Shape:
    """Return voxels along X, Y, Z from ``192,192,192``."""
    x, y, z = (int(size) for size in text.split(","))
    return x, y, z


def devices_named(names: Sequence[str]) -> tuple[torch.device, ...]:
    """Return the devices of one network: a stage on each, where there are several."""
    mode: Literal["model", "none"] = "model" if len(names) > 1 else "none"
    return ParallelDims.resolve(ParallelSettings(mode=mode, devices=tuple(names))).devices


def command() -> str:
    """Return the command as one would repeat it elsewhere, without this machine's folders."""
    script, *rest = sys.argv
    said = [Path(one).name if Path(one).is_absolute() else one for one in rest]
    return shlex.join([f"benchmarks/{Path(script).name}", *said])


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def tuning_key(devices: Sequence[torch.device], precision: str) -> dict[str, Any]:
    """Return command, date, devices and versions, for the record of a measurement."""
    names = [str(d) if d.type == "cpu" else torch.cuda.get_device_name(d) for d in devices]
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": names,
        "precision": precision,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
    }
