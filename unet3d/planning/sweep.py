"""Which mode, cut and number of micro-batches are fastest on these devices: measured.

Every setting takes real training steps: in this process where it needs one, else in as many ranks
as a training would have, so that GPUs exchange messages as they would then.
"""

import gc
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import Ranks
from unet3d.errors import Unet3dError
from unet3d.inputs.plain_data import validated
from unet3d.model import UNet3d
from unet3d.parallel import ParallelDims, resolve_precision
from unet3d.parallel.cuda_graphs import release_streams
from unet3d.planning.choice import in_words, settings_for
from unet3d.planning.cuts import choose_cuts
from unet3d.planning.network_plan import NetworkPlan, check_stages
from unet3d.planning.placements import (
    PlacementOption,
    divided,
    make_option,
    memory_of,
    placed,
    possible_dims,
)
from unet3d.planning.rank_step import OUT_OF_MEMORY, StepTime, time_step
from unet3d.planning.tuning_cache import TunedConfig, hardware, remember_tuned

logger = logging.getLogger(__name__)

LIMIT_SECONDS = 300.0
"""Time from which on no further setting is begun, once each placement has one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting, and what its steps took."""

    option: PlacementOption
    """Mode, devices, cuts and micro-batches, with what is predicted."""
    found: StepTime
    """Time and memory."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All settings that were measured."""

    config: Config
    """The settings that all share."""
    asked: ParallelDims | None
    """The placement that the settings name; None: it is left open."""
    rows: tuple[Row, ...]
    """One device first, then the other placements, cut after cut."""
    num_left_out: int
    """Settings for which there was no time."""

    @property
    def fastest(self) -> Row | None:
        """The fastest row of all; None: nothing fits."""
        return _fastest(self.rows)

    @property
    def chosen(self) -> Row | None:
        """The fastest row of the placement that was asked for; None: nothing fits there."""
        if self.asked is None:
            return self.fastest
        return _fastest([row for row in self.rows if row.option.dims == self.asked])

    def remember(self) -> Path:
        """Leave the fastest of each placement where trainings find it, and return the folder."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        paths = []
        for dims in dict.fromkeys(row.option.dims for row in self.rows):
            best = _fastest([row for row in self.rows if row.option.dims == dims])
            if best is not None:
                layout = best.option.step.layout
                choice = TunedConfig(
                    cuts=layout.cuts or (),
                    num_micro_batches=layout.num_micro_batches,
                    step_seconds=_seconds(best),
                    measured=now,
                )
                paths.append(remember_tuned(self.config, best.option.step, choice))
        return paths[0].parent

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        step = self.rows[0].option.step
        best = _fastest([row for row in self.rows if row.option.dims.mode == "none"])
        one = None if best is None else best.found.seconds
        with torch.device("meta"):
            blocks = [block.name for block in UNet3d(step.topology).blocks()]
        devices = dict.fromkeys(gpu for row in self.rows for gpu in row.option.dims.all_devices)
        return {
            "size": list(step.size),
            "batch_size": self.config.training.num_patches,
            "precision": step.precision,
            "devices": [hardware(device) for device in devices],
            "best_one_device_seconds": one,
            "num_left_out": self.num_left_out,
            "rows": [self._row(row, one, blocks) for row in self.rows],
        }

    def _row(self, row: Row, one: float | None, blocks: list[str]) -> dict[str, Any]:
        dims, layout, seconds = row.option.dims, row.option.step.layout, row.found.seconds
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
            "seconds": seconds,
            "ratio": one / seconds if one and seconds else None,
            "peak_bytes": list(row.found.peak_bytes),
            "chosen": row is self.chosen,
            "fastest": row is self.fastest,
        }


def measure(
    config: Config,
    network: NetworkPlan,
    watch: Callable[[int, int, str], object] = lambda number, total, name: None,
) -> Sweep:
    """Measure one device, and every placement that is asked for or that ``auto`` chooses from.

    No further setting is begun after :data:`LIMIT_SECONDS`, once each placement has one; ``watch``
    is told the number of each setting, how many there are, and its name.
    """
    config = network.settled(config)
    dims = ParallelDims.resolve(config.parallel.model_copy(update={"engine": "ddp"}))
    check_stages(config, network, dims.num_stages)
    wanted = _settings(config, network, dims)
    began = time.monotonic()
    logger.info("measuring up to %d settings in about %.0f min", len(wanted), LIMIT_SECONDS / 60)
    rows: dict[int, Row] = {}
    # With few micro-batches first, so that each placement has its first row early.
    by_count = sorted(
        range(len(wanted)), key=lambda index: wanted[index].step.layout.num_micro_batches
    )
    for index in by_count:
        option = wanted[index]
        is_new = all(row.option.dims != option.dims for row in rows.values())
        if time.monotonic() - began > LIMIT_SECONDS and not is_new:
            continue
        name = _in_words(option)
        watch(len(rows) + 1, len(wanted), name)
        rows[index] = Row(option=option, found=_timed(config, option))
        seconds = rows[index].found.seconds
        took = "out of memory" if seconds is None else f"{1000 * seconds:.1f} ms"
        logger.info("%s: %s", name, took)
    return Sweep(
        config=config,
        asked=None if config.parallel.mode == "auto" else dims,
        rows=tuple(rows[index] for index in sorted(rows)),
        num_left_out=len(wanted) - len(rows),
    )


def _settings(config: Config, network: NetworkPlan, asked: ParallelDims) -> list[PlacementOption]:
    """Return all that is measured: one device first, then placement after placement."""
    devices = asked.all_devices
    one = next((device for device in devices if device.type == "cuda"), devices[0])
    found = [placed(config.parallel, "none", (one,))]
    if config.parallel.mode == "auto":
        found += possible_dims(config, network, devices)
    else:
        found.append(asked)
    precision = resolve_precision(config.training.precision, devices)
    options = []
    for dims in dict.fromkeys(found):
        # Several processes start anew for each setting, which takes long.
        is_pipeline = dims.mode in ("none", "model")
        counts = (
            micro_batch_counts(config, dims.share_of(network.batch_size))
            if is_pipeline
            else [config.training.num_micro_batches]
        )
        option = make_option(
            config,
            network,
            dims,
            precision=precision,
            num_micro_batches=max(counts),
            memory=memory_of(dims.all_devices, None),
        )
        ways = _cuts(config, option) if dims.mode == "model" else [None]
        options += [divided(option, count, cuts) for cuts in ways for count in counts]
    return options


def _cuts(config: Config, option: PlacementOption) -> list[tuple[int, ...] | None]:
    """Return the default cuts, those that are set, and balanced ones."""
    found = [choose_cuts(option.step, "encoder-decoder")]
    found += [config.parallel.cuts] if config.parallel.cuts else []
    found += [choose_cuts(option.step, "time"), choose_cuts(option.step, "memory")]
    return list(dict.fromkeys(found))


def micro_batch_counts(config: Config, batch_size: int) -> list[int]:
    """Return the numbers of micro-batches that are worth a measurement, rising."""
    if config.model.norm == "batch":  # its statistics are those of the whole batch
        return [1]
    powers = {2**exponent for exponent in range(batch_size.bit_length())}
    return sorted(powers | {config.training.num_micro_batches, batch_size})


def _timed(config: Config, option: PlacementOption) -> StepTime:
    dims, step = option.dims, option.step
    if dims.num_processes == 1:
        try:
            return time_step(step, Group(Ranks()))
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY
        finally:
            if torch.cuda.is_available():  # the next setting has the devices to itself
                gc.collect()
                release_streams()
                torch.cuda.empty_cache()
    parallel = settings_for(config.parallel, dims)
    parallel = parallel.model_copy(update={"cuts": step.layout.cuts})
    training = config.training.model_copy(update={"micro_batches": step.layout.num_micro_batches})
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
        return validated(StepTime, json.loads(record.read_text()))


def _in_words(option: PlacementOption) -> str:
    layout = option.step.layout
    cut = f", cut {','.join(map(str, layout.cuts))}" if layout.cuts else ""
    return f"{in_words(option.dims)}{cut}, {layout.num_micro_batches} micro-batch(es)"


def _seconds(row: Row) -> float:
    return row.found.seconds or 0.0


def _fastest(rows: tuple[Row, ...] | list[Row]) -> Row | None:
    timed = [row for row in rows if row.found.seconds is not None]
    return min(timed, key=_seconds, default=None)
