"""Several ranks: they train like one process, open no ports to others, and name a lost rank."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.distributed import rank_training
from tests.process_trees import family_of, is_open_to_others, listening_sockets
from tests.products import by_night
from tests.ranks import environment
from tests.trainings import assert_same_validation, losses, run, settings, weights, words
from unet3d.distributed import ranks
from unet3d.runs.run_folder import RunFolder

EXACT = ("training.precision=float64", "training.batch_size=3")
MODES = {
    "data": ("parallel.mode=data", "parallel.devices=cpu,cpu"),
    "hybrid": (
        *("parallel.mode=model", "parallel.devices=cpu,cpu,cpu,cpu", "parallel.replicas=2"),
        "training.micro_batches=2",
    ),
    "spatial": ("parallel.mode=spatial", "parallel.devices=cpu,cpu"),
}


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """A training by one process: one epoch, which ``begun`` beside it has, then two more."""
    folder = tmp_path_factory.mktemp("runs")
    run(settings(cache, *EXACT, "training.epochs=1"), folder / "begun")
    shutil.copytree(folder / "begun", folder / "alone")
    run(settings(cache, *EXACT), folder / "alone", resume=True)
    return folder / "alone"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The same training, continued by two ranks."""

    name: str
    folder: Path
    kept: Path
    """The folder in which its ranks have left weights and records for the tests."""
    sockets: set[str]
    """Addresses at which any of the ranks has listened."""


