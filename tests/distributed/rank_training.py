"""What the ranks of ``test_ranks.py`` do: train, and miss one another."""

import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which DDP imports, and the forks need not
from rich.console import Console

from tests.ranks import ends_of, in_ranks, start_ranks
from tests.trainings import settings
from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import RankError
from unet3d.runs.run_folder import RunFolder
from unet3d.training.job import train
from unet3d.training.loop import TrainingLoop, TrainingResult

EXACT = ("training.precision=float64", "training.batch_size=3")
DATA = ("parallel.mode=data", "parallel.devices=cpu,cpu")
HYBRID = (
    "parallel.mode=model",
    "parallel.devices=cpu,cpu,cpu,cpu",
    "parallel.replicas=2",
    "training.micro_batches=2",
)


def train_in_group(config: Config, folder: Path, resume: bool) -> None:
    """Train, and keep the weights of every rank."""
    run = TrainingLoop.run

    def run_and_keep(self: TrainingLoop, console: Console, quiet: bool) -> TrainingResult:
        result = run(self, console, quiet)
        weights = self.executor.module.state_dict()
        torch.save(weights, folder.with_name(f"{folder.name}-{self.group.ranks.rank}.pt"))
        return result

    TrainingLoop.run = run_and_keep  # type: ignore[method-assign]
    with joined(Ranks.from_environment()) as group:
        train(config, RunFolder(folder), resume, Console(quiet=True), True, group)


def miss(how: str, folder: Path) -> None:
    """Write down what the first rank says of a second one that does not come."""
    with joined(Ranks.from_environment()) as group:
        group.open(1)
        group.note(7, "epoch 2, step 3")
        if group.is_first:
            try:
                wait_for_others(how, group)
            except RankError as error:
                (folder / f"{how}.txt").write_text(f"{type(error).__name__}: {error}")
                os._exit(0)
        if how.startswith("killed"):
            os._exit(0)
        time.sleep(4.5)  # longer than the other needs to find out
        os._exit(0)


def wait_for_others(how: str, group: Group) -> None:
    if how.endswith("exchange"):
        group.exchange(None)
    for step in range(3):
        group.note(8 + step, f"epoch 2, step {4 + step}")
        group.all_reduce_flags(0, False)


def main(folder: Path, cache: Path) -> None:
    data = settings(cache, *EXACT, *DATA, "training.epochs=2")
    hybrid = settings(cache, *EXACT, *HYBRID)
    statuses = in_ranks(2, lambda: train_in_group(data, folder / "data", False))
    statuses += in_ranks(2, lambda: train_in_group(hybrid, folder / "hybrid", True))
    waiting = []  # which they do most of the time, and so all at once
    for how in ("killed-step", "killed-exchange", "hanging-step", "hanging-exchange"):
        waiting += start_ranks(2, lambda how=how: miss(how, folder))  # type: ignore[misc]
    sys.exit(any(statuses + ends_of(waiting)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
