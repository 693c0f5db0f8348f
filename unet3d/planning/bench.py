"""Real training steps of one network and one batch, divided in one way or another, and their times.

The network, executor, loss and optimizer are those of a training, on random volumes of its size.
"""

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from unet3d.config import Balance
from unet3d.memory.measurement import measured_steps
from unet3d.model import SegmentationLoss, UNet3d
from unet3d.model.optimizer import Optimization, num_states
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import Executor, Layout, choose_cuts, image_dtype, parallelize
from unet3d.parallel.balance.cuts import time_cost
from unet3d.parallel.balance.stopwatch import median_seconds
from unet3d.parallel.cuda_graphs import release_streams
from unet3d.parallel.partition import StageCost, default_cuts
from unet3d.parallel.precision import to_parameter_dtype
from unet3d.planning.tuning_cache import TuningKey
from unet3d.preparation.cache import Cache

logger = logging.getLogger(__name__)

MAX_NEIGHBOURS = 2
"""Number of cuts that are measured besides the balanced ones."""

NUM_WARM_UP_STEPS = 4
"""Steps of a setting on GPUs before the timed ones; by then a small step on one GPU has been
captured. On CPUs the two steps that make the optimizer's state and count memory are enough."""
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


class Bench:
    """One network and one batch, which every setting is measured with."""

    def __init__(self, tuning_key: TuningKey) -> None:
        self.tuning_key = tuning_key
        config, topology = tuning_key.config, tuning_key.topology
        size = tuning_key.size
        self.settings = config.training
        self.timings = Cache(config.data.cache).folder / "timings"
        refuse_beyond_memory(topology)
        self.model = UNet3d(topology)
        to_parameter_dtype(self.model, tuning_key.precision)
        generator = torch.Generator().manual_seed(config.training.seed)
        shape = (config.training.num_patches, topology.in_channels, *size)
        self.image = torch.randn(shape, generator=generator)
        self.target = torch.randint(
            topology.num_classes,
            (config.training.num_patches, *size),
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
            self.model, layout, self.tuning_key.size, self.settings.num_patches, self.timings
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
            batch_size=self.settings.num_patches,
            num_states=num_states(self.settings),
            folder=self.timings,
        )

    def row(self, layout: Layout, hopeless_seconds: float = math.inf) -> Row:
        """Measure one setting, with two timed steps if both take so long."""
        try:
            return self._measured(layout, hopeless_seconds)
        except torch.OutOfMemoryError:
            return Row(layout=layout, seconds=None, peak_bytes={})
        finally:
            _clean_up(self.model)

    def _measured(self, layout: Layout, hopeless_seconds: float) -> Row:
        executor = parallelize(self.model, layout)
        optimization = Optimization(self.model, self.settings, self.tuning_key.precision)
        image = self.image.to(executor.input_device, image_dtype(executor.module))
        target = self.target.to(executor.output_device)
        loss = SegmentationLoss.of(self.settings, self.tuning_key.regions)

        def step() -> None:
            executor.forward_backward(image, target, loss, optimization.scale)
            # The work is the same at any rate; at this one the network does not change.
            optimization.step(0.0)

        step()  # creates the optimizer's state
        peak_bytes = _peak_bytes(executor, optimization, step)
        on_gpu = any(device.type == "cuda" for device in layout.devices)
        num_warm_up_steps = NUM_WARM_UP_STEPS if on_gpu else 0
        seconds = median_seconds(step, layout.devices, num_warm_up_steps, hopeless_seconds)
        return Row(layout=layout, seconds=seconds, peak_bytes=peak_bytes)


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


def _clean_up(model: UNet3d) -> None:
    """Free everything of one setting, so that the next has the devices to itself."""
    model.zero_grad()
    gc.collect()
    if torch.cuda.is_available():
        release_streams()
        torch.cuda.empty_cache()
