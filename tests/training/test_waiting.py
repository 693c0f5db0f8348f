"""Measured waiting of a device for data, and the note about it."""

import io
import json
import time

import pytest
import torch
from rich.console import Console

from tests.trainings import run, run_until_power_cut, settings
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import Batch
from unet3d.reports.progress import INDENT, MAX_COLUMNS
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.training.cores import DataClock, waiting_note

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BATCH = Batch(
    image=torch.zeros(1, 1, 2, 2, 2),
    target=torch.zeros(1, 2, 2, 2, dtype=torch.uint8),
    names=("a",),
)


class Machine:
    """A host with a clock, and a GPU that works behind it; both count seconds of one clock."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.gpu_free = 100.0
        self.num_waits = 0
        machine = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream):
                assert stream == ("stream of", GPU)
                self.seconds = machine.gpu_free = max(machine.now, machine.gpu_free)

            def synchronize(self):
                machine.num_waits += 1
                machine.now = max(machine.now, self.seconds)

            def elapsed_time(self, end):
                assert max(self.seconds, end.seconds) <= machine.now, "not complete"
                return 1000 * (end.seconds - self.seconds)

        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))

    def batches(self, *seconds):
        """Yield batches, each after some seconds on the host."""
        for one in seconds:
            self.now += one
            yield BATCH

    def compute(self, seconds):
        """Launch a step of some seconds on the GPU; launching takes the host 1 ms."""
        self.now += 0.001
        self.gpu_free = max(self.now, self.gpu_free) + seconds


def test_a_gpu_waits_only_while_it_has_no_step_to_compute(monkeypatch):
    machine, clock = Machine(monkeypatch), DataClock(GPU)
    for _ in clock.timed(machine.batches(0.5, 0.3, 0.1, 0.1, 0.6)):
        machine.compute(0.2)
    assert machine.num_waits == 0  # the host does not wait in each step
    # The first batch; 0.3 - 0.2; then the GPU still has work for 0.1 and 0.2 s when a batch
    # arrives, and works for 0.4 s of the last 0.6.
    assert clock.read() == pytest.approx(0.5 + 0.1 + 0.0 + 0.0 + 0.2, abs=0.01)
    assert machine.num_waits == 1
    assert clock.read() == 0.0


def test_what_comes_between_the_batches_is_not_waiting(monkeypatch):
    machine = Machine(monkeypatch)
    for device in (GPU, CPU):
        clock = DataClock(device)
        for _ in clock.timed(machine.batches(0.25, 0.25)):
            machine.compute(0.001)
            machine.now += 5.0  # time for a checkpoint, or a CPU's step
        machine.now += 7.0  # time for a validation
        for _ in clock.timed(machine.batches(0.5)):
            machine.compute(0.001)
        assert clock.read() == pytest.approx(1.0), device


def test_who_waits_is_told_for_what():
    metrics = {"seconds": 20.0, "waited_seconds": 6.8}
    note = waiting_note(metrics, 6.8, GPU, is_augmented=True)
    assert note == "waited 34 % for data: try more data.num_workers or less patches.augmentation"
    plain = waiting_note(metrics, 0.0, CPU, is_augmented=False)  # a CPU waits for nothing else
    assert plain == "waited 34 % for data: try more data.num_workers"
    host = waiting_note(metrics, 1.9, GPU, is_augmented=True)
    assert host == "waited 34 % for the host, which queues such short steps too slowly"
    assert max(len(INDENT + one) for one in (host, note)) <= MAX_COLUMNS
    tenth = {"seconds": 20.0, "waited_seconds": 2.0}
    assert waiting_note(tenth, 2.0, GPU, is_augmented=True) is None  # too little


LATE_SECONDS = 0.1


@pytest.mark.parametrize("device", ["cpu", pytest.param("0", marks=pytest.mark.gpu)])
@pytest.mark.nightly
def test_a_training_on_late_batches_has_waited_for_them_also_when_it_is_resumed(
    cache, tmp_path, monkeypatch, caplog, device
):
    batches = PatchLoader.epoch

    def late(self, *where, **options):
        for batch in batches(self, *where, **options):
            time.sleep(LATE_SECONDS)
            yield batch

    monkeypatch.setattr(PatchLoader, "epoch", late)
    config = settings(cache, f"parallel.devices={device}", "training.save_every_seconds=0")
    folder = tmp_path / "run"
    run_until_power_cut(config, folder, num_steps=6)
    state = load_checkpoint(folder / "checkpoint-latest.pt").training["state"]
    assert (state["epoch"], state["step"]) == (1, 2)
    # Two batches; a GPU that still computes waits for less than both.
    assert 1.0 * LATE_SECONDS < state["waited_seconds"] < state["seconds"]
    with caplog.at_level("INFO", logger="unet3d"):
        run(config, folder, resume=True, console=Console(file=io.StringIO()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert 3.0 * LATE_SECONDS < line["waited_seconds"] < line["seconds"], line
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["waited_seconds"] == pytest.approx(sum(line["waited_seconds"] for line in lines))
    assert summary["waited_seconds"] < summary["training_seconds"]
    (where,) = (i for i, text in enumerate(caplog.messages) if text.startswith("epoch 3/3: loss"))
    if device == "cpu":  # such short steps may make a GPU wait for the host instead
        note = next(text for text in caplog.messages[where:] if " for data" in text)
        assert note.startswith(f"{INDENT}waited ")
        assert note.endswith(" % for data: try more data.num_workers or less patches.augmentation")


@pytest.mark.gpu
@pytest.mark.parametrize(("load_seconds", "has_to_wait"), [(0.05, True), (0.001, False)])
def test_a_gpu_waits_as_long_as_it_does_not_compute(load_seconds, has_to_wait):
    def seconds_of(steps):
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in steps:
            torch.cuda._sleep(3 * 10**7)  # about 20 ms
        torch.cuda.synchronize()
        return time.monotonic() - began

    def batches():
        for _ in range(40):
            time.sleep(load_seconds)
            yield BATCH

    seconds_of(range(2))
    computed, clock = seconds_of(range(40)), DataClock(GPU)
    seconds = seconds_of(clock.timed(batches()))
    waited = clock.read()
    assert waited == pytest.approx(seconds - computed, abs=0.05 * seconds)
    assert (waited > 0.3 * seconds) == has_to_wait
