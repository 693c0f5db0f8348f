"""The ranks that a training starts: imports, failures, and training on two machines or GPUs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.ranks import environment, free_port
from tests.trainings import SMALL, run, settings, weights, without_drawing, words
from unet3d.distributed import launcher
from unet3d.distributed.launcher import Failure, _reason, launch, meeting_folder
from unet3d.distributed.ranks import TRAINING, report_end
from unet3d.errors import DatasetError, RankError, Unet3dError, VolumeError
from unet3d.inference.sliding_window import NonFiniteLogitsError
from unet3d.interruption import Interrupted

ALONE: Any = {"num_ranks": 1, "on_gpus": False}


def test_a_rank_that_cannot_end_is_ended(tmp_path, monkeypatch):
    """The rank has reported its error, but waits for a rank that hangs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if 'RANK' in os.environ:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    if os.environ['RANK'] == '0':\n"
        "        from unet3d.distributed.ranks import report_end\n"
        "        from unet3d.errors import RankError\n"
        "        report_end(RankError('rank 1 (in epoch 3) hangs'))\n"
        "    time.sleep(1000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launcher, "END_SECONDS", 1.0)
    with pytest.raises(RankError, match=r"^rank 1 \(in epoch 3\) hangs$"):
        launch(["--version"], tmp_path, num_ranks=2, max_restarts=0, on_gpus=False)


def test_a_rank_that_does_not_stop_when_it_is_asked_to_is_killed(tmp_path, monkeypatch):
    """The user asked for the end, so no error is reported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, time\n"
        "if 'RANK' in os.environ:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(1000)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    purpose = replace(TRAINING, stop_seconds=0.2)
    with pytest.raises(Interrupted, match="SIGTERM"):
        launch(["--version"], tmp_path, max_restarts=1, purpose=purpose, **ALONE)


@pytest.mark.nightly
def test_ranks_import_what_the_process_that_starts_them_can(tmp_path):
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    absolute, inserted = tmp_path / "absolute", tmp_path / "inserted"
    for folder in (start / "packages", absolute, elsewhere, inserted):
        folder.mkdir(parents=True)
    (inserted / "sitecustomize.py").write_text(
        "import json, os, sys\n"
        "if 'RANK' in os.environ:\n"
        "    with open(os.path.join(os.environ['PROBE'], os.environ['RANK']), 'w') as file:\n"
        "        json.dump(sys.path, file)\n"
    )
    (elsewhere / "torch.py").write_text("raise SystemExit('a file of the current folder')")
    code = f"""
import json, os, sys
sys.path.remove("")  # which -c adds, and an installed command does not
os.chdir({str(elsewhere)!r})
sys.path.insert(0, {str(inserted)!r})
from pathlib import Path
from unet3d.distributed.launcher import launch
launch(["--version"], Path({str(tmp_path)!r}), num_ranks=2, max_restarts=0, on_gpus=False)
print(json.dumps(sys.path))
"""
    own = environment()
    own["PYTHONPATH"] = os.pathsep.join([str(absolute), "packages", own["PYTHONPATH"]])
    del own["PYTHONSAFEPATH"]
    own["PROBE"] = str(tmp_path)
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=own, cwd=start, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout.splitlines()[-1])
    assert path[:2] == [str(inserted), str(absolute)]
    expected = [str(start / entry) for entry in path]  # absolute paths stay as they are
    assert expected[2] == str(start / "packages")
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == expected


def test_what_was_explained_is_not_tried_again(tmp_path, caplog):
    with pytest.raises(Unet3dError, match="nonsense"):
        launch(["config", "--set", "nonsense=1"], tmp_path, max_restarts=3, **ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["error-0-0.json"]
    assert not caplog.messages


def test_a_restart_is_told_with_its_reason_unless_the_rank_was_asked_to_stop(
    tmp_path, monkeypatch, caplog
):
    """A signal ends the rank at its first start, but not at its second."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        f"number = os.environ['PROBE'] + os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"open(os.path.join({str(tmp_path)!r}, number), 'w').close()\n"
        "if number in ('9-0', '15-0'):\n"
        "    os.kill(os.getpid(), int(number[:-2]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PROBE", "9-")
    launch(["--version"], tmp_path, max_restarts=2, **ALONE)
    assert caplog.messages == ["rank 0 was killed by SIGKILL; restarting all ranks (1 of 2)"]
    monkeypatch.setenv("PROBE", "15-")
    with pytest.raises(Interrupted, match="SIGTERM"):
        launch(["--version"], tmp_path, max_restarts=2, **ALONE)
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["15-0", "9-0", "9-1"]


@pytest.mark.nightly
def test_the_reason_of_a_failing_rank_is_one_line(cache, tmp_path):
    diverging = ("training.learning_rate=1e30",)
    spread = ("parallel.mode=data", "parallel.devices=cpu,cpu", "training.batch_size=3")
    done = warm.run_call(without_drawing, words(tmp_path / "run", cache, *spread, *diverging))
    assert done.returncode == 1
    # The process that started the ranks shows the error; neither they nor torch elastic do.
    (line,) = (one for one in done.stderr.splitlines() if "rror" in one or "Traceback" in one)
    assert line.startswith("Error: the loss is not finite in epoch 1; ")


@pytest.mark.multigpu
def test_nn_data_parallel_trains_in_one_process(cache, tmp_path):
    threads = ("parallel.data_parallel=1", "parallel.devices=0,1")
    more = ("parallel.mode=data", "training.epochs=1", "training.batch_size=2")
    run(settings(cache, *threads, *more), tmp_path / "run")
    rows = json.loads((tmp_path / "run" / "memory.json").read_text())["slots"]
    assert [row["device"] for row in rows] == ["cuda:0", "cuda:1"]
    first, second = (row["measured"] for row in rows)
    assert first["parameters_bytes"] == first["gradients_bytes"] > 0
    assert second["parameters_bytes"] == second["gradients_bytes"] == 0  # copied in each step
    assert second["activations_bytes"] > 0 and second["peak_bytes"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["auto", "spatial"])
