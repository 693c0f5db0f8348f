"""The folder of one run: the names of its files, its lock, and how the files are written.

Names and contents of the files are public; ``docs/reference/files.md`` describes them.
"""

import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet3d import __version__
from unet3d.atomic import (
    append,
    is_leftover,
    locked,
    make_folder,
    publish_folder,
    remove_leftovers,
    write_atomically,
)
from unet3d.errors import CheckpointError, ConfigError, counted, reason_of
from unet3d.inputs.reading import read_json

if TYPE_CHECKING:
    from unet3d.config import Config

logger = logging.getLogger(__name__)

CASES = "cases.json"
"""The file of scores in the validation folder."""
WORST, BEST = "worst.png", "best.png"
"""The pictures of two cases in the validation folder; if there is one case, only the first."""
RUNS = Path("runs")
"""The folder, in the current one, where runs are made and looked for."""
FOLD = re.compile("fold([0-9]{1,4})")
"""Name of a fold's folder within the folder of a run over several folds."""


AWAY = "move it away"
"""Advice for a file that is in the way of a run."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path, is_made: bool = False) -> None:
        """Name the files of a folder; a folder made for this run is removed if it stays empty."""
        self.path = path
        self.is_made = is_made
        self.data = path / "data.json"
        self.config = path / "config.yaml"
        self.latest = path / "checkpoint-latest.pt"
        self.best = path / "checkpoint-best.pt"
        self.metrics = path / "metrics.jsonl"
        self.memory = path / "memory.json"
        self.memory_picture = path / "memory.png"
        self.progress_picture = path / "progress.png"
        self.summary = path / "summary.json"
        self.tensorboard = path / "tensorboard"
        self.validation = path / "validation"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is missing, and lock it against other training runs.

        The lock is on the folder itself, so it leaves no file, and the kernel releases it when the
        process ends, however it ends.
        """
        with writing(self.path):
            self.is_made |= not self.path.exists()
            make_folder(self.path)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path.resolve()))
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.path} is in use by another training run; wait until it ends, or "
                    "choose another --output"
                ) from error
            except OSError as error:  # a file system without locks
                reason = reason_of(error)
                logger.warning(
                    "cannot lock %s (%s); do not start a second run in it", self.path, reason
                )
            yield

    def create(self) -> None:
        """Make the folder for a new run."""
        self.refuse_used()
        with writing(self.path):
            make_folder(self.path)
            tempfile.TemporaryFile(dir=self.path).close()  # refuse now, not after an epoch
            remove_leftovers(self.path, elsewhere_s=0)  # the lock keeps other writers away
            self.metrics.unlink(missing_ok=True)  # of a run that was killed before it first saved

    def refuse_used(self) -> None:
        """Raise ConfigError if a new run may not use the folder; nothing is changed.

        Allowed are a missing folder, an empty one, and the folder of a run that was killed before
        its first checkpoint. Such a run has left ``data.json``, which it writes first.
        """
        for file, instead in ((self.latest, "continue it with --resume"), (self.best, AWAY)):
            if file.exists():
                raise ConfigError(
                    f"{self.path} holds {file.name} of a run already; {instead}, or choose another "
                    "--output"
                )
        with writing(self.path):
            if not os.path.lexists(self.path):
                return
            names = sorted(path.name for path in self.path.iterdir() if not is_leftover(path))
            if names and self.read_data() is None:
                raise ConfigError(
                    f"{self.path} is not empty and is not a run: it holds {names[0]}; {AWAY}, or "
                    "choose another --output"
                )
        if self.has_summary() or len(self.read_metrics()) > 1:
            raise ConfigError(
                f"{self.path} holds the results of a run whose checkpoints are missing; restore "
                f"{self.latest.name}, or choose another --output"
            )

    def checkpoint(self) -> Path | None:
        """Return the latest checkpoint, which holds a finished run's final network, or the best."""
        return next((file for file in (self.latest, self.best) if file.is_file()), None)

    def check_resumable(self) -> None:
        """Raise an error unless there is a run to continue; nothing is changed."""
        if not self.latest.exists():
            raise CheckpointError(
                f"{self.path} has no {self.latest.name} to resume from; name the folder of a run "
                "with --output"
            )
        with writing(self.path):
            tempfile.TemporaryFile(dir=self.path).close()

    def has_summary(self) -> bool:
        """Return whether the run has finished and its summary is intact."""
        return _read_object(self.summary) is not None

    def has_validation(self) -> bool:
        """Return whether the final network has predicted the validation cases."""
        return _read_object(self.validation / CASES) is not None

    def reopen(self, num_epochs: int) -> None:
        """Prepare the folder for continuing its run after the first ``num_epochs`` epochs.

        Metrics of later epochs, which will run again, are dropped, and so are the summary and the
        validation.
        """
        with writing(self.path):
            remove_leftovers(self.path, elsewhere_s=0)  # the lock keeps other writers away
            self.summary.unlink(missing_ok=True)  # not finished any more
            if self.validation.is_dir():
                shutil.rmtree(self.validation)
        kept = (line for line in self.read_metrics() if line["epoch"] <= num_epochs)
        _write(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def discard_if_empty(self) -> None:
        """Remove the folder, if it was made for a run that was refused before it wrote anything."""
        if self.is_made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, config: "Config") -> None:
        """Write the resolved configuration."""
        _write(self.config, config.to_yaml())

    def write_data(self, record: Mapping[str, Any]) -> None:
        """Write which cases the run trains and validates on, as plain values."""
        self.write_json(self.data, {"unet3d": __version__, **record})

    def read_data(self) -> dict[str, Any] | None:
        """Return what :meth:`write_data` wrote, or None if it is missing."""
        content = _read_object(self.data)
        return content if content is not None and "unet3d" in content else None

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Write plain values to one of the JSON files."""
        _write(path, json.dumps(content, indent=2) + "\n")

    def publish_validation(self, unfinished: Path, record: Mapping[str, Any]) -> None:
        """Write the scores to a folder of segmentations and pictures; it replaces the old one."""
        self.write_json(unfinished / CASES, record)
        publish_folder(unfinished, self.validation, replace=True)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add the line of one epoch."""
        with writing(self.metrics):
            append(self.metrics, (json.dumps(line) + "\n").encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of all epochs, without damaged lines, which a warning counts.

        An incomplete last line is ignored: the process was killed while writing it, and its epoch
        runs again.
        """
        if not self.metrics.is_file():
            return []
        finished = self.metrics.read_bytes().split(b"\n")[:-1]
        lines: list[dict[str, Any]] = []
        for text in finished:
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                line = json.loads(text)
                lines += [line] if type(line["epoch"]) is int and line["epoch"] > 0 else []
        if len(lines) < len(finished):
            num_damaged = len(finished) - len(lines)
            logger.warning("%s: left out %s", self.metrics, counted(num_damaged, "damaged line"))
        return lines


def folds_in(path: Path) -> dict[int, RunFolder]:
    """Return the runs of the folds in the folder of a run over several folds, by fold number."""
    names = os.listdir(path) if path.is_dir() else []
    matches = sorted((int(found[1]), name) for name in names if (found := FOLD.fullmatch(name)))
    return {number: RunFolder(path / name) for number, name in matches}


def make_run(name: str) -> RunFolder:
    """Make a new folder in ``runs/``; a number is appended if the name is taken."""
    for number in itertools.count(1):
        run = RunFolder(RUNS / (name if number == 1 else f"{name}-{number}"), is_made=True)
        with writing(run.path):
            make_folder(RUNS)
            try:
                run.path.mkdir()
            except FileExistsError:
                continue
        break
    return run


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file of ours, or None if it is missing or damaged."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while writing files of a run into a ConfigError that explains it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path}: {reason_of(error)}; make it writable, with space left, "
            "or choose another --output"
        ) from error


def _write(path: Path, text: str) -> None:
    with writing(path):
        write_atomically(path, lambda file: file.write(text.encode()))
