"""The link between GPUs: measured in a separate process, or assumed."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.steps import CPU, GPUS
from unet3d.planning import link_speed
from unet3d.planning.link_speed import link_line, measure_link, time_copies


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_nothing_is_measured_where_there_is_no_link_and_nothing_started_without_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(subprocess, "run", None)
    for devices in ((), (CPU, CPU), (CPU, GPUS[0]), (GPUS[0], GPUS[0])):
        assert measure_link(devices) is None
    assert measure_link(GPUS[:2]) == math.inf  # one GPU does not exist here
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert measure_link(GPUS, are_here=False) == math.inf
    assert link_line(math.inf) == "link between the GPUs: not measured, NVLink is assumed"


@pytest.mark.usefixtures("two_gpus")
def test_a_process_measures_the_gpus_that_are_meant(monkeypatch):
    started = []

    def run(command, **options):
        started.append(command)
        return SimpleNamespace(stdout="12345678901.5")

    monkeypatch.setattr(subprocess, "run", run)
    found = measure_link((GPUS[1], CPU, GPUS[0]))
    assert found == 12345678901.5
    assert link_line(found) == "link: 12.3 GB/s measured between the GPUs"
    assert started == [[sys.executable, "-m", "unet3d.planning.link_speed", "0", "1"]]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.nightly
def test_a_measurement_that_fails_is_an_assumption(monkeypatch):
    if not torch.cuda.is_available():
        assert measure_link(GPUS[:2]) == math.inf  # the process finds no GPU
    for error in (OSError("no"), subprocess.TimeoutExpired("python", 60)):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(subprocess, "run", fail)
        assert measure_link(GPUS[:2]) == math.inf
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="what"))
    assert measure_link(GPUS[:2]) == math.inf


def test_all_copies_of_a_round_are_timed_together(monkeypatch):
    """With CPUs in place of GPUs: each device receives the copy of the one before it."""
    clock = iter(range(100))
    monkeypatch.setattr(link_speed, "COPY_BYTES", 1024)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(link_speed.time, "perf_counter", lambda: next(clock) / 4)
    assert time_copies([CPU, CPU, CPU]) == 4 * 1024


@pytest.mark.multigpu
def test_real_gpus_copy_faster_than_a_network():
    assert 1e9 < measure_link(GPUS[:2]) < 2e12
