"""Measures which mode, cut and number of micro-batches are fastest on these devices.

Each setting is measured with real training steps: in this process, or in as many ranks as training
would have, so that GPUs exchange the same messages. The ranks write their time to a file.
"""

import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from unet3d.atomic import write_atomically
from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import DoesNotFitError, Unet3dError, counted
from unet3d.memory.meter import measured_steps
from unet3d.model import UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import ParallelDims, parallelize, resolve_precision
from unet3d.parallel.graph import release_streams
from unet3d.parallel.partition import default_cuts
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.link_speed import link_line, measure_link
from unet3d.planning.memory_estimate import Step, empty_batch
from unet3d.planning.network_plan import NetworkPlan, check_stages
from unet3d.planning.placements import (
    PlacementOption,
    in_words,
    memory_of,
    placed,
    possible_dims,
    settings_for,
    timed_options,
)
from unet3d.planning.step_time import time_cuts
from unet3d.planning.tuning_cache import TunedConfig, hardware, remember_tuned

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 300.0
"""After this time no further setting is measured, once each placement has one."""
NUM_WARM_UP_STEPS = 5
"""Steps on GPUs between the first step and the timed steps. Memory is measured in these steps, and
at their end small steps have been captured. On CPUs one step is enough."""
NUM_TIMED_STEPS = 5

StepTime = tuple[float | None, list[int]]
"""Median seconds of a step in the slowest rank, and the peak bytes of each device, rank after
rank."""
OUT_OF_MEMORY: StepTime = (None, [])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting with its predictions and its measured steps; see StepTime."""

    option: PlacementOption
    seconds: float | None
    peak_bytes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All settings that were measured."""

    config: Config
    """The settings that all rows share."""
    asked: ParallelDims | None
    """The placement that the settings name; None: it is left open."""
    rows: tuple[Row, ...]
    """One device first, then the other placements, cut after cut."""
    num_left_out: int
    """Settings that were not measured for lack of time."""

    def best(self, dims: ParallelDims | None = None) -> Row | None:
        """Return the fastest row of a placement, or of all; None: nothing fits."""
        timed = [row for row in self.rows if row.seconds and dims in (None, row.option.dims)]
        return min(timed, key=lambda row: row.seconds or 0.0, default=None)

    def remember(self) -> Path:
        """Save the fastest setting of each placement for training runs, and return the folder."""
        now = f"{datetime.now():%Y-%m-%d at %H:%M}"
        paths = []
        for dims in dict.fromkeys(row.option.dims for row in self.rows):
            best = self.best(dims)
            if best is not None and best.seconds:
                layout = best.option.step.layout
                choice = TunedConfig(
                    cuts=layout.cuts or (),
                    num_micro_batches=layout.num_micro_batches,
                    step_seconds=best.seconds,
                    measured=now,
                )
                paths.append(remember_tuned(self.config, best.option.step, choice))
        return paths[0].parent

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        first = self.rows[0].option  # which has one device
        alone = self.best(first.dims)
        one = None if alone is None else alone.seconds
        with torch.device("meta"):
            blocks = [block.name for block in UNet3d(first.step.topology).blocks()]
        devices = dict.fromkeys(gpu for row in self.rows for gpu in row.option.dims.all_devices)
        return {
            "size": list(first.step.size),
            "batch_size": self.config.training.num_patches,
            "precision": first.step.precision,
            "devices": [hardware(device) for device in devices],
            "best_one_device_seconds": one,
            "num_left_out": self.num_left_out,
            "rows": [self._row(row, one, blocks) for row in self.rows],
        }

    def _row(self, row: Row, one: float | None, blocks: list[str]) -> dict[str, Any]:
        dims, layout = row.option.dims, row.option.step.layout
        cuts = layout.cuts or ()
        return {
            "name": in_words(dims),
            "parallel": dims.mode,
            "replicas": dims.num_replicas,
            "shards": dims.num_shards,
            "devices": [str(device) for device in dims.all_devices],
            "cuts": list(cuts),
            "cut_before": [blocks[cut] for cut in cuts],
            "num_micro_batches": layout.num_micro_batches,
            "predicted_seconds": row.option.seconds,
            "seconds": row.seconds,
            "ratio": one / row.seconds if one and row.seconds else None,
            "peak_bytes": list(row.peak_bytes),
            "chosen": row is self.best(self.asked),
            "fastest": row is self.best(),
        }


