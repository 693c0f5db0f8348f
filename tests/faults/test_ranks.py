"""Ranks that are killed, hang or are asked to stop: one line of error, and training goes on.

No process is left. By day there is one training for each fault; other modes and GPUs are tested at
night.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from tests import trainings, warm
from tests.faults import stuck_device
from tests.images.samples import noise, write_volume
from tests.networks import write_checkpoint
from tests.process_trees import assert_all_end, children_of, family_of
from tests.ranks import free_port, rank_variables
from tests.trainings import losses, words
from unet3d.runs.checkpoint import load_checkpoint

MODES = {
    "data": ("parallel.mode=data",),
    "spatial": ("parallel.mode=spatial",),
}
CPUS, GPUS = "cpu,cpu", "0,1"
LIMITS = {CPUS: 6, GPUS: 20}
"""Seconds after which a rank is lost; on GPUs some ranks take longer to compile kernels."""

SMALL = (
    *("patches.size=8,8,8", "training.batch_size=3"),
    "training.steps_per_epoch=2",
)
LONG = (*SMALL, "training.epochs=1000", "training.validate_every=1000")
SECONDS = 100
"""Time limit of every command here, which none needs."""

by_night = pytest.mark.nightly
on_gpus = (pytest.mark.nightly, pytest.mark.multigpu)


def start(folder, cache, mode, devices, *changes):
    """Start or continue a training in two ranks; on GPUs in new processes instead of forks."""
    begin = trainings.start if devices == GPUS else trainings.start_warm
    limit = f"parallel.timeout_seconds={LIMITS[devices]}"
    return begin(folder, cache, limit, *MODES[mode], f"parallel.devices={devices}", *changes)


def wait_until(is_so, process):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_ends(process, family, status):
    """Check that a command ends with this status and leaves no process; return its lines."""
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for one in (process.pid, *family):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        raise
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert_all_end(family, 10)
    return errors.splitlines()


def assert_names(lines, begin, advice="--resume"):
    """Check that exactly one line says what happened to rank 1, and what to do."""
    (reason,) = (line for line in lines if "rror" in line)
    assert reason.startswith(f"Error: rank 1 {begin}") and advice in reason, lines


def epoch_of(folder):
    """Return how many epochs the latest checkpoint holds."""
    return load_checkpoint(folder / "checkpoint-latest.pt").training["state"]["epoch"]


def assert_goes_on(folder, cache, mode=None):
    """Check that a run can be trained for two more epochs, in one process or in ranks of a mode."""
    number = epoch_of(folder) + 2
    changes = (*SMALL, f"training.epochs={number}")
    if mode is None:
        alone = ("parallel.mode=none", "parallel.devices=cpu")
        process = trainings.start_warm(folder, cache, *alone, *changes)
    else:
        process = start(folder, cache, mode, CPUS, *changes)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert [epoch for epoch, _ in losses(folder)] == list(range(1, number + 1))


@pytest.mark.parametrize(
    ("mode", "loss", "devices"),
    [
        ("data", signal.SIGKILL, CPUS),
        pytest.param("spatial", signal.SIGSTOP, CPUS, marks=by_night),
        pytest.param("data", signal.SIGSTOP, CPUS, marks=by_night),
        pytest.param("spatial", signal.SIGKILL, CPUS, marks=by_night),
        pytest.param("data", signal.SIGSTOP, GPUS, marks=on_gpus),
        pytest.param("spatial", signal.SIGSTOP, GPUS, marks=on_gpus),
    ],
)
def test_a_lost_rank_is_named(mode, loss, devices, cache, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, cache, mode, devices, *LONG)
    wait_until((folder / "checkpoint-latest.pt").exists, process)
    family = family_of(process.pid)
    os.kill(children_of(process.pid)[1], loss)
    words = "was killed by SIGKILL" if loss == signal.SIGKILL else "(in"
    assert_names(assert_ends(process, family, 1), words)
    assert_goes_on(folder, cache)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.nightly
def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_undisturbed(mode, cache, tmp_path):
    folder = tmp_path / "run"
    changes = (*SMALL, "training.epochs=5", "training.precision=float64")
    trainings.run(trainings.settings(cache, *changes), tmp_path / "undisturbed")
    process = start(folder, cache, mode, CPUS, *changes, "parallel.max_restarts=1")
    wait_until((folder / "metrics.jsonl").exists, process)
    family = family_of(process.pid)
    os.kill(children_of(process.pid)[1], signal.SIGKILL)
    lines = assert_ends(process, family, 0)
    assert "rank 1 was killed by SIGKILL; restarting all ranks (1 of 1)" in lines
    assert [line for line in lines if line.startswith("resumed after ")]
    found, expected = (dict(losses(one)) for one in (folder, tmp_path / "undisturbed"))
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("mode", "number", "devices"),
    [
        ("spatial", signal.SIGTERM, CPUS),
        ("data", signal.SIGINT, CPUS),
        ("spatial", signal.SIGINT, CPUS),
        ("data", signal.SIGTERM, CPUS),
        pytest.param("spatial", signal.SIGTERM, GPUS, marks=pytest.mark.multigpu),
    ],
)
@pytest.mark.nightly
def test_a_signal_stops_all_ranks_which_save_first(mode, number, devices, cache, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, cache, mode, devices, *LONG, "training.save_every_seconds=1000")
    checkpoint = folder / "checkpoint-latest.pt"
    wait_until(checkpoint.exists, process)  # the checkpoint of the first epoch
    family, before = family_of(process.pid), checkpoint.stat().st_mtime_ns
    # A terminal sends Ctrl-C to the whole group of processes, an operator SIGTERM to the first.
    for one in (process.pid, *(family if number == signal.SIGINT else [])):
        os.kill(one, number)
    lines = assert_ends(process, family, 128 + number)
    assert lines[-1] == f"Stopped by {number.name}; continue with --resume"
    assert epoch_of(folder) >= 1 and checkpoint.stat().st_mtime_ns > before
    assert_goes_on(folder, cache, "data" if mode == "spatial" else "spatial")


def test_nobody_is_told_to_resume_before_there_is_anything(cache, tmp_path):
    process = start(tmp_path / "run", cache, "data", CPUS, *LONG)
    wait_until(lambda: len(children_of(process.pid)) == 2, process)
    family = family_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert assert_ends(process, family, 143)[-1] == "Stopped by SIGTERM"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_loading_processes_are_no_orphans(num_ranks, number, cache, tmp_path):
    folder = tmp_path / "run"
    place = ("parallel.mode=data", f"parallel.devices={CPUS}") if num_ranks == 2 else ()
    process = trainings.start_warm(folder, cache, *LONG, "data.num_workers=1", *place)
    wait_until((folder / "metrics.jsonl").exists, process)
    family = family_of(process.pid)
    assert len(family) >= (6 if num_ranks == 2 else 2)  # each rank's server forks its worker
    process.send_signal(number)
    errors = process.communicate(timeout=SECONDS)[1]
    assert_all_end(family, 10)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert errors.splitlines()[-1] == f"Stopped by {number.name}; continue with --resume"


# Devices that wait for ever for another rank: the main thread of rank 0 hangs in a call that no
# signal reaches, and all of rank 1 is suspended.

WATCHED = (
    *(*LONG, "training.save_every_seconds=0"),
    *("parallel.timeout_seconds=2", "parallel.devices=cpu,cpu"),
)


def lose_second(stuck, process, second):
    """Have rank 0 hang in its next call, then suspend rank 1, which waits for rank 0."""
    stuck.touch()
    wait_until(stuck.with_suffix(".0").exists, process)
    os.kill(second, signal.SIGSTOP)


@pytest.mark.parametrize("mode", ["data", pytest.param("spatial", marks=by_night)])
def test_the_command_names_a_rank_that_a_device_of_another_waits_for(mode, cache, tmp_path):
    folder, stuck = tmp_path / "run", tmp_path / "stuck"
    process = warm.call(stuck_device.run, words(folder, cache, *MODES[mode], *WATCHED), stuck)
    wait_until((folder / "checkpoint-latest.pt").exists, process)
    family = family_of(process.pid)
    lose_second(stuck, process, children_of(process.pid)[1])
    assert_names(assert_ends(process, family, 1), "(in epoch ")


@pytest.mark.nightly
@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_rank_of_a_prediction_that_hangs_is_named(is_stuck, tmp_path):
    """The first of many scans is done; each is segmented in one piece."""
    for number in range(200):
        write_volume(tmp_path / f"scans/{number}.nii.gz", noise((40, 36, 33)))
    stuck, out = tmp_path / "stuck", tmp_path / "out"
    checkpoint = write_checkpoint(tmp_path / "network.pt")
    arguments = ("predict", tmp_path / "scans", "--checkpoint", checkpoint, "-o", out, "--window")
    arguments += ("whole", "--parallel", "spatial", "--devices", CPUS)
    more = (stuck if is_stuck else None, LIMITS[CPUS])
    process = warm.call(stuck_device.run, [*map(str, arguments)], *more)
    wait_until(lambda: any(out.glob("*.nii.gz")), process)
    family, (_, second) = family_of(process.pid), children_of(process.pid)
    if is_stuck:
        lose_second(stuck, process, second)
    else:
        os.kill(second, signal.SIGSTOP)
    assert_names(assert_ends(process, family, 1), "(in ", "give the same command again")


@pytest.mark.nightly
def test_a_rank_of_torchrun_says_it_once_itself(cache, tmp_path):
    folder, stuck, port = tmp_path / "run", tmp_path / "stuck", free_port()
    arguments = words(folder, cache, *MODES["spatial"], *WATCHED)
    ranks = [
        warm.call(stuck_device.run, arguments, stuck, **rank_variables(rank, 2, port))
        for rank in range(2)
    ]
    try:
        wait_until((folder / "checkpoint-latest.pt").exists, ranks[0])
        lose_second(stuck, ranks[0], ranks[1].pid)
        assert_names(assert_ends(ranks[0], [], 1), "(in epoch ")
    finally:
        for one in ranks:
            one.kill()
