"""The trainings of ``test_shards.py``: the same one over slabs of volumes, and in other ways."""

import json
import os
import signal
import sys
from pathlib import Path

from rich.console import Console

from tests.ranks import in_ranks
from tests.trainings import settings
from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.interruption import Interrupted
from unet3d.model import LossTerms
from unet3d.parallel.spatial import division
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training.job import train
from unet3d.training.loop import TrainingLoop
from unet3d.volumes.patches import Batch

# Planes for uneven slabs; and 8 patches make 4 steps an epoch, 40 in all.
EXACT = (
    "training.precision=float64",
    "training.epochs=10",
    "training.validate_every=5",
    "patches.size=24,16,16",
    "model.num_levels=3",
    "parallel.timeout_seconds=60",
)
# Batches of three patches and one: the second of two replicas has fewer than the first, then none.
BRIEF = (*EXACT, "training.epochs=2", "training.batch_size=3", "training.steps_per_epoch=2")
WAYS = {
    "none": ("parallel.mode=none", "parallel.devices=cpu"),
    "data": ("parallel.mode=data", "parallel.devices=cpu,cpu"),
    "spatial": ("parallel.mode=spatial", "parallel.devices=cpu,cpu"),
    "thirds": (
        "parallel.mode=spatial",
        "parallel.devices=cpu,cpu,cpu",
        "training.micro_batches=2",
    ),
    "groups": ("parallel.mode=spatial", "parallel.devices=cpu,cpu,cpu,cpu", "parallel.replicas=2"),
}
CHAIN = (("spatial", 9), ("none", 17), ("data", 28), ("spatial", None))
"""Ways to train the same run one after the other, and the step at which each is asked to stop,
which it does there, or where there are several ranks, one step later."""


class Recorder:
    """Writes down the loss of each step, and asks to stop after one of them."""

    def __init__(self, group: Group, folder: Path, last: int | None) -> None:
        self.group, self.folder, self.last = group, folder, last

    def step(self, loop: TrainingLoop, batch: Batch) -> LossTerms:
        number = loop.state.epoch * loop.loader.num_steps + loop.state.step
        terms = STEP(loop, batch)
        with open(f"{self.folder}-{self.group.ranks.rank}.jsonl", "a") as file:
            json.dump([number, terms.total.item(), batch.num_samples], file)
            file.write("\n")
        if number == self.last and self.group.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        return terms


STEP = TrainingLoop._step  # a private one: nothing else tells the loss of each step in float64


def train_in_rank(config: Config, folder: Path, last: int | None) -> None:
    """Train to the end, or to a step at which it is stopped; keep weights and losses."""
    division.MIN_DIVIDED_ELEMENTS = 0  # so that lower levels are divided too
    with joined(Ranks.from_environment()) as group:
        recorder = Recorder(group, folder, last)
        TrainingLoop._step = lambda loop, batch: recorder.step(loop, batch)  # type: ignore[method-assign]
        resume = (folder / "checkpoint-latest.pt").exists()
        try:
            train(config, RunFolder(folder), resume, Console(quiet=True), True, group)
        except Interrupted as interrupted:
            assert last is not None and interrupted.can_resume
            if group.is_first:
                state = load_checkpoint(folder / "checkpoint-latest.pt").training["state"]
                (folder.parent / f"stopped-{last}.json").write_text(json.dumps(state))


def main(folder: Path, cache: Path) -> None:
    statuses = []

    def start(name: str, way: str, changes: tuple[str, ...], last: int | None = None) -> None:
        config = settings(cache, *changes, *WAYS[way])
        num_ranks = len(config.parallel.devices or ())
        statuses.extend(in_ranks(num_ranks, lambda: train_in_rank(config, folder / name, last)))

    start("none", "none", EXACT)
    for way, last in CHAIN:
        start("chain", way, EXACT, last)
    for way in ("none", "thirds", "groups"):
        start(f"brief-{way}", way, BRIEF)
    sys.exit(any(statuses))
