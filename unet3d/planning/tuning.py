"""Which cut and how many micro-batches are fastest here: measured, not guessed.

Every setting takes real steps: the real network, executor, loss and optimizer, on random volumes of
the training's size.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import torch

from unet3d.config import Balance, Config
from unet3d.errors import ConfigError
from unet3d.memory.measurement import measured_steps
from unet3d.model import UNet3d, dice_cross_entropy
from unet3d.model.optimizer import (
    Optimization,
    num_states,
)
from unet3d.parallel import (
    Executor,
    Layout,
    ParallelDims,
    choose_cuts,
    image_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.balance.cuts import time_cost
from unet3d.parallel.balance.stopwatch import median_seconds
from unet3d.parallel.cuda_graphs import release_streams
from unet3d.parallel.partition import StageCost, default_cuts
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.experiment import NetworkPlan
from unet3d.planning.tuning_cache import TunedConfig, TuningKey
from unet3d.volumes.cache import Cache

logger = logging.getLogger(__name__)

MAX_NEIGHBOURS = 2
"""Number of cuts that are measured besides the balanced ones."""

NUM_WARM_UP_STEPS = 4
"""Steps of a setting before the timed ones; by then a small step on one GPU has been captured."""
TOLERANCE = 1.05
"""A neighbour is measured where its blocks' times promise at most this many times the best."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option for the step, and what it took."""

    layout: Layout
    """Devices, cuts (none on one device) and micro-batches."""
    seconds: float | None
    """Median time of a step; None: it ran out of memory."""
    peak_bytes: dict[torch.device, int]
    """Peak per device; empty if it ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The results of a sweep."""

    tuning_key: TuningKey
    """The key that all steps share."""
    rows: tuple[Row, ...]
    """One device first, then cut after cut; for each, rising micro-batches."""
    choice: TunedConfig | None
    """The fastest option in the asked mode; None: none fits."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        reference = self._best_seconds(num_devices=1)
        blocks = self.tuning_key.blocks()
        return {
            **self.tuning_key.describe(),
            "best_one_device_seconds": reference,
            "rows": [self._row(row, reference, blocks) for row in self.rows],
        }

    def _row(self, row: Row, reference: float | None, blocks: Sequence[str]) -> dict[str, Any]:
        cuts = row.layout.cuts or ()
        return {
            "devices": [str(device) for device in row.layout.devices],
            "cuts": list(cuts),
            "cut_before": [blocks[cut] for cut in cuts],
            "num_micro_batches": row.layout.num_micro_batches,
            "seconds": row.seconds,
            "ratio": reference / row.seconds if reference and row.seconds else None,
            "peak_bytes": {str(device): peak for device, peak in row.peak_bytes.items()},
            "chosen": self.choice is not None
            and row.layout.devices == self.tuning_key.devices
            and (cuts, row.layout.num_micro_batches)
            == (self.choice.cuts, self.choice.num_micro_batches),
        }

    def _best_seconds(self, num_devices: int) -> float | None:
        seconds = (
            row.seconds
            for row in self.rows
            if row.seconds is not None and len(row.layout.devices) == num_devices
        )
        return min(seconds, default=None)


def tune(config: Config, network: NetworkPlan) -> Tuning:
    """Measure steps with every sensible number of micro-batches and every sensible cut.

    Args:
        config: The settings; micro-batches and cuts that they name are measured besides.
        network: What is trained.

    Raises:
        DeviceError: A device is unknown or absent, or the precision does not suit it.
        ConfigError: The mode has nothing to measure.
        CacheError: The cache folder cannot be written to.
    """
    if config.parallel.mode not in ("none", "model"):
        raise ConfigError(
            f"parallel.mode is {config.parallel.mode}, which has neither cuts nor a pipeline to "
            "measure; use --parallel model"
        )
    if config.parallel.replicas > 1:
        raise ConfigError(
            f"parallel.replicas is {config.parallel.replicas}, but what is measured is one "
            "replica: name its devices and its share of --batch-size, without --replicas; "
            "training with replicas finds the result"
        )
    dims = ParallelDims.resolve(config.parallel)
    devices = dims.devices
    precision = resolve_precision(config.training.precision, devices)
    tuning_key = TuningKey(
        config=config,
        topology=network.topology,
        size=network.size,
        devices=devices,
        precision=precision,
    )
    bench = _Bench(tuning_key)
    one = next((device for device in devices if device.type == "cuda"), devices[0])
    layout = replace(Layout.of(config, dims, precision), cuts=None)
    counts = micro_batch_counts(config)
    ways = [replace(layout, devices=(one,))]
    if len(devices) > 1:
        full = replace(layout, num_micro_batches=max(counts))
        ways += [replace(layout, cuts=cuts) for cuts in bench.sensible_cuts(full)]
    rows = [bench.row(replace(way, num_micro_batches=count)) for way in ways for count in counts]
    return Tuning(tuning_key=tuning_key, rows=tuple(rows), choice=_fastest(rows, devices))


def micro_batch_counts(config: Config) -> list[int]:
    """Return the numbers of micro-batches that are worth a measurement, rising.

    Args:
        config: The batch, and perhaps a number that is to be among them.
    """
    batch_size = config.training.batch_size
    if config.model.norm == "batch":  # its statistics are those of the whole batch
        return [1]
    powers = {2**exponent for exponent in range(batch_size.bit_length())}
    return sorted(powers | {config.training.num_micro_batches, batch_size})


def promising_neighbours(
    known: Sequence[tuple[int, ...]], cost: StageCost, num_blocks: int, num_micro_batches: int
) -> list[tuple[int, ...]]:
    """Return cuts one or two blocks beside known ones that may be faster, the best first.

    A step takes at least the time of one micro-batch through all stages, and of the others through
    the slowest.

    Args:
        known: Cuts that are measured anyway.
        cost: Seconds of one micro-batch in each possible stage.
        num_blocks: Number of blocks of the network.
        num_micro_batches: Number of micro-batches in a step.
    """

    def seconds(cuts: tuple[int, ...]) -> float:
        stages = [cost(i, *ends) for i, ends in enumerate(pairwise((0, *cuts, num_blocks)))]
        return sum(stages) + (num_micro_batches - 1) * max(stages)

    moved = {
        (*cuts[:index], cuts[index] + step, *cuts[index + 1 :])
        for cuts in known
        for index in range(len(cuts))
        for step in (-2, -1, 1, 2)
    }
    possible = [
        cuts
        for cuts in moved - set(known)
        if all(before < after for before, after in pairwise((0, *cuts, num_blocks)))
    ]
    limit = TOLERANCE * min(map(seconds, known))
    promising = [cuts for cuts in possible if seconds(cuts) <= limit]
    return sorted(promising, key=lambda cuts: (seconds(cuts), cuts))[:MAX_NEIGHBOURS]


class _Bench:
    """One network and one batch, which every setting is measured with."""

    def __init__(self, tuning_key: TuningKey) -> None:
        self.tuning_key = tuning_key
        config, topology = tuning_key.config, tuning_key.topology
        size = tuning_key.size
        self.settings = config.training
        self.timings = Cache(config.data.cache).folder / "timings"
        self.model = UNet3d(topology)
        to_parameter_dtype(self.model, tuning_key.precision)
        generator = torch.Generator().manual_seed(config.training.seed)
        shape = (config.training.batch_size, topology.in_channels, *size)
        self.image = torch.randn(shape, generator=generator)
        self.target = torch.randint(
            topology.num_classes,
            (config.training.batch_size, *size),
            dtype=torch.uint8 if topology.num_classes <= 256 else torch.int64,
            generator=generator,
        )

    def sensible_cuts(self, layout: Layout) -> list[tuple[int, ...]]:
        """Return the default cuts, balanced ones, those that are set, and promising neighbours."""
        config = self.tuning_key.config
        known = [default_cuts(self.model, len(layout.devices))]
        if config.parallel.cuts is not None:
            known.append(config.parallel.cuts)
        known.append(self._balanced(layout, "memory"))
        try:
            known.append(self._balanced(layout, "time"))
        except torch.OutOfMemoryError:
            logger.warning("a block alone runs out of memory, so no cut is balanced by time")
            return list(dict.fromkeys(known))
        finally:
            _clean_up(self.model)
        cost = time_cost(
            self.model, layout, self.tuning_key.size, self.settings.batch_size, self.timings
        )
        known = list(dict.fromkeys(known))
        num_blocks = len(self.model.blocks())
        return known + promising_neighbours(known, cost, num_blocks, layout.num_micro_batches)

    def _balanced(self, layout: Layout, balance: Balance) -> tuple[int, ...]:
        return choose_cuts(
            self.model,
            layout=layout,
            balance=balance,
            size=self.tuning_key.size,
            batch_size=self.settings.batch_size,
            num_states=num_states(self.settings),
            folder=self.timings,
        )

    def row(self, layout: Layout) -> Row:
        """Measure one setting."""
        try:
            row = self._measured(layout)
        except torch.OutOfMemoryError:
            row = Row(layout=layout, seconds=None, peak_bytes={})
        finally:
            _clean_up(self.model)
        logger.info(
            "%s, %d micro-batch(es): %s",
            f"cut {','.join(map(str, layout.cuts))}" if layout.cuts else "one device",
            layout.num_micro_batches,
            "out of memory" if row.seconds is None else f"{1000 * row.seconds:.1f} ms",
        )
        return row

    def _measured(self, layout: Layout) -> Row:
        executor = parallelize(self.model, layout)
        optimization = Optimization(self.model, self.settings, self.tuning_key.precision)
        image = self.image.to(executor.input_device, image_dtype(executor.module))
        target = self.target.to(executor.output_device)

        def step() -> None:
            executor.forward_backward(image, target, dice_cross_entropy, optimization.scale)
            # The work is the same at any rate; at this one the network does not change.
            optimization.step(0.0)

        step()  # creates the optimizer's state
        peak_bytes = _peak_bytes(executor, optimization, step)
        return Row(
            layout=layout,
            seconds=median_seconds(step, layout.devices, NUM_WARM_UP_STEPS),
            peak_bytes=peak_bytes,
        )


def _peak_bytes(
    executor: Executor, optimization: Optimization, step: Callable[[], None]
) -> dict[torch.device, int]:
    """Take a step and return the most that each device held in it."""
    with measured_steps(executor, optimization.optimizer) as meter:
        step()
    measured = meter.read(optimization.optimizer)
    peaks: dict[torch.device, int] = {}
    for slot in executor.slots:
        # Slots that share a GPU each have its peak; on a CPU they add up.
        before = peaks.get(slot.device, 0) if slot.device.type == "cpu" else 0
        peaks[slot.device] = before + measured[slot.index].peak_bytes
    return peaks


def _fastest(rows: Sequence[Row], devices: tuple[torch.device, ...]) -> TunedConfig | None:
    timed = [
        (row.seconds, row.layout)
        for row in rows
        if row.seconds is not None and row.layout.devices == devices
    ]
    if not timed:
        return None
    seconds, layout = min(timed, key=lambda entry: entry[0])
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    return TunedConfig(
        cuts=layout.cuts or (),
        num_micro_batches=layout.num_micro_batches,
        step_seconds=seconds,
        measured=now,
    )


def _clean_up(model: UNet3d) -> None:
    """Free everything of one setting, so that the next has the devices to itself."""
    model.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        release_streams()
        torch.cuda.empty_cache()
