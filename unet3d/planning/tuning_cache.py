"""The fastest measured micro-batches and cuts, for settings that leave them open.

``plan --measure`` writes them to a file in the cache folder, under a key of everything that the
time of a step depends on; :func:`resolve_auto` replaces ``auto`` by them.
"""

import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unet3d import __version__
from unet3d.config import Config
from unet3d.errors import counted
from unet3d.inputs.plain_data import key_of
from unet3d.planning.memory_estimate import Step
from unet3d.preparation.cache import Cache
from unet3d.records import recall, remember

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """The fastest measured micro-batches and cuts of a training run."""

    cuts: tuple[int, ...]
    """Index in the block list at which each stage but the first starts."""
    num_micro_batches: int
    step_seconds: float
    measured: str
    """Date and time of the measurement, for people."""


def describe(step: Step) -> dict[str, Any]:
    """Return the properties that determine the time of a step, except cuts and micro-batches."""
    layout, settings = step.layout, step.settings
    return {
        "topology": step.topology.to_dict(),
        "size": list(step.size),
        "batch_size": step.batch_size,
        "batch_dice": step.loss.joins_samples,
        "regions": [list(region) for region in step.regions],
        "optimizer": settings.optimizer,
        "devices": [hardware(device) for device in layout.devices],
        # Two stages on one GPU take another time than on two equal GPUs.
        "sharing": [layout.devices.index(device) for device in layout.devices],
        "replicas": layout.num_replicas,
        "shards": layout.num_shards,
        "captures": layout.captures,
        "recompute": layout.recompute,
        "offload": layout.offload,
        "precision": step.precision,
        "versions": [torch.__version__, torch.version.cuda, __version__],
    }


def hardware(device: torch.device) -> str:
    """Return a description of a device of this machine, as far as times depend on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"{platform.machine()} of {platform.node()}, {counted(torch.get_num_threads(), 'thread')}"
    )


def is_here(device: torch.device) -> bool:
    """Return whether this machine has a device."""
    return device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()


def _record(config: Config, step: Step) -> Path:
    return Cache(config.data.cache).folder / "tuning" / f"{key_of(describe(step))}.json"


def remember_tuned(config: Config, step: Step, choice: TunedConfig) -> Path:
    """Save a choice where training runs with the same step find it, and return the file."""
    path = _record(config, step)
    remember(path, {**describe(step), "choice": asdict(choice)})
    return path


def recall_tuned(config: Config, step: Step) -> TunedConfig | None:
    """Return the fastest measured choice for such a step, if there is one for these devices."""

    def read(content: Any) -> TunedConfig:
        choice = content["choice"]
        return TunedConfig(**{**choice, "cuts": tuple(choice["cuts"])})

    if not all(map(is_here, step.layout.devices)):
        return None
    return recall(_record(config, step), read)


def resolve_auto(config: Config, step: Step) -> Config:
    """Return the settings with open cuts and micro-batches filled in.

    A measured choice is used only if the settings name neither micro-batches nor cuts. If they name
    one of the two, the other gets its default. The result has no open cuts or micro-batches, so a
    run that records it can be repeated.
    """
    training, parallel = config.training, config.parallel
    num_micro_batches, cuts = training.num_micro_batches, parallel.cuts
    choice = recall_tuned(config, step) if training.micro_batches == cuts == "auto" else None
    if choice is not None:
        num_micro_batches, cuts = choice.num_micro_batches, choice.cuts or "auto"
        logger.info(
            "using %s%s, the fastest that plan --measure found on %s (%.1f ms a step); "
            "--micro-batches or parallel.cuts override it",
            counted(choice.num_micro_batches, "micro-batch"),
            f" and parallel.cuts={','.join(map(str, choice.cuts))}" if choice.cuts else "",
            choice.measured,
            1000 * choice.step_seconds,
        )
    return config.with_values(
        {
            "training.micro_batches": num_micro_batches,
            "parallel.cuts": "encoder-decoder" if cuts == "auto" else cuts,
        }
    )
