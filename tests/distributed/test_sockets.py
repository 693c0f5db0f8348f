"""What the ranks of one machine open to others: nothing. And what they send is not unpickled."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process_trees import family_of, is_open_to_others, listening_sockets
from tests.trainings import run, settings, words
from unet3d.distributed.launcher import import_variables

HYBRID = (
    "parallel.mode=model",
    "parallel.devices=cpu,cpu,cpu,cpu",
    "parallel.replicas=2",
    "training.micro_batches=2",
)
SPATIAL = ("parallel.mode=spatial", "parallel.devices=cpu,cpu")
AUDIT = """
import os, sys
def note(event, arguments, path=f"{os.environ['PROBE']}/{os.getpid()}"):
    if event == "pickle.find_class":
        with open(path, "a") as file:
            print(*arguments, file=file)
sys.addaudithook(note)
"""


@pytest.mark.parametrize(
    "where",
    [
        HYBRID,
        pytest.param(SPATIAL, marks=pytest.mark.nightly),
        pytest.param(("parallel.mode=data", "parallel.devices=0,1"), marks=pytest.mark.multigpu),
    ],
    ids=("hybrid", "spatial", "nccl"),
)
def test_a_training_on_one_machine_listens_to_nobody_else_and_unpickles_nothing(
    where: tuple[str, ...], cache: Path, tmp_path: Path
) -> None:
    more = ("training.batch_size=4", *where)
    folder, audit = tmp_path / "run", tmp_path / "audit"
    run(settings(cache, "training.epochs=1"), folder)  # so that a checkpoint is sent
    audit.mkdir()
    (audit / "sitecustomize.py").write_text(AUDIT)
    variables = {**os.environ, **import_variables(), "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = f"{audit}:{variables['PYTHONPATH']}"
    variables |= {
        "PROBE": str(audit),
        # Of a user who also trains on several machines.
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": "0.0.0.0",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "-m", "unet3d", *words(folder, cache, *more), "--resume"]
    process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
    found: set[str] = set()
    num_ranks = 0
    while process.poll() is None:
        family = family_of(process.pid)
        found |= listening_sockets([process.pid, *family])
        num_ranks = max(num_ranks, len(family))
        time.sleep(0.1)
    assert process.returncode == 0, process.communicate()[1]
    process.communicate()
    assert num_ranks == 2
    assert [one for one in found if is_open_to_others(one)] == []
    assert any("127.0.0.1" in one for one in found)  # gloo's, so the sockets were seen
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]
    assert {path.name: path.read_text() for path in audit.glob("[0-9]*")} == {}