def measure(
    config: Config,
    network: NetworkPlan,
    watch: Callable[[int, int, str], object] = lambda number, total, name: None,
) -> Sweep:
    """Measure one device, and every placement that is requested or that ``auto`` chooses from.

    After :data:`LIMIT_SECONDS`, no new setting begins once each placement has one; ``watch`` gets
    the number of each setting, the total, and its name.
    """
    config = network.settled(config)
    dims = ParallelDims.resolve(config.parallel.model_copy(update={"data_parallel": False}))
    check_stages(config, network, dims.num_stages)
    wanted = _settings(config, network, dims)
    began = time.monotonic()
    logger.info("measuring up to %d settings in about %.0f min", len(wanted), LIMIT_SECONDS / 60)
    rows: dict[int, Row] = {}
    # With few micro-batches first, so that each placement has its first row early.
    for index, option in sorted(
        enumerate(wanted), key=lambda numbered: numbered[1].step.layout.num_micro_batches
    ):
        is_new = all(row.option.dims != option.dims for row in rows.values())
        if time.monotonic() - began > LIMIT_SECONDS and not is_new:
            continue
        layout = option.step.layout
        cut = f", cut {','.join(map(str, layout.cuts))}" if layout.cuts else ""
        count = counted(layout.num_micro_batches, "micro-batch")
        name = f"{in_words(option.dims)}{cut}, {count}"
        watch(len(rows) + 1, len(wanted), name)
        seconds, peak_bytes = _timed(config, option)
        rows[index] = Row(option=option, seconds=seconds, peak_bytes=peak_bytes)
        took = "out of memory" if seconds is None else f"{1000 * seconds:.1f} ms"
        logger.info("%s: %s", name, took)
    return Sweep(
        config=config,
        asked=None if config.parallel.mode == "auto" else dims,
        rows=tuple(rows[index] for index in sorted(rows)),
        num_left_out=len(wanted) - len(rows),
    )


def _settings(config: Config, network: NetworkPlan, asked: ParallelDims) -> list[PlacementOption]:
    """Return all settings to measure: one device first, then placement after placement."""
    devices = asked.all_devices
    one = next((device for device in devices if device.type == "cuda"), devices[0])
    found = [placed(config.parallel, "none", (one,))]
    if config.parallel.mode == "auto":
        found += possible_dims(config, network, devices)
    else:
        found.append(asked)
    link = measure_link(devices)
    if link is not None:
        logger.info("%s", link_line(link))
    memory, options = memory_of((one, *devices), None), []
    for option in timed_options(config, network, dict.fromkeys(found), memory, link):
        dims = option.dims
        counts = [config.training.num_micro_batches]
        # Several processes start again for each setting, which takes long.
        if dims.mode in ("none", "model"):
            counts = micro_batch_counts(config, dims.share_of(network.batch_size))
        every: list[tuple[int, ...] | None] = [None]
        if dims.mode == "model":
            every = _cuts(config, option.divided(max(counts)).step)
        options += [option.divided(count, cuts) for cuts in every for count in counts]
    return options


def _cuts(config: Config, step: Step) -> list[tuple[int, ...] | None]:
    """Return the default cuts, the cuts of the settings, and cuts balanced by time."""
    with torch.device("meta"):
        found = [default_cuts(UNet3d(step.topology), step.layout)]
    found += [config.parallel.cut_blocks] if config.parallel.cut_blocks else []
    return list(dict.fromkeys([*found, time_cuts(step)]))


