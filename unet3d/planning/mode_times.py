"""Which way of placing a training is fastest here: a few steps of each, measured.

Each is taken by as many ranks as a training would have, so GPUs talk as they would then.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unet3d.config import Config
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.errors import Unet3dError
from unet3d.parallel import ParallelDims
from unet3d.planning.choice import in_words, settings_for, timed_options, tuning_key
from unet3d.planning.network_plan import NetworkPlan
from unet3d.planning.placements import PlacementOption, memory_of, possible_dims
from unet3d.planning.step_time import step_seconds
from unet3d.planning.tuning_cache import TunedConfig, remember_tuned

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TimedMode:
    """One way of placing a training, and what a step took."""

    option: PlacementOption
    """The way, with what was predicted."""
    seconds: float | None
    """Median time of a step in the slowest rank; None: one ran out of memory."""
    peak_bytes: tuple[int, ...]
    """Peak of each rank; empty if one ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class ModeTimes:
    """The ways that were measured."""

    config: Config
    """The settings that all share."""
    rows: tuple[TimedMode, ...]
    """One device first, if that is possible."""

    @property
    def fastest(self) -> TimedMode | None:
        """The fastest of all; None: nothing fits."""
        timed = [row for row in self.rows if row.seconds is not None]
        return min(timed, key=lambda row: row.seconds or 0.0, default=None)

    def remember(self) -> list[Path]:
        """Leave the times where ``--parallel auto`` finds them.

        Returns:
            A file for each way that fits.

        Raises:
            CacheError: The cache folder cannot be written to.
        """
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return [
            remember_tuned(
                tuning_key(self.config, row.option),
                TunedConfig(
                    cuts=(),
                    num_micro_batches=row.option.step.layout.num_micro_batches,
                    step_seconds=row.seconds,
                    measured=now,
                ),
            )
            for row in self.rows
            if row.seconds is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        step = self.rows[0].option.step
        return {
            "size": list(step.size),
            "batch_size": self.config.training.num_patches,
            "precision": step.precision,
            "num_micro_batches": step.layout.num_micro_batches,
            "modes": [
                {
                    "name": in_words(row.option.dims),
                    "parallel": row.option.dims.mode,
                    "replicas": row.option.dims.num_replicas,
                    "shards": row.option.dims.num_shards,
                    "devices": [str(device) for device in row.option.dims.all_devices],
                    "predicted_seconds": step_seconds(row.option.step),
                    "seconds": row.seconds,
                    "peak_bytes": list(row.peak_bytes),
                    "fastest": row is self.fastest,
                }
                for row in self.rows
            ],
        }


def time_modes(
    config: Config,
    network: NetworkPlan,
    watch: Callable[[str], object] = lambda name: None,
) -> ModeTimes | None:
    """Measure every way of placing a training that ``auto`` chooses from, or the one that is set.

    Args:
        config: The settings; the devices are of this machine.
        network: What is trained.
        watch: Is told the name of each way before it is measured.

    Returns:
        The times; None where there is only one device, or only stages of the network are possible:
        :func:`unet3d.planning.tuning.tune` measures these.

    Raises:
        DeviceError: A device is unknown or absent.
        Unet3dError: A rank failed for another reason than a lack of memory.
    """
    config = network.settled(config)
    asked = ParallelDims.resolve(config.parallel)
    found: Sequence[ParallelDims] = (asked,)
    if config.parallel.mode == "auto":
        found = possible_dims(config, network, asked.all_devices)
    if len(asked.all_devices) == 1 or any(dims.mode == "model" for dims in found):
        return None
    devices = tuple(device for dims in found for device in dims.all_devices)
    rows = []
    for option in timed_options(config, network, found, memory_of(devices, None)):
        watch(in_words(option.dims))
        rows.append(_timed(config, option))
        logger.info("%s: %s", in_words(option.dims), _took(rows[-1]))
    return ModeTimes(config=config, rows=tuple(rows))


def _timed(config: Config, option: PlacementOption) -> TimedMode:
    dims = option.dims
    settings = config.model_copy(update={"parallel": settings_for(config.parallel, dims)})
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
        found = json.loads(record.read_text())
    return TimedMode(option=option, seconds=found["seconds"], peak_bytes=tuple(found["peak_bytes"]))


def _took(row: TimedMode) -> str:
    return "out of memory" if row.seconds is None else f"{1000 * row.seconds:.1f} ms"
