"""How a training is divided where its settings leave that open: as measured, if it was measured.

``plan --measure`` writes the best micro-batches and cuts to a file in the cache folder, under a key
of all that the time of a step depends on; :func:`resolve_auto` replaces ``auto`` by them.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field

from unet3d.config import Config, Few, Shape
from unet3d.inputs.plain_data import PLAIN, at_most, key_of, validated
from unet3d.model import Regions, Topology, UNet3d
from unet3d.parallel.balance.stopwatch import (
    hardware,
    versions,
)
from unet3d.preparation.cache import (
    Cache,
)
from unet3d.records import recall, remember

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TunedConfig:
    """The fastest measured division of a training."""

    __pydantic_config__: ClassVar[ConfigDict] = PLAIN

    cuts: Annotated[tuple[Few, ...], at_most(1024)]
    """Index in the block list at which each stage but the first starts."""
    num_micro_batches: Few
    """Number of micro-batches of a batch."""
    step_seconds: Annotated[float, Field(gt=0, le=1e9, strict=True)]
    """Seconds that a training step took."""
    measured: str
    """Date and time of the measurement, ISO 8601."""


@dataclass(frozen=True, kw_only=True)
class TuningKey:
    """All that the time of a training step depends on, except cuts and micro-batches."""

    config: Config
    """The settings."""
    topology: Topology
    """The network."""
    size: Shape
    """Voxels of a patch along X, Y, Z (in the largest batch, where whole volumes are trained on);
    multiples of the total stride."""
    devices: tuple[torch.device, ...]
    """One device of this machine for each stage."""
    precision: str
    """A resolved precision, such as ``bfloat16``; never ``auto``."""
    num_replicas: int = 1
    """Copies of the network on such devices, over which the batch is divided."""
    regions: Regions = ()
    """What the network segments instead of classes."""

    @property
    def path(self) -> Path:
        """The file of the choice."""
        folder = Cache(self.config.data.cache).folder / "tuning"
        return folder / f"{key_of(self.describe())}.json"

    def describe(self) -> dict[str, Any]:
        """Return the key as plain values."""
        training = self.config.training
        return {
            "topology": self.topology.to_dict(),
            "blocks": self.blocks(),
            "size": list(self.size),
            "batch_size": math.ceil(training.num_patches / self.num_replicas),
            "batch_dice": training.batch_dice is True,
            "regions": [list(region) for region in self.regions],
            "optimizer": [training.optimizer, training.momentum > 0],
            "mode": self.config.parallel.mode,
            "cuda_graphs": self.config.parallel.cuda_graphs,
            "memory": self.config.memory.model_dump(),
            "devices": [hardware(device) for device in self.devices],
            # Two stages on one GPU are not two GPUs of one kind.
            "sharing": [self.devices.index(device) for device in self.devices],
            "precision": self.precision,
            "versions": versions(),
        }

    def blocks(self) -> list[str]:
        """Return the names of the blocks, which the numbers of a cut index."""
        with torch.device("meta"):
            return [block.name for block in UNet3d(self.topology).blocks()]


def remember_tuned(tuning_key: TuningKey, choice: TunedConfig) -> Path:
    """Write a choice to where trainings with the same key find it.

    Args:
        tuning_key: The key under which it was measured.
        choice: The best division.

    Returns:
        The file.

    Raises:
        CacheError: The cache folder cannot be written to.
    """
    path = tuning_key.path
    remember(path, {**tuning_key.describe(), "choice": asdict(choice)})
    return path


def recall_tuned(tuning_key: TuningKey) -> TunedConfig | None:
    """Return the best measured choice for the same key, or None.

    Args:
        tuning_key: The key of a training that is about to start.
    """

    def read(content: Any) -> TunedConfig:
        choice = validated(TunedConfig, content["choice"])
        datetime.fromisoformat(choice.measured)
        cuts, num_stages = choice.cuts, len(tuning_key.devices)
        if cuts and (len(cuts) != num_stages - 1 or sorted({*cuts}) != list(cuts)):
            raise ValueError("of another number of stages")
        if cuts and cuts[-1] >= len(tuning_key.blocks()):
            raise ValueError("of a longer network")
        if choice.num_micro_batches > tuning_key.config.training.num_patches:
            raise ValueError("of a larger batch")
        return choice

    return recall(tuning_key.path, read)


def resolve_auto(tuning_key: TuningKey) -> Config:
    """Return the settings with what they leave open of cuts and micro-batches filled in.

    A measured choice is taken where the settings name neither micro-batches nor a balance nor cuts;
    a setting always wins over it, and then the others that are open have their plain defaults.
    What is returned leaves nothing open: a run that records it can be repeated.

    Args:
        tuning_key: The key of a training that is about to start.
    """
    config = tuning_key.config
    training, parallel = config.training, config.parallel
    is_open = (
        training.micro_batches == "auto" and parallel.balance == "auto" and parallel.cuts is None
    )
    choice = recall_tuned(tuning_key) if is_open else None
    if choice is None:
        return config.with_values(
            {
                "training.micro_batches": training.num_micro_batches,
                # Cuts that are set need no balance, so none is filled in.
                "parallel.balance": parallel.wanted_balance
                if parallel.cuts is None
                else parallel.balance,
            }
        )
    blocks = tuning_key.blocks()
    logger.info(
        "%d micro-batch(es)%s: the fastest of what plan --measure measured on %s (%.1f ms a step); "
        "--micro-batches or --balance would overrule it",
        choice.num_micro_batches,
        f" and a cut before {_names(choice.cuts, blocks)} (parallel.cuts={_joined(choice.cuts)})"
        if choice.cuts
        else "",
        datetime.fromisoformat(choice.measured).strftime("%Y-%m-%d at %H:%M"),
        1000 * choice.step_seconds,
    )
    return config.with_values(
        {
            "training.micro_batches": choice.num_micro_batches,
            "parallel.cuts": choice.cuts or None,
        }
    )


def without_stale_cuts(config: Config, recorded: Config) -> Config:
    """Return the settings of a resumed run without the cuts of another placement.

    A run records the cuts that it used, which may be measured ones. They do not suit other devices,
    and should not overrule a balance that is asked for now.

    Args:
        config: The settings that the run recorded, with the user's changes.
        recorded: The settings that the run recorded.
    """
    cuts, now, before = config.parallel.cuts, config.parallel, recorded.parallel
    is_same = (now.mode, now.devices, now.balance) == (before.mode, before.devices, before.balance)
    if cuts is None or cuts != before.cuts or is_same:
        return config
    logger.info("placed in another way than before: parallel.cuts=%s is dropped", _joined(cuts))
    return config.with_values({"parallel.cuts": None})


def forgotten_modes(recorded: Config, changes: Sequence[str]) -> list[str]:
    """Return overrides that reset what a run recorded for a parallel mode that it now leaves.

    They would be refused with the other mode, such as replicas with mode none, although
    nothing asks for them any more.

    Args:
        recorded: The settings that the run recorded.
        changes: ``section.key=value`` strings of the user, the mode among them.
    """
    modes = [change.partition("=")[2] for change in changes if change.startswith("parallel.mode=")]
    if not modes or modes[-1] == recorded.parallel.mode:
        return []
    return [
        "parallel.replicas=1",
        "parallel.balance=auto",
        "parallel.cuts=null",
        "parallel.engine=ddp",
        "parallel.output_device=null",
    ]


def _names(cuts: Sequence[int], blocks: Sequence[str]) -> str:
    return " and ".join(blocks[cut] for cut in cuts)


def _joined(cuts: Sequence[int]) -> str:
    return ",".join(map(str, cuts))
