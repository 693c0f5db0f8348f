"""The time of a training step in one of the ranks that take it together.

``plan --measure`` starts the ranks, as ``train`` does; what they find out is in a file afterwards.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unet3d.atomic import write_atomically
from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import DoesNotFitError
from unet3d.memory.measurement import measured_steps
from unet3d.model import UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import (
    Layout,
    ParallelDims,
    image_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.balance.stopwatch import (
    LONG_SECONDS,
    NUM_LONG_RUNS,
    NUM_TIMED_RUNS,
    wait_for,
)
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.bench import NUM_WARM_UP_STEPS
from unet3d.planning.memory_estimate import Step
from unet3d.planning.network_plan import NetworkPlan


def measure_rank(config: Config, network: NetworkPlan, path: Path) -> None:
    """Take training steps with the other ranks; the first one writes how long they took.

    The file is JSON: ``seconds``, the median of the slowest rank, and ``peak_bytes`` of each. A
    rank that runs out of memory writes ``seconds: null``.

    Args:
        config: The settings, with a mode and devices.
        network: What is trained.
        path: The file.

    Raises:
        DoesNotFitError: This rank ran out of memory.
        Unet3dError: For every other reason that can be explained.
    """
    with joined(Ranks.from_environment()) as group:
        try:
            record = _measured(config, network, group)
        except torch.OutOfMemoryError as error:
            _write(path, {"seconds": None, "peak_bytes": []})
            raise DoesNotFitError(f"rank {group.ranks.rank} ran out of memory") from error
        if group.is_first:
            _write(path, record)


def _write(path: Path, record: dict[str, Any]) -> None:
    write_atomically(path, lambda file: file.write(json.dumps(record).encode()))


def _measured(config: Config, network: NetworkPlan, group: Group) -> dict[str, Any]:
    dims = ParallelDims.resolve(config.parallel, ranks=group.ranks)
    precision = resolve_precision(config.training.precision, dims.devices, group.exchange)
    group.open(config.parallel.timeout_seconds)
    refuse_beyond_memory(network.topology)
    torch.manual_seed(config.training.seed)
    model = UNet3d(network.topology)
    to_parameter_dtype(model, precision)
    layout = Layout.of(config, dims, precision)
    batch_size = dims.share_of(network.batch_size)
    step = Step(
        topology=network.topology,
        regions=network.regions,
        layout=layout,
        size=network.size_in(batch_size),
        batch_size=batch_size,
        settings=config.training,
        precision=precision,
    )
    executor = parallelize(model, layout, group)
    optimization = Optimization(model, config.training, precision, keep_gradients=dims.has_reducers)
    shape = (step.batch_size, network.topology.in_channels, *step.own_size)
    image = torch.randn(shape).to(executor.input_device, image_dtype(executor.module))
    classes = torch.uint8 if network.topology.num_classes <= 256 else torch.int64
    target = torch.randint(network.topology.num_classes, (shape[0], *shape[2:]), dtype=classes)
    target = target.to(executor.output_device)
    planes = step.size[0] if layout.num_shards > 1 else None

    def run() -> None:
        executor.forward_backward(image, target, step.loss, optimization.scale, planes=planes)
        optimization.step(0.0)  # the work is the same at any rate

    run()  # creates the optimizer's state
    with measured_steps(executor, optimization.optimizer) as meter:
        run()
    measured = meter.read(optimization.optimizer).values()
    peak_bytes = max(memory.peak_bytes for memory in measured)
    seconds = max(group.exchange(_median_seconds(run, layout.devices[0], group)))
    return {"seconds": seconds, "peak_bytes": group.exchange(peak_bytes)}


def _median_seconds(run: Callable[[], None], device: torch.device, group: Group) -> float:
    """Return the median time of steps, of which all ranks take as many."""

    def timed() -> float:
        wait_for((device,))
        began = time.perf_counter()
        run()
        wait_for((device,))
        return time.perf_counter() - began

    for _ in range(NUM_WARM_UP_STEPS if device.type == "cuda" else 0):
        run()
    first = timed()
    is_long = group.from_first(lambda: NUM_LONG_RUNS * first >= LONG_SECONDS)
    num_runs = NUM_LONG_RUNS if is_long else NUM_TIMED_RUNS
    return statistics.median([first, *(timed() for _ in range(num_runs - 1))])
