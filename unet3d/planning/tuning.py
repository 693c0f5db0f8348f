"""Which cut and how many micro-batches are fastest here: measured, not guessed.

Every setting takes the steps of :mod:`unet3d.planning.bench`.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch

from unet3d.config import Config
from unet3d.errors import ConfigError
from unet3d.parallel import Layout, ParallelDims, resolve_precision
from unet3d.planning.bench import Bench, Row
from unet3d.planning.network_plan import NetworkPlan, check_stages
from unet3d.planning.tuning_cache import TunedConfig, TuningKey

logger = logging.getLogger(__name__)

HOPELESS = 1.5
"""A setting gets no more than two timed steps if both take this many times the best."""
LIMIT_SECONDS = 300.0
"""Time from which on no further setting is begun, once each placement has one."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a sweep is."""

    num_done: int
    """Settings that were measured."""
    num_settings: int
    """Settings in all."""
    seconds_left: float | None
    """As the settings before it promise; None: there was none yet."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The results of a sweep."""

    tuning_key: TuningKey
    """The key that all steps share."""
    rows: tuple[Row, ...]
    """One device first, then cut after cut; for each, rising micro-batches."""
    num_left_out: int
    """Settings for which there was no time."""

    @property
    def fastest(self) -> Row | None:
        """The fastest row of all; None: nothing fits."""
        return _fastest(self.rows)

    @property
    def fastest_asked(self) -> Row | None:
        """The fastest row on the devices that were asked for; None: nothing fits there."""
        return _fastest(self._rows_on(self.tuning_key.devices))

    def choices(self) -> list[tuple[TuningKey, TunedConfig]]:
        """Return what trainings take from now on, on the asked devices and on one of them."""
        places = dict.fromkeys(row.layout.devices for row in self.rows)
        found = [
            (self._key_on(devices), row)
            for devices in places
            if (row := _fastest(self._rows_on(devices))) is not None
        ]
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return [
            (
                key,
                TunedConfig(
                    cuts=row.layout.cuts or (),
                    num_micro_batches=row.layout.num_micro_batches,
                    step_seconds=row.seconds,
                    measured=now,
                ),
            )
            for key, row in found
            if key is not None and row.seconds is not None
        ]

    def _rows_on(self, devices: tuple[torch.device, ...]) -> list[Row]:
        return [row for row in self.rows if row.layout.devices == devices]

    def _key_on(self, devices: tuple[torch.device, ...]) -> TuningKey | None:
        """Return the key of a training on these devices; None: it would compute otherwise."""
        key = self.tuning_key
        if devices == key.devices:
            return key
        config = key.config
        if resolve_precision(config.training.precision, devices) != key.precision:
            return None
        alone = config.parallel.model_copy(update={"mode": "none"})
        return replace(key, config=config.model_copy(update={"parallel": alone}), devices=devices)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        alone = [row for row in self.rows if len(row.layout.devices) == 1]
        best = _fastest(alone)
        reference = None if best is None else best.seconds
        blocks = self.tuning_key.blocks()
        return {
            **self.tuning_key.describe(),
            "best_one_device_seconds": reference,
            "num_left_out": self.num_left_out,
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
            "chosen": row is self.fastest_asked,
            "fastest": row is self.fastest,
        }


def tune(
    config: Config, network: NetworkPlan, watch: Callable[[Progress], object] = lambda _: None
) -> Tuning:
    """Measure steps with every sensible number of micro-batches and every sensible cut.

    No further setting is begun after :data:`LIMIT_SECONDS`. One device and the first cut, with all
    numbers of micro-batches, come before the other cuts.

    Args:
        config: The settings; micro-batches and cuts that they name are measured besides.
        network: What is trained.
        watch: Is told how far it is, before each setting.

    Raises:
        DeviceError: A device is unknown or absent, or the precision does not suit it.
        ConfigError: The mode has nothing to measure.
        CacheError: The cache folder cannot be written to.
    """
    config = network.settled(config)
    mode = config.parallel.mode
    if mode not in ("auto", "none", "model"):
        raise ConfigError(
            f"parallel.mode is {mode}, which has neither cuts nor a pipeline to measure; use "
            "--parallel model"
        )
    if config.parallel.replicas > 1:
        raise ConfigError(
            f"parallel.replicas is {config.parallel.replicas}, but what is measured is one "
            "replica: name its devices and its share of --batch-size, without --replicas; "
            "training with replicas finds the result"
        )
    if mode == "auto":
        has_several = len(config.parallel.devices or ()) > 1
        config = config.with_values({"parallel.mode": "model" if has_several else "none"})
    dims = ParallelDims.resolve(config.parallel)
    devices = dims.devices
    check_stages(config, network, dims.num_stages)
    precision = resolve_precision(config.training.precision, devices)
    tuning_key = TuningKey(
        config=config,
        topology=network.topology,
        regions=network.regions,
        size=network.size_in(network.batch_size),
        devices=devices,
        precision=precision,
    )
    began = time.monotonic()
    bench = Bench(tuning_key)
    one = next((device for device in devices if device.type == "cuda"), devices[0])
    layout = replace(Layout.of(config, dims, precision), cuts=None)
    counts = micro_batch_counts(config)
    ways = [replace(layout, devices=(one,))]
    if len(devices) > 1:
        full = replace(layout, num_micro_batches=max(counts))
        ways += [replace(layout, cuts=cuts) for cuts in bench.sensible_cuts(full)]
    wanted = [replace(way, num_micro_batches=count) for way in ways for count in counts]
    logger.info(
        "measuring up to %d settings in about %.0f min at most: %s %s micro-batch(es)",
        len(wanted),
        LIMIT_SECONDS / 60,
        "one device"
        + (f" and {len(ways) - 1} cut(s) over {len(devices)}" if len(ways) > 1 else "")
        + (", each with" if len(counts) > 1 else ", with"),
        ", ".join(map(str, counts)),
    )
    rows = _measured_rows(bench, _important_first(ways, counts), began, watch)
    return Tuning(
        tuning_key=tuning_key,
        rows=tuple(sorted(rows, key=lambda row: wanted.index(row.layout))),
        num_left_out=len(wanted) - len(rows),
    )


