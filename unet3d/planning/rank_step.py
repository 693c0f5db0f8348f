"""The time of a training step, in this process or in one of the ranks that take it together.

``plan --measure`` starts the ranks, as ``train`` does, and reads the file that they leave.
"""

import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from unet3d.atomic import write_atomically
from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import DoesNotFitError
from unet3d.memory.meter import measured_steps
from unet3d.model import UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Layout, ParallelDims, image_dtype, parallelize, resolve_precision
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.memory_estimate import Step
from unet3d.planning.network_plan import NetworkPlan

NUM_WARM_UP_STEPS = 4
"""Steps on GPUs before the timed ones; by then a small step has been captured. On CPUs the two
steps that make the optimizer's state and count memory are enough."""
NUM_TIMED_STEPS = 5
NUM_LONG_STEPS = 3
"""Timed steps where these take :data:`LONG_SECONDS` together: long steps vary little."""
LONG_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What a training step took."""

    seconds: float | None
    """Median time in the slowest rank; None: a device ran out of memory."""
    peak_bytes: tuple[int, ...]
    """Peak of each device, rank after rank; empty if one ran out of memory."""


OUT_OF_MEMORY = StepTime(seconds=None, peak_bytes=())


def measure_rank(config: Config, network: NetworkPlan, path: Path) -> None:
    """Take training steps with the other ranks, and write a :class:`StepTime` as JSON.

    The first rank writes it, or one that runs out of memory and then raises DoesNotFitError.
    """
    with joined(Ranks.from_environment()) as group:
        try:
            dims = ParallelDims.resolve(config.parallel, ranks=group.ranks)
            precision = resolve_precision(config.training.precision, dims.devices, group.exchange)
            group.open(config.parallel.timeout_seconds)
            layout = Layout.of(config, dims, precision)
            found = time_step(network.step(config, dims, layout, precision), group)
        except torch.OutOfMemoryError as error:
            _write(path, OUT_OF_MEMORY)
            raise DoesNotFitError(f"rank {group.ranks.rank} ran out of memory") from error
        if group.is_first:
            _write(path, found)


def _write(path: Path, found: StepTime) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(asdict(found)).encode()))


def time_step(step: Step, group: Group) -> StepTime:
    """Take training steps on random volumes with the ranks of a group."""
    layout, topology = step.layout, step.topology
    refuse_beyond_memory(topology)
    torch.manual_seed(0)
    model = UNet3d(topology)
    to_parameter_dtype(model, step.precision)
    executor = parallelize(model, layout, group)
    optimization = Optimization(model, step.settings, step.precision)
    shape = (step.batch_size, topology.in_channels, *step.own_size)
    image = torch.randn(shape).to(executor.input_device, image_dtype(executor.module))
    classes = torch.uint8 if topology.num_classes <= 256 else torch.int64
    target = torch.randint(topology.num_classes, (shape[0], *shape[2:]), dtype=classes)
    target = target.to(executor.output_device)
    planes = step.size[0] if layout.num_shards > 1 else None

    def run() -> None:
        executor.forward_backward(image, target, step.loss, optimization.scale, planes=planes)
        optimization.step(0.0)  # the work is the same at any rate

    def timed() -> float:
        _wait_for(layout.devices)
        began = time.perf_counter()
        run()
        _wait_for(layout.devices)
        return time.perf_counter() - began

    run()  # creates the optimizer's state
    with measured_steps(executor, optimization.optimizer) as meter:
        run()
    measured = meter.read(optimization.optimizer)
    peaks = [measured[slot.index].peak_bytes for slot in executor.slots]
    for _ in range(NUM_WARM_UP_STEPS if _has_gpu(layout.devices) else 0):
        run()
    first = timed()
    # All ranks take as many steps.
    is_long = group.from_first(lambda: NUM_LONG_STEPS * first >= LONG_SECONDS)
    num_steps = NUM_LONG_STEPS if is_long else NUM_TIMED_STEPS
    median = statistics.median([first, *(timed() for _ in range(num_steps - 1))])
    return StepTime(
        seconds=max(group.exchange(median)),
        peak_bytes=tuple(peak for of_rank in group.exchange(peaks) for peak in of_rank),
    )


def _has_gpu(devices: Iterable[torch.device]) -> bool:
    return any(device.type == "cuda" for device in devices)


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
