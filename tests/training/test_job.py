"""Training end to end on small phantom data: what is written, and that stopping loses nothing."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.process_trees import assert_all_end, family_of
from tests.trainings import (
    assert_same_weights,
    contents,
    losses,
    run,
    settings,
    start,
    wait_for,
    weights,
)
from unet3d.config import load_config
from unet3d.errors import CheckpointError, ConfigError, DoesNotFitError
from unet3d.model import LossTerms
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.training.loop import TrainingLoop
from unet3d.volumes.patches import Batch


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(settings(cache), folder)
    return folder


@pytest.mark.parametrize("mode", ["data", "spatial"])
def test_ranks_that_nobody_has_started_are_missed(mode: str, cache: Path, tmp_path: Path) -> None:
    config = settings(cache, f"parallel.mode={mode}", "parallel.devices=cpu,cpu")
    words = f"parallel.mode {mode} on 2 devices is 2 processes, but this is 1; start them with "
    with pytest.raises(ConfigError, match=words):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_holds_what_is_promised(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "data.json",
        "config.yaml",
        "checkpoint-latest.pt",
        "checkpoint-best.pt",
        "metrics.jsonl",
        "memory.json",
        "memory.png",
        "progress.png",
        "summary.json",
        "tensorboard",
        "validation",
    }
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["epochs"] == 3
    assert set(summary["dice"]) == {"brain", "ventricles", "lesion"}
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [("mean_dice" in line) for line in lines] == [False, True, True]
    assert lines[-1]["loss"] < lines[0]["loss"]
    best = max((line for line in lines if "mean_dice" in line), key=lambda line: line["mean_dice"])
    assert summary["best_dice"] == best["mean_dice"]
    assert summary["best_epoch"] == best["epoch"]
    assert summary["dice"] == best["dice"]
    assert summary["last_dice"] == lines[-1]["dice"]
    training = sum(line["seconds"] for line in lines)
    validation = sum(line.get("validation_seconds", 0) for line in lines)
    assert summary["training_seconds"] == pytest.approx(training)
    assert summary["validation_seconds"] == pytest.approx(validation) and validation > 0
    assert summary["seconds"] == pytest.approx(training + validation)
    data = json.loads((finished / "data.json").read_text())
    assert data["fold"] == data["seed"] == 0 and data["dataset"] is None
    assert len(data["training"]) == 4 and len(data["validation"]) == 1
    assert data["preprocessing"]["label_names"][1:] == ["brain", "ventricles", "lesion"]


def test_the_written_configuration_repeats_the_run(
    finished: Path, cache: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    run(load_config(finished / "config.yaml"), again)
    assert_same_weights(again, finished)


def test_two_devices_and_accumulation_train_the_same_network(
    finished: Path, cache: Path, tmp_path: Path
) -> None:
    config = settings(
        cache,
        "parallel.mode=model",
        "parallel.devices=cpu,cpu",
        "training.micro_batches=2",
        "training.precision=float64",
    )
    run(config, tmp_path / "spread")
    run(settings(cache, "training.precision=float64"), tmp_path / "plain")
    expected = weights(tmp_path / "plain")
    for name, value in weights(tmp_path / "spread").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9, msg=name)


def test_the_memory_report_has_both_slots(cache: Path, tmp_path: Path) -> None:
    config = settings(cache, "parallel.mode=model", "parallel.devices=cpu,cpu")
    run(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    model = load_checkpoint(tmp_path / "run" / "checkpoint-latest.pt").model
    num_bytes = sum(value.numel() * value.element_size() for value in model.values())
    slots = [slot["measured"] for slot in record["slots"]]
    assert [slot["device"] for slot in record["slots"]] == ["cpu", "cpu"]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert sum(slot[kind] for slot in slots) == num_bytes, kind
    assert all(slot["activations_bytes"] > 16**3 * 4 * 4 for slot in slots)


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_a_balanced_cut_trains_the_same_network(
    balance: str,
    finished: Path,
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spread = ("parallel.mode=model", "parallel.devices=cpu,cpu", f"parallel.balance={balance}")
    with caplog.at_level("INFO"):
        run(settings(cache, *spread), tmp_path / "balanced")
    assert f"balanced by {balance}: cut before" in caplog.text
    for name, value in weights(tmp_path / "balanced").items():
        torch.testing.assert_close(value, weights(finished)[name], rtol=1e-3, atol=1e-4, msg=name)
    # The same run on one device goes on from what two devices have saved.
    config = load_config(
        tmp_path / "balanced" / "config.yaml",
        [
            "training.epochs=4",
            "parallel.mode=none",
            "parallel.devices=cpu",
            "parallel.balance=encoder-decoder",
        ],
    )
    run(config, tmp_path / "balanced", resume=True)
    assert [epoch for epoch, _ in losses(tmp_path / "balanced")] == [1, 2, 3, 4]


def test_making_levels_again_trains_to_the_same_weights_with_less(
    cache: Path, finished: Path, tmp_path: Path
) -> None:
    run(settings(cache, "memory.recompute=level"), tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    slots = [
        json.loads((folder / "memory.json").read_text())["slots"][0]
        for folder in (tmp_path / "run", finished)
    ]
    for kind in ("measured", "predicted"):
        again, kept = (slot[kind]["activations_bytes"] for slot in slots)
        assert again < 0.7 * kept, kind  # of the decoder all is kept


def test_cuts_overrule_the_balance(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spread = ("parallel.mode=model", "parallel.devices=cpu,cpu", "parallel.balance=time")
    run(settings(cache, *spread, "parallel.cuts=2", "training.epochs=1"), tmp_path / "run")
    assert "parallel.cuts says where the network is cut" in caplog.text
    record = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert [len(slot["blocks"]) for slot in record["slots"]] == [2, 5]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_steps: int, error: type) -> None:
    """Make training die after some steps, as a power cut would: nothing more is written."""
    step, done = TrainingLoop._step, []

    def failing(self: TrainingLoop, batch: Batch) -> LossTerms:
        if len(done) == num_steps:
            raise error
        done.append(batch)
        return step(self, batch)

    monkeypatch.setattr(TrainingLoop, "_step", failing)


@pytest.mark.parametrize("num_steps", [2, 4, 7, 11])
def test_a_resumed_run_is_bit_identical(
    finished: Path, cache: Path, tmp_path: Path, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = settings(cache, "training.save_every_seconds=0")
    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError):
        interrupt_after(patch, num_steps, MemoryError)
        run(config, folder)
    run(config, folder, resume=True)
    assert_same_weights(folder, finished)
    assert losses(folder) == losses(finished)
    assert not list(folder.glob(".unfinished-*"))


def test_epochs_can_be_extended(finished: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(settings(cache, "training.epochs=2"), folder)
    result = run(settings(cache, "training.epochs=3"), folder, resume=True)
    assert [epoch for epoch, _ in losses(folder)] == [1, 2, 3]
    assert result.memory is not None


def test_resuming_in_another_mode(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(settings(cache, "training.epochs=2"), folder)
    run(settings(cache, "parallel.mode=model", "parallel.devices=cpu,cpu"), folder, resume=True)
    assert json.loads((folder / "memory.json").read_text())["parallel"] == "model"


@pytest.mark.parametrize(
    "change", ["model.base_channels=8", "model.base_channels=6", "model.num_levels=3"]
)
def test_resuming_with_another_network_is_refused_and_changes_nothing(
    finished: Path, cache: Path, change: str
) -> None:
    before = contents(finished)
    with pytest.raises(CheckpointError, match="another network"):
        run(settings(cache, change, "training.epochs=5"), finished, resume=True)
    assert contents(finished) == before


def test_a_run_with_a_patch_size_of_its_own_choice_resumes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("patches.size=auto", "training.steps_per_epoch=2", "training.save_every_seconds=0")
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    run(settings(cache, *chosen), undisturbed)
    with monkeypatch.context() as patch, pytest.raises(DoesNotFitError):
        interrupt_after(patch, 3, MemoryError)
        run(settings(cache, *chosen), folder)
    before = load_checkpoint(folder / "checkpoint-latest.pt")
    assert before.patch_size is not None and before.patch_size != (16, 16, 16)
    run(load_config(folder / "config.yaml"), folder, resume=True)
    assert load_checkpoint(folder / "checkpoint-latest.pt").patch_size == before.patch_size
    assert_same_weights(folder, undisturbed)
    assert losses(folder) == losses(undisturbed)


def test_a_run_is_not_overwritten(finished: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        run(settings(cache), finished)


def test_divergence_stops_with_a_reason(cache: Path, tmp_path: Path) -> None:
    config = settings(cache, "training.learning_rate=1e30", "training.gradient_clip=1e30")
    with pytest.raises(ConfigError, match="not finite"):
        run(config, tmp_path / "run")


@pytest.mark.nightly
def test_a_killed_process_leaves_a_good_checkpoint(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    long = "training.epochs=12"
    undisturbed = tmp_path / "undisturbed"
    torch.set_num_threads(1)
    run(settings(cache, long), undisturbed)
    folder = tmp_path / "killed"
    for delay in (0.0, 0.03, 0.4):
        process = start(folder, cache, long)
        wait_for(folder / "checkpoint-latest.pt", process)
        time.sleep(delay)
        process.kill()
        process.communicate()
        load_checkpoint(folder / "checkpoint-latest.pt")
    process = start(folder, cache, long)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_same_weights(folder, undisturbed)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_training_leaves_the_folder_to_the_first(
    cache: Path, tmp_path: Path, resume: bool
) -> None:
    folder = tmp_path / "run"
    process = start(folder, cache, "training.epochs=1000")
    wait_for(folder / "checkpoint-latest.pt", process)
    os.kill(process.pid, signal.SIGSTOP)  # so that nothing but the second could change a file
    before = contents(folder)
    with pytest.raises(ConfigError, match="run is in use by a running training"):
        run(settings(cache), folder, resume)
    assert contents(folder) == before
    process.kill()
    process.communicate()
    run(settings(cache, "training.epochs=1"), folder, resume=True)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_saves_first(
    cache: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    long = ("training.epochs=1000", "training.save_every_seconds=1000", "data.num_workers=1")
    process = start(tmp_path / "run", cache, *long)
    wait_for(tmp_path / "run" / "metrics.jsonl", process)
    family = family_of(process.pid)
    assert len(family) >= 2  # a server that forks workers, and a worker
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert_all_end(family, 5)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert "--resume" in errors
    state = load_checkpoint(tmp_path / "run" / "checkpoint-latest.pt").training["state"]
    assert state["epoch"] >= 1
