"""A training whose slabs stop: one line says which, nothing is left running, and it goes on."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process_trees import assert_all_end, family_of, ranks_of
from tests.trainings import losses, start, wait_for
from unet3d.runs.checkpoint import load_checkpoint

pytestmark = pytest.mark.nightly

SPREAD = ("parallel.mode=spatial", "parallel.devices=cpu,cpu", "parallel.timeout_seconds=4")
on_cpu_and_gpus = pytest.mark.parametrize(
    "devices", ["cpu,cpu", pytest.param("0,1", marks=pytest.mark.multigpu)]
)


def on(devices: str) -> tuple[str, str]:
    """Return the settings for devices; on GPUs ranks compile kernels, one longer than another."""
    seconds = 4 if devices == "cpu,cpu" else 20
    return f"parallel.devices={devices}", f"parallel.timeout_seconds={seconds}"


LONG = ("training.epochs=1000", "training.validate_every=1000")
SECONDS = 100
"""More than any of these takes."""


def kill(shards: list[int]) -> None:
    os.kill(shards[1], signal.SIGKILL)


def freeze(shards: list[int]) -> None:
    os.kill(shards[1], signal.SIGSTOP)


def disturbed(
    folder: Path, cache: Path, disturb: Callable[[list[int]], None], *changes: str
) -> tuple[int, list[str], float]:
    """Return exit status, lines of errors and seconds of a training that is disturbed."""
    process = start(folder, cache, *SPREAD, *changes)
    wait_for(folder / "checkpoint-latest.pt", process)
    family = family_of(process.pid)
    shards = ranks_of(process.pid)
    assert len(shards) == 2
    time.sleep(0.2)  # any moment of a step
    began = time.monotonic()
    disturb(shards)
    _, errors = process.communicate(timeout=SECONDS)
    assert_all_end(family, 10)
    return process.returncode, errors.splitlines(), time.monotonic() - began


def assert_goes_on(folder: Path, cache: Path, *changes: str) -> None:
    """See that a run takes more epochs than it had, in a mode of its own."""
    state = load_checkpoint(folder / "checkpoint-latest.pt").training["state"]
    number = state["epoch"] + 2
    process = start(folder, cache, *changes, f"training.epochs={number}")
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert [epoch for epoch, _ in losses(folder)] == list(range(1, number + 1))


@on_cpu_and_gpus
@pytest.mark.parametrize(
    ("disturb", "words"),
    [
        (kill, "Error: rank 1 was killed by SIGKILL"),
        (freeze, "Error: rank 1 (in epoch "),
    ],
)
def test_a_lost_shard_is_named(
    disturb: Callable[[list[int]], None], words: str, devices: str, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    changes = (*on(devices), *LONG)
    status, errors, seconds = disturbed(folder, cache, disturb, *changes)
    assert status == 1
    reasons = [line for line in errors if line.startswith("Error")]
    assert len(reasons) == 1 and reasons[0].startswith(words), errors
    assert "--resume" in reasons[0]
    assert not [line for line in errors if "Traceback" in line or "rror:" in line[6:]], errors
    assert seconds < 50
    assert_goes_on(folder, cache, "parallel.mode=none", "parallel.devices=cpu")


def test_a_killed_shard_is_started_again(cache: Path, tmp_path: Path) -> None:
    changes = ("parallel.max_restarts=1", "training.epochs=12", "training.validate_every=12")
    status, errors, _ = disturbed(tmp_path / "run", cache, kill, *changes)
    assert status == 0, errors
    assert [line for line in errors if "rank 1 was killed by SIGKILL; all ranks are" in line]
    assert [epoch for epoch, _ in losses(tmp_path / "run")] == list(range(1, 13))


@on_cpu_and_gpus
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_shards_which_save_first(
    number: signal.Signals, devices: str, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    latest = folder / "checkpoint-latest.pt"
    changes = (*on(devices), *LONG, "training.save_every_seconds=1000")
    process = start(folder, cache, *SPREAD, *changes)
    wait_for(folder / "metrics.jsonl", process)
    family = family_of(process.pid)
    assert not latest.exists()
    # A terminal sends Ctrl-C to all of a group, an operator SIGTERM to the first process.
    others = family if number == signal.SIGINT else []
    for one in (process.pid, *others):
        os.kill(one, number)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == f"Stopped by {number.name}; continue with --resume"
    assert "Traceback" not in errors
    assert_all_end(family, 10)
    assert load_checkpoint(latest).training["state"]["epoch"] >= 1
    assert_goes_on(folder, cache, "parallel.mode=data", "parallel.devices=cpu,cpu")


def test_a_signal_stops_a_validation_of_shards(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of them gets it; none waits for another that has left."""
    folder, meeting = tmp_path / "run", tmp_path / "meeting"
    meeting.mkdir()
    monkeypatch.setenv("TMPDIR", str(meeting))
    many = ("data.phantom.num_cases=40", "data.num_folds=2", "inference.overlap=0.8")
    changes = (*many, "training.epochs=2", "training.validate_every=1")
    process = start(folder, cache, *SPREAD, *changes, "training.save_every_seconds=1000")
    deadline = time.monotonic() + SECONDS
    while b"validation" not in notes_in(meeting):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    family = family_of(process.pid)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, errors
    assert errors.splitlines()[-1] == "Stopped by SIGTERM; continue with --resume"
    assert_all_end(family, 10)
    assert not (folder / "metrics.jsonl").exists()
    assert load_checkpoint(folder / "checkpoint-latest.pt").training["state"]["epoch"] == 0


def notes_in(meeting: Path) -> bytes:
    """Return what ranks have written down of how far they are."""
    found = b""
    for path in meeting.glob("unet3d-ranks-*/start-0/*"):
        with suppress(OSError):
            found += path.read_bytes()
    return found
