"""No core is used by both the network and a process beside it."""

import os

import pytest
import torch

from unet3d.config import Config, load_config
from unet3d.training import cores
from unet3d.training.cores import (
    leave_cores,
    loading_processes,
    preparing_processes,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
AUTO = Config()


@pytest.fixture
def machine(monkeypatch):
    """Pretend that there are ``cores`` cores, and perhaps that the user has set the threads."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def pretend(num_cores, threads=None):
        monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
        torch.set_num_threads(num_cores if threads is None else threads)
        if threads is not None:
            monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", str(threads))

    yield pretend
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_cores", "devices", "num_ranks", "preparing", "loading"),
    [
        (1, (CPU,), 1, 0, 0),
        (2, (CPU, CPU), 1, 0, 0),
        (8, (CPU,), 1, 3, 0),
        (32, (CPU,), 1, 4, 1),
        (64, (CPU, GPU), 1, 4, 2),
        (64, (CPU,), 2, 4, 1),
        (2, (GPU,), 1, 1, 1),
        (64, (GPU,), 1, 16, 8),
        (64, (GPU,), 8, 7, 7),
    ],
)
def test_processes_by_cores(machine, num_cores, devices, num_ranks, preparing, loading):
    machine(num_cores)
    assert preparing_processes(AUTO, devices, num_ranks) == preparing
    assert loading_processes(AUTO, devices, num_ranks) == loading


def test_settings_may_name_the_number_of_processes(machine):
    machine(8, 8)
    config = load_config(None, ["data.num_workers=5"])
    assert preparing_processes(config, (CPU,), 1) == 5
    assert loading_processes(config, (CPU,), 1) == 5


def test_threads_that_the_user_set_are_kept(machine):
    for threads, expected in ((64, 0), (63, 1), (8, 2), (96, 0)):
        machine(64, threads)
        num_processes = loading_processes(AUTO, (CPU,), 1)
        assert num_processes == expected, threads
        leave_cores(num_processes, (CPU,), 1)
        assert torch.get_num_threads() == threads


def test_the_network_leaves_the_cores_of_the_others(machine):
    for num_processes, device, num_ranks, left in (
        (3, CPU, 1, 5),
        (8, CPU, 1, 1),
        (2, CPU, 2, 2),
        (3, GPU, 1, 8),
    ):
        machine(8)
        leave_cores(num_processes, (device,), num_ranks)
        assert torch.get_num_threads() == left, (num_processes, device, num_ranks)
