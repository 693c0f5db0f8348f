"""``unet3d ARGUMENTS`` in a rank that torchrun started, keeping its weights and its address."""

import os
import socket
import sys
from pathlib import Path

import torch
from rich.console import Console

from unet3d.cli.app import main
from unet3d.training.loop import TrainingLoop, TrainingResult


def address_towards_master() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    folder, run = Path(sys.argv[1]), TrainingLoop.run

    def run_and_keep(self: TrainingLoop, console: Console, quiet: bool) -> TrainingResult:
        result = run(self, console, quiet)
        rank = self.group.ranks.rank
        torch.save(self.executor.module.state_dict(), folder / f"weights-{rank}.pt")
        (folder / f"address-{rank}.txt").write_text(address_towards_master())
        return result

    TrainingLoop.run = run_and_keep  # type: ignore[method-assign]
    main(sys.argv[2:])