def continued(name, begun, cache, folder, *changes):
    """Continue a training in two ranks; the first sends its checkpoint to the second."""
    run_folder, kept = folder / "run", folder / "kept"
    shutil.copytree(begun, run_folder)
    kept.mkdir()
    variables = {  # as set by a user who also trains on several machines
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": "0.0.0.0",
        "MASTER_PORT": "0",
        "CUDA_VISIBLE_DEVICES": "0,1" if name == "nccl" else "",
    }
    arguments = [*words(run_folder, cache, *EXACT, *changes), "--resume"]
    if name == "nccl":  # a forked process cannot use GPUs if its parent has queried them
        (folder / "sitecustomize.py").write_text(
            "import os, pathlib\nif 'RANK' in os.environ:\n"
            "    from tests.distributed.rank_training import keep\n"
            f"    keep(pathlib.Path({str(kept)!r}))\n"
        )
        own = environment()
        path = os.pathsep.join([str(folder), own["PYTHONPATH"]])
        process = subprocess.Popen(
            [sys.executable, "-m", "unet3d", *arguments],
            env=own | variables | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
    else:
        process = warm.call(rank_training.train, arguments, kept, **variables)
    sockets: set[str] = set()
    while process.poll() is None:
        sockets |= listening_sockets([process.pid, *family_of(process.pid)])
        time.sleep(0.2)
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    return Spread(name=name, folder=run_folder, kept=kept, sockets=sockets)


@pytest.fixture(scope="module", params=["data", *by_night("hybrid", "spatial")])
def spread(request, alone, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    begun = alone.with_name("begun")
    return continued(request.param, begun, cache, folder, *MODES[request.param])


def test_ranks_train_what_one_process_trains(spread, alone):
    assert [epoch for epoch, _ in losses(spread.folder)] == [1, 2, 3]
    for (_, loss), (_, wanted) in zip(losses(spread.folder), losses(alone), strict=True):
        assert loss == pytest.approx(wanted, rel=1e-8)
    wanted_weights = weights(alone)
    for key, value in weights(spread.folder).items():
        torch.testing.assert_close(value, wanted_weights[key], rtol=1e-7, atol=1e-9, msg=key)
    assert_same_validation(spread.folder, alone)
    found, wanted = (
        [line.get("dice") for line in RunFolder(one).read_metrics()]
        for one in (spread.folder, alone)
    )
    assert found == wanted and found[1] is not None  # each case counts once


def test_only_the_first_rank_writes(spread, alone):
    names, wanted = (
        {path.relative_to(one).parts[0] for path in one.rglob("*")}
        for one in (spread.folder, alone)
    )
    assert names == wanted
    events, wanted = (len(list((one / "tensorboard").iterdir())) for one in (spread.folder, alone))
    assert events == wanted


def check_ranks(spread, slots, num_replicas):
    """Check that ranks have equal weights, report each device, and are closed to others."""
    first, second = (
        torch.load(spread.kept / f"weights-{rank}.pt", map_location="cpu") for rank in range(2)
    )
    stored = weights(spread.folder)
    for key, value in first.items():
        assert torch.equal(value, second[key]) and torch.equal(value, stored[key]), key
    rows = json.loads((spread.folder / "memory.json").read_text())["slots"]
    assert [(row["rank"], row["slot"]) for row in rows] == [(r, i) for i, r in enumerate(slots)]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert all(row["measured"][kind] == row["predicted"][kind] > 0 for row in rows)
    if len(rows) == 4:
        assert rows[0]["blocks"] == rows[2]["blocks"] != rows[1]["blocks"]
    summary = json.loads((spread.folder / "summary.json").read_text())
    assert (summary["replicas"], len(summary["devices"])) == (num_replicas, len(rows))
    # No other user or machine can reach the ranks, or have them run code.
    assert [one for one in spread.sockets if is_open_to_others(one)] == []
    assert any("127.0.0.1" in one for one in spread.sockets)  # gloo's: the test sees sockets
    assert {path.name: path.read_text() for path in spread.kept.glob("unpickled-*")} == {}


def test_ranks_have_equal_weights_report_each_device_and_listen_to_nobody_else(spread):
    slots = [0, 0, 1, 1] if spread.name == "hybrid" else [0, 1]
    check_ranks(spread, slots, 1 if spread.name == "spatial" else 2)


@pytest.mark.multigpu
def test_so_do_those_on_gpus(alone, cache, tmp_path):
    on_gpus = ("parallel.mode=data", "parallel.devices=0,1")
    spread = continued("nccl", alone.with_name("begun"), cache, tmp_path, *on_gpus)
    check_ranks(spread, [0, 1], 2)


def test_a_lost_rank_is_named_with_its_step(tmp_path):
    done = warm.run_call(rank_training.miss_one_another, tmp_path)
    assert done.returncode == 0, done.stderr
    for when in ("step", "exchange"):
        dead, hanging = ((tmp_path / f"{how}-{when}.txt") for how in ("killed", "hanging"))
        assert dead.read_text().startswith("LostRankError: rank 1 (in epoch 2, step 3) is gone")
        reason = "RankError: rank 1 (in epoch 2, step 3) hangs: no sign of life for 1 s"
        assert hanging.read_text().startswith(reason)


@pytest.mark.parametrize(
    ("threads", "said"),
    [
        ("for _ in range(20): start(error)", "Error: rank 1 hangs\n"),
        # The main thread has reported the error, but cannot end.
        ("ranks.LEAVE_SECONDS = 0.2; ranks.report_end(error); start(RankError('2'))", ""),
    ],
)
def test_of_several_threads_one_says_why_the_process_ends(threads, said, tmp_path):
    code = f"""
import threading, time
from unet3d.distributed import ranks
from unet3d.errors import RankError
error = RankError("rank 1 hangs")
start = lambda error: threading.Thread(target=ranks.end_process, args=(error,)).start()
{threads}
time.sleep(50)
"""
    own = environment() | {"RANK": "0", "WORLD_SIZE": "2"}
    own["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / "error.json")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=own, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, said)
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["kind"] == "hang" and "rank 1 hangs" in str(report)


@pytest.mark.parametrize(
    ("line", "set_before", "is_passive"),
    [
        ("8.05 7.1 6.9 9/512 4711", {}, True),
        ("8.05 7.1 6.9 1/512 4711", {}, False),  # the processes of the last minute have ended
        ("0.10 7.1 6.9 9/512 4711", {}, False),  # the running processes have just begun
        (None, {}, False),
        ("8.05 7.1 6.9 9/512 4711", {"GOMP_SPINCOUNT": "1000"}, False),
    ],
)
def test_threads_wait_passively_where_others_use_the_machine(
    line, set_before, is_passive, tmp_path, monkeypatch
):
    if line is not None:
        (tmp_path / "loadavg").write_text(line)
    variables = {name: os.environ[name] for name in os.environ if "OMP" not in name} | set_before
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(ranks, "Path", lambda _: tmp_path / "loadavg")
    ranks.wait_passively()
    assert ("OMP_WAIT_POLICY" in variables) == is_passive
