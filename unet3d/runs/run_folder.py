"""The folder of one run: names of its files, and writing them so that nothing is ever half there.

The files and their contents are public; see the README.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unet3d.atomic import remove_leftovers, write_atomically
from unet3d.config import Config
from unet3d.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""Where runs go, and are looked for, below the current folder."""


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.latest = path / "checkpoint-latest.pt"
        self.best = path / "checkpoint-best.pt"
        self.metrics = path / "metrics.jsonl"
        self.memory = path / "memory.json"
        self.memory_picture = path / "memory.png"
        self.progress_picture = path / "progress.png"
        self.summary = path / "summary.json"
        self.tensorboard = path / "tensorboard"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder where there is none, and keep every other training out of it.

        The lock is on the folder itself, so it leaves no file, and the kernel takes it away when
        the process ends, however it ends.

        Raises:
            ConfigError: Another training runs in it, or it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path} is in use by a running training; wait for its end, or choose "
                    "another --output"
                ) from error
            except OSError as error:  # a file system without locks
                logger.warning(
                    "cannot lock %s (%s); start no second training in it",
                    self.path,
                    error.strerror,
                )
            yield
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Make the folder for a new run.

        Raises:
            ConfigError: It holds a run already, or cannot be written.
        """
        if self.latest.exists():
            raise ConfigError(
                f"{self.path} holds a run already; continue it with --resume, "
                "or choose another --output"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()  # refuse now, not after an epoch
            remove_leftovers(self.path)
            self.metrics.unlink(missing_ok=True)  # of a run that was killed before it first saved
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror}") from error

    def reopen(self) -> None:
        """Make ready to continue the run.

        Raises:
            CheckpointError: There is no run to continue.
        """
        if not self.latest.exists():
            raise CheckpointError(f"{self.path} has no {self.latest.name} to resume from")
        remove_leftovers(self.path)

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that was refused before it wrote anything."""
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration."""
        write_atomically(self.config, lambda file: file.write(config.to_yaml().encode()))

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write one of the JSON files."""
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add the line of one epoch."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def keep_metrics(self, num_epochs: int) -> None:
        """Drop the lines of epochs that the checkpoint does not hold and that will run again.

        A killed process may have written such lines, the last one in part.
        """
        kept = [line for line in self.read_metrics() if line["epoch"] <= num_epochs]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.metrics, lambda file: file.write(text.encode()))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of all epochs, but for a last one that was not finished."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]  # behind the last newline: unfinished


def newest_run(finished: bool) -> RunFolder | None:
    """Return the run below ``runs/`` that was written to last.

    Args:
        finished: Only runs that have come to their end.
    """
    if not RUNS.is_dir():
        return None
    runs = [RunFolder(path) for path in RUNS.iterdir()]
    if finished:
        ended = [run for run in runs if run.summary.is_file()]
        return max(ended, key=lambda run: run.summary.stat().st_mtime, default=None)
    begun = [run for run in runs if run.latest.is_file()]
    return max(begun, key=lambda run: run.latest.stat().st_mtime, default=None)