def micro_batch_counts(config: Config, batch_size: int) -> list[int]:
    """Return the numbers of micro-batches to measure, rising."""
    if config.model.norm == "batch":  # its statistics are those of the whole batch
        return [1]
    powers = {2**exponent for exponent in range(batch_size.bit_length())}
    return sorted(powers | {config.training.num_micro_batches, batch_size})


def _timed(config: Config, option: PlacementOption) -> StepTime:
    dims, layout = option.dims, option.step.layout
    if dims.num_processes == 1:
        try:
            return time_step(option.step, Group(Ranks()))
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY
        finally:
            if torch.cuda.is_available():  # free the devices for the next setting
                gc.collect()
                release_streams()
                torch.cuda.empty_cache()
    parallel = settings_for(config.parallel, dims)
    parallel = parallel.model_copy(update={"cuts": layout.cuts or "encoder-decoder"})
    training = config.training.model_copy(update={"micro_batches": layout.num_micro_batches})
    settings = config.model_copy(update={"parallel": parallel, "training": training})
    with meeting_folder() as folder:
        path, record = folder / "settings.yaml", folder / "step.json"
        path.write_text(settings.to_yaml())
        try:
            launch(
                ["plan", "--config", str(path), "--step-record", str(record)],
                folder,
                num_ranks=dims.num_processes,
                max_restarts=0,
                on_gpus=any(device.type == "cuda" for device in dims.all_devices),
            )
        except Unet3dError:
            if not record.exists():
                raise
        seconds, peak_bytes = json.loads(record.read_text())
        return seconds, peak_bytes


def measure_rank(config: Config, network: NetworkPlan, path: Path) -> None:
    """Take training steps with the other ranks, and write a :data:`StepTime` as JSON.

    The first rank writes it, or a rank that runs out of memory, which then raises DoesNotFitError.
    """
    with joined(Ranks.from_environment()) as group:
        try:
            dims = ParallelDims.resolve(config.parallel, ranks=group.ranks)
            precision = resolve_precision(config.training.precision, dims.devices, group.exchange)
            group.open(config.parallel.timeout_seconds)
            found = time_step(network.step(config, dims, precision), group)
        except torch.OutOfMemoryError as error:
            write_atomically(path, lambda file: file.write(json.dumps(OUT_OF_MEMORY).encode()))
            raise DoesNotFitError(f"rank {group.ranks.rank} ran out of memory") from error
        if group.is_first:
            write_atomically(path, lambda file: file.write(json.dumps(found).encode()))


def time_step(step: Step, group: Group) -> StepTime:
    """Measure training steps on random volumes with the ranks of a group."""
    layout, topology = step.layout, step.topology
    refuse_beyond_memory(topology)
    torch.manual_seed(0)
    model = UNet3d(topology)
    to_parameter_dtype(model, step.precision)
    executor = parallelize(model, layout, group)
    optimization = Optimization(model, step.settings, step.precision)
    image, target = empty_batch(replace(step, augmentation=None), executor)
    image.normal_()
    target.random_(topology.num_classes)
    planes = step.size[0] if layout.num_shards > 1 else None

    def run() -> None:
        executor.forward_backward(image, target, step.loss, optimization.scale, planes=planes)
        optimization.step(0.0)  # the work is the same at any rate

    def wait() -> None:
        for device in layout.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def timed() -> float:
        wait()
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began

    run()  # creates the optimizer's state
    on_gpu = any(device.type == "cuda" for device in layout.devices)
    with measured_steps(executor, optimization.optimizer) as meter:
        for _ in range(NUM_WARM_UP_STEPS if on_gpu else 1):
            run()
    measured = meter.read(optimization.optimizer)
    peaks = [measured[slot.index].peak_bytes for slot in executor.slots]
    median = statistics.median(timed() for _ in range(NUM_TIMED_STEPS))
    seconds = max(group.exchange(median))
    return seconds, [peak for of_rank in group.exchange(peaks) for peak in of_rank]