def test_two_machines_train_one_network(mode, cache, tmp_path):
    names = [f"unet3d-{os.getpid()}-{node}" for node in range(2)]
    tools = os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")
    has_networks = bool(tools) and not subprocess.run(["unshare", "-n", "true"]).returncode
    address, port = ("10.77.0.1" if has_networks else "127.0.0.1"), free_port()
    ends = [f"u3d{os.getpid() % 10**6}{node}" for node in range(2)]
    overrides = [*SMALL, f"data.cache={cache}", "training.batch_size=3", "training.epochs=2"]
    overrides.append(f"parallel.mode={mode}")
    script = Path(__file__).with_name("rank_training.py")
    agents = []
    try:
        if has_networks:
            make_networks(names, ends)
        for node in range(2):
            inside = ["ip", "netns", "exec", names[node]] if has_networks else []
            command = [
                *(*inside, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-id=test{os.getpid()}"),
                f"--rdzv-endpoint={address}:{port}",
                f"--rdzv-conf=is_host={1 - node}",
                f"--local-addr={f'10.77.0.{node + 1}' if has_networks else '127.0.0.1'}",
                *(str(script), str(tmp_path), "train", "--output", str(tmp_path / "run")),
                *(word for override in overrides for word in ("--set", override)),
            ]
            interface = ends[node] if has_networks else "lo"
            agents.append(
                subprocess.Popen(
                    command,
                    env=environment()
                    | {"GLOO_SOCKET_IFNAME": interface, "CUDA_VISIBLE_DEVICES": ""},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for agent in agents:
            _, errors = agent.communicate(timeout=150)
            assert agent.returncode == 0, errors
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
        if has_networks:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False)
    for rank in range(2):
        own = torch.load(tmp_path / f"weights-{rank}.pt")
        assert all(torch.equal(own[k], v) for k, v in weights(tmp_path / "run").items())
    addresses = {(tmp_path / f"address-{rank}.txt").read_text() for rank in range(2)}
    assert len(addresses) == (2 if has_networks else 1)


def make_networks(names, ends):
    """Make two network namespaces with an address each, and a cable between them."""
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add {ends[0]} type veth peer name {ends[1]}")
    for node, (name, end) in enumerate(zip(names, ends, strict=True)):
        commands += [
            f"link set {end} netns {name}",
            f"-n {name} address add 10.77.0.{node + 1}/24 dev {end}",
            f"-n {name} link set {end} up",
            f"-n {name} link set lo up",
        ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


# A private function: no test could make ranks fail in a certain order within milliseconds.


def failure(rank, exit_status, **report):
    return Failure(rank, exit_status, report)


def told(rank, kind, seconds, text, error=DatasetError):
    types = [one.__name__ for one in error.__mro__]
    report = {"kind": kind, "types": types, "time": seconds, "message": {"message": text}}
    return failure(rank, 1, **report)


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ([told(0, "consequence", 5.1, "gone"), failure(1, -9)], "rank 1 was killed by SIGKILL"),
        ([told(0, "explained", 5.2, "late"), told(1, "explained", 5.1, "first")], "first"),
        (
            [failure(0, -15), told(1, "unexpected", 5.1, "KeyError: 3")],
            "rank 1 stopped with",
        ),
        ([told(0, "consequence", 5.1, "rank 1 is gone")], "rank 1 is gone"),
        ([failure(2, 7)], "rank 2 exited with status 7"),
        ([failure(2, 143)], "SIGTERM"),
    ],
    ids=("killed", "earliest", "not its own", "consequence", "status", "while loading"),
)
def test_the_first_reason_counts(failures, reason):
    assert str(_reason(failures)).startswith(reason)


def test_a_rank_that_could_not_save_when_it_was_stopped_says_so():
    stopped = failure(0, 143, kind="interrupted", signal=15)
    full = told(1, "explained", 5.1, "cannot write the checkpoint")
    reason = _reason([stopped, full], TRAINING, signal.SIGTERM)
    assert isinstance(reason, Unet3dError) and "cannot write the checkpoint" in str(reason)
    lost, killed = told(1, "consequence", 5.1, "rank 0 is gone"), failure(1, -9)
    assert str(_reason([lost, stopped], TRAINING, signal.SIGTERM)) == "SIGTERM"
    assert str(_reason([stopped, killed], TRAINING, signal.SIGTERM)) == "SIGTERM"


def test_ranks_that_end_in_the_middle_of_their_work_are_told_from_those_that_say_how_it_ended():
    """If a rank ends without a report, a prediction says which scans are left."""
    for kind in ("consequence", "device", "hang"):
        assert type(_reason([told(0, kind, 5.1, "no")])) is RankError
    assert type(_reason([told(0, "explained", 5.1, "2 of 3 scans could not be")])) is DatasetError
    nan = told(0, "explained", 5.1, "the output is NaN", NonFiniteLogitsError)
    assert type(_reason([nan])) is VolumeError


def test_the_meeting_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with meeting_folder() as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "has_traceback"), [(Unet3dError, False), (KeyError, True)])
def test_torchrun_is_shown_a_traceback_only_of_what_we_do_not_explain(
    tmp_path, monkeypatch, kind, has_traceback
):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    try:
        raise kind("which")
    except kind as error:
        report_end(error)
    shown = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "which" in shown
    assert ("Traceback" in shown) == has_traceback
