"""What the ranks of ``test_ranks.py`` run: training, or waiting for a lost rank."""

import os
import socket
import sys
import time
from pathlib import Path

import torch

from tests.ranks import ends_of, start_ranks
from tests.trainings import without_drawing
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import RankError
from unet3d.training.loop import TrainingLoop


def keep(folder):
    """In this process, save the weights after training, and record what pickle loads."""
    run = TrainingLoop.run

    def run_and_keep(self, console, quiet):
        result = run(self, console, quiet)
        weights = self.executor.module.state_dict()
        torch.save(weights, folder / f"weights-{self.group.ranks.rank}.pt")
        return result

    def note(event, details):
        if event != "pickle.find_class":
            return
        # For a GPU a process packs patches to augment there, and so do its workers; nothing else
        # may unpickle.
        if sys._getframe(1).f_globals.get("__name__") != "unet3d.patches.packing":
            with open(folder / f"unpickled-{os.getpid()}", "a") as file:
                print(*details, file=file)

    TrainingLoop.run = run_and_keep
    sys.addaudithook(note)


def train(words, folder):
    """Run ``unet3d WORDS``; each of its ranks saves its weights in ``folder``."""
    keep(folder)
    without_drawing(words)


def miss(how, folder):
    """Write the first rank's error to a file when the second rank is lost, as ``how`` says."""
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
        time.sleep(60)  # longer than the first rank needs to notice; then this process is killed


def wait_for_others(how, group):
    if how.endswith("exchange"):
        group.exchange(None)
    for step in range(3):
        group.note(8 + step, f"epoch 2, step {4 + step}")
        group.all_reduce_flags(0, False)


def miss_one_another(folder):
    """Have pairs of ranks lose one another in all ways; at once, because they mostly wait."""
    pairs = []
    for how in ("killed-step", "killed-exchange", "hanging-step", "hanging-exchange"):
        pairs.append(start_ranks(2, lambda how=how: miss(how, folder)))
    statuses = ends_of([first for first, _ in pairs])
    for _, second in pairs:
        os.kill(second, 9)
    ends_of([second for _, second in pairs])
    sys.exit(any(statuses))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        (folder / f"address-{os.environ['RANK']}.txt").write_text(probe.getsockname()[0])
    train(sys.argv[2:], folder)
