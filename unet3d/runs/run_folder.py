"""The folder of one run: the names of its files, its lock, and how the files are written.

Names and contents of the files are public; the README describes them.
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

from unet3d.atomic import append, make_folder, remove_leftovers, write_atomically
from unet3d.config import Config
from unet3d.errors import CheckpointError, ConfigError, reason_of

logger = logging.getLogger(__name__)

RUNS = Path("runs")
"""The folder below the current one where runs are put and looked for."""


class RunFolder:
    """The files of one run."""

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

        The lock is on the folder itself, so it leaves no file, and the kernel releases it when the
        process ends, however it ends.

        Raises:
            ConfigError: Another training runs in the folder, or it cannot be made.
        """
        with self._writing(self.path):
            make_folder(self.path)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path} is in use by a running training; wait until it ends, or "
                    "choose another --output"
                ) from error
            except OSError as error:  # a file system without locks
                logger.warning(
                    "cannot lock %s (%s); start no second training in it",
                    self.path,
                    reason_of(error),
                )
            yield
        finally:
            os.close(descriptor)

    def create(self) -> None:
        """Make the folder for a new run.

        Raises:
            ConfigError: The folder holds a run already, or cannot be written to.
        """
        if self.latest.exists():
            raise ConfigError(
                f"{self.path} holds a run already; continue it with --resume, "
                "or choose another --output"
            )
        with self._writing(self.path):
            make_folder(self.path)
            tempfile.TemporaryFile(dir=self.path).close()  # refuse now, not after an epoch
            remove_leftovers(self.path)
            self.metrics.unlink(missing_ok=True)  # of a run that was killed before it first saved

    def reopen(self) -> None:
        """Prepare the folder for the continuation of its run.

        Raises:
            CheckpointError: There is no run to continue.
            ConfigError: The folder cannot be written to.
        """
        if not self.latest.exists():
            raise CheckpointError(
                f"{self.path} has no {self.latest.name} to resume from; name the folder of a run "
                "with --output"
            )
        with self._writing(self.path):
            remove_leftovers(self.path)

    def discard_if_empty(self) -> None:
        """Remove the folder of a run that was refused before it wrote anything."""
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration.

        Raises:
            ConfigError: The file cannot be written.
        """
        self._write(self.config, config.to_yaml())

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write one of the JSON files.

        Args:
            path: One of this folder's.
            content: Plain values.

        Raises:
            ConfigError: The file cannot be written.
        """
        self._write(path, json.dumps(content, indent=2) + "\n")

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add the line of one epoch.

        Raises:
            ConfigError: The file cannot be written.
        """
        with self._writing(self.metrics):
            append(self.metrics, (json.dumps(line) + "\n").encode())

    def keep_metrics(self, num_epochs: int) -> None:
        """Drop the lines of epochs that the checkpoint does not hold and that will run again.

        A killed process may have written such lines, the last one in part.

        Args:
            num_epochs: Epochs that the checkpoint holds.

        Raises:
            ConfigError: The file cannot be written.
        """
        kept = [line for line in self.read_metrics() if line["epoch"] <= num_epochs]
        self._write(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of all epochs, without a last one that was not finished."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]  # behind the last newline: unfinished

    def _write(self, path: Path, text: str) -> None:
        with self._writing(path):
            write_atomically(path, lambda file: file.write(text.encode()))

    @staticmethod
    @contextmanager
    def _writing(path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write to {path}: {reason_of(error)}; make it writable, with space left, "
                "or choose another --output"
            ) from error


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
