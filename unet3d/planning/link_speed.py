"""The bandwidth between the GPUs of this machine, measured at the start, within milliseconds.

A separate process measures it, because a process that uses a GPU keeps half a gibibyte of its
memory until it ends, and the process that starts ranks lives as long as they do.
"""

import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import torch

from unet3d.distributed.commands import import_variables

logger = logging.getLogger(__name__)

COPY_BYTES = 2**27
"""Large enough to hide launch latency at 400 GB/s; at 10 GB/s it takes 13 ms."""
NUM_COPIES = 5
LIMIT_SECONDS = 60.0
"""Time limit of the process, which spends nearly all of it on loading PyTorch."""


def measure_link(devices: Iterable[torch.device], are_here: bool = True) -> float | None:
    """Return the bytes per second that each GPU sends to its neighbour while the others send.

    None: there are fewer than two GPUs. Infinite: unknown, because a GPU is not on this machine or
    cannot be timed; NVLink is then assumed.
    """
    gpus = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    if len(gpus) < 2:
        return None
    if not are_here or gpus[-1] >= torch.cuda.device_count():
        return math.inf
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, *map(str, gpus)],
            env={**os.environ, **import_variables()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=True,
        )
        return float(process.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.debug("the link between the GPUs cannot be measured: %s", error)
        return math.inf


def link_line(copied_per_second: float) -> str:
    """Describe a link in one line."""
    if math.isinf(copied_per_second):
        return "link between the GPUs: not measured, NVLink is assumed"
    return f"link: {copied_per_second / 1e9:.3g} GB/s measured between the GPUs"


def time_copies(gpus: Sequence[torch.device]) -> float:
    """Return the bytes per second that each GPU sends to the next, all at the same time."""
    sent = [torch.zeros(COPY_BYTES, dtype=torch.uint8, device=gpu) for gpu in gpus]
    received = [torch.empty_like(one) for one in sent]
    streams = [torch.cuda.Stream(gpu) for gpu in gpus]  # type: ignore[no-untyped-call]
    times = []
    for _ in range(1 + NUM_COPIES):  # the first copy sets up the connection
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                received[(index + 1) % len(gpus)].copy_(sent[index], non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - began)
    return COPY_BYTES / min(times[1:])


if __name__ == "__main__":
    sys.stdout.write(repr(time_copies([torch.device("cuda", int(word)) for word in sys.argv[1:]])))