def _important_first(ways: Sequence[Layout], counts: Sequence[int]) -> list[Layout]:
    """Return all settings in the order in which they are measured: the second may be the last."""
    first = [(way, count) for count in counts for way in ways[:2]]
    others = [(way, count) for way in ways[2:] for count in counts]
    return [replace(way, num_micro_batches=count) for way, count in first + others]


def _measured_rows(
    bench: Bench, layouts: Sequence[Layout], began: float, watch: Callable[[Progress], object]
) -> list[Row]:
    """Measure one setting after another while there is time."""
    rows: list[Row] = []
    first_began = time.monotonic()
    num_placements = len({layout.devices for layout in layouts})
    progress = Progress(num_done=0, num_settings=len(layouts), seconds_left=None)
    for layout in layouts:
        if time.monotonic() - began > LIMIT_SECONDS and len(rows) >= num_placements:
            break
        watch(progress)
        best = _fastest([row for row in rows if row.layout.devices == layout.devices])
        hopeless = math.inf if best is None else HOPELESS * _seconds_of(best)
        rows.append(bench.row(layout, hopeless))
        now = time.monotonic()
        a_row = (now - first_began) / len(rows)
        left = min(
            a_row * (len(layouts) - len(rows)), max(0.0, began + LIMIT_SECONDS - now) + a_row
        )
        progress = Progress(num_done=len(rows), num_settings=len(layouts), seconds_left=left)
        logger.info(
            "%d of %d: %s, about %.0f s left", len(rows), len(layouts), _in_words(rows[-1]), left
        )
    _confirm(bench, rows, began)
    return rows


def _confirm(bench: Bench, rows: list[Row], began: float) -> None:
    """Measure the fastest row of each placement again, until it is the fastest on average too.

    The least of many times is a lucky one where other programs use the machine at times.
    """
    for devices in {row.layout.devices for row in rows}:
        confirmed: set[Layout] = set()
        while time.monotonic() - began <= LIMIT_SECONDS:
            here = [row for row in rows if row.layout.devices == devices]
            best = _fastest(here)
            if best is None or len(here) == 1 or best.layout in confirmed:
                break
            confirmed.add(best.layout)
            again = bench.row(best.layout, math.inf)
            if again.seconds is not None:
                mean = (_seconds_of(best) + again.seconds) / 2
                again = replace(best, seconds=mean)
            rows[rows.index(best)] = again
            logger.info("the fastest so far again: %s", _in_words(again))


def _seconds_of(row: Row) -> float:
    return math.inf if row.seconds is None else row.seconds


def _fastest(rows: Sequence[Row]) -> Row | None:
    timed = [row for row in rows if row.seconds is not None]
    return min(timed, key=_seconds_of, default=None)


def _in_words(row: Row) -> str:
    layout = row.layout
    place = f"cut {','.join(map(str, layout.cuts))}" if layout.cuts else "one device"
    took = "out of memory" if row.seconds is None else f"{1000 * row.seconds:.1f} ms"
    return f"{place}, {layout.num_micro_batches} micro-batch(es): {took}"


def micro_batch_counts(config: Config) -> list[int]:
    """Return the numbers of micro-batches that are worth a measurement, rising.

    Args:
        config: The batch, and perhaps a number that is to be among them.
    """
    batch_size = config.training.num_patches
    if config.model.norm == "batch":  # its statistics are those of the whole batch
        return [1]
    powers = {2**exponent for exponent in range(batch_size.bit_length())}
    return sorted(powers | {config.training.num_micro_batches, batch_size})
