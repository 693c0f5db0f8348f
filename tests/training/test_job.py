"""Training end to end on small phantoms: its files, and that interruptions lose nothing."""

import json
import signal

import pytest
import torch

from tests.command_line import run as command
from tests.products import by_night
from tests.reports.records import assert_is_picture
from tests.trainings import (
    assert_same_weights,
    before_steps,
    contents,
    losses,
    run,
    run_until_power_cut,
    settings,
    weights,
)
from unet3d.config import load_config
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.interruption import Interrupted
from unet3d.parallel import precision
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training import job
from unet3d.training.validation import Validator

SPREAD = ("parallel.mode=model", "parallel.devices=cpu,cpu")
BRIEF = ("training.epochs=1", "training.steps_per_epoch=2")


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(settings(cache), folder, is_bare=False)
    return folder


def state_of(folder):
    """Return the epochs and steps that the latest checkpoint holds."""
    state = load_checkpoint(folder / "checkpoint-latest.pt").training["state"]
    return state["epoch"], state["step"]


def test_a_run_folder_holds_what_is_promised(finished):
    assert {path.name for path in finished.iterdir()} == {
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
    assert_is_picture(finished / "memory.png")
    assert_is_picture(finished / "progress.png")
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
    training = sum(line["seconds"] for line in lines)
    validation = sum(line.get("validation_seconds", 0) for line in lines)
    assert summary["training_seconds"] == pytest.approx(training)
    assert summary["validation_seconds"] == pytest.approx(validation) and validation > 0
    assert summary["seconds"] == pytest.approx(training + validation)
    data = json.loads((finished / "data.json").read_text())
    assert data["fold"] == data["seed"] == 0 and data["dataset"] is None
    assert len(data["training"]) == 19 and len(data["validation"]) == 1
    assert data["preprocessing"]["label_names"][1:] == ["brain", "ventricles", "lesion"]


def test_two_devices_and_accumulation_train_the_same_network_also_if_one_goes_on(cache, tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "spread"
    changes = ("training.precision=float64", "training.epochs=2")
    run(settings(cache, *changes), plain)
    saving = ("training.micro_batches=2", "training.save_every_seconds=0")
    run_until_power_cut(settings(cache, *changes, *SPREAD, *saving), folder, num_steps=6)
    record = json.loads((folder / "memory.json").read_text())
    model = weights(folder)
    num_bytes = sum(value.numel() * value.element_size() for value in model.values())
    slots = [slot["measured"] for slot in record["slots"]]
    assert record["parallel"] == "model"
    assert [slot["device"] for slot in record["slots"]] == ["cpu", "cpu"]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert sum(slot[kind] for slot in slots) == num_bytes, kind
    assert all(slot["activations_bytes"] > 16**3 * 4 * 4 for slot in slots)

    run(settings(cache, *changes), folder, resume=True)
    assert json.loads((folder / "memory.json").read_text())["parallel"] == "none"
    assert [epoch for epoch, _ in losses(folder)] == [1, 2]
    expected = weights(plain)
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("is_faster", [True, False])
@pytest.mark.nightly
def test_a_resumed_run_keeps_the_precision_that_a_cpu_was_measured_for(
    is_faster, cache, tmp_path, monkeypatch
):
    """Such as on another machine, or after a measurement with another result."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(job, "cpu_has_bfloat16", lambda: True)
    config = settings(cache, *BRIEF, "training.precision=auto", "training.save_every_seconds=0")
    folder = tmp_path / "run"
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: is_faster)
    run_until_power_cut(config, folder, num_steps=1)
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: not is_faster)
    run(config, folder, resume=True)
    kept = "bfloat16" if is_faster else "float32"
    assert json.loads((folder / "summary.json").read_text())["precision"] == kept


@pytest.mark.nightly
def test_the_cut_is_balanced_where_it_is_not_named(cache, tmp_path, caplog):
    """Networks with other cuts are tested in ``test_transparency``."""
    changes = (*SPREAD, *BRIEF, "parallel.cuts=time")
    with caplog.at_level("INFO"):
        run(settings(cache, *changes), tmp_path / "balanced")
    assert "balanced by time: cut before" in caplog.text
    changes = (*changes, "parallel.cuts=2")
    run(settings(cache, *changes), tmp_path / "named")
    record = json.loads((tmp_path / "named" / "memory.json").read_text())
    assert [len(slot["blocks"]) for slot in record["slots"]] == [2, 5]


def test_a_run_after_a_power_cut_is_bit_identical(finished, tmp_path):
    """In the second epoch, with the configuration that the first start has written."""
    folder, drawn = tmp_path / "run", list[float]()
    config = load_config(finished / "config.yaml", ["training.save_every_seconds=0"])
    with before_steps(lambda _: drawn.append(torch.rand(1).item())):
        run_until_power_cut(config, folder, num_steps=7)
        assert state_of(folder) == (1, 3)
        run(config, folder, resume=True)
    assert len(set(drawn)) == 12, "random numbers begin anew"
    assert_same_weights(folder, finished)
    assert losses(folder) == losses(finished)
    assert not list(folder.glob(".unfinished-*"))


@pytest.mark.gpu
def test_so_is_one_on_a_gpu(cache, tmp_path):
    """The steps have convolutions of every kind, and are at first launched, later replayed."""
    changes = (
        *("parallel.mode=none", "parallel.devices=0", "training.precision=bfloat16"),
        *("data.phantom_shape=80,64,64", "patches.size=64,64,64", "training.batch_size=2"),
        *("model.base_channels=32", "model.num_levels=4"),
    )
    config = settings(cache, *changes, "training.save_every_seconds=0")
    run(config, tmp_path / "undisturbed")
    run_until_power_cut(config, tmp_path / "run", num_steps=7)
    run(config, tmp_path / "run", resume=True)
    assert_same_weights(tmp_path / "run", tmp_path / "undisturbed")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("where", "state"), [("a step", (1, 2)), *by_night(("a validation", (1, 4)))]
)
def test_a_signal_saves_first_and_the_run_goes_on_as_if_there_had_been_none(
    finished, cache, tmp_path, monkeypatch, where, state
):
    """In the middle or at the end of the second epoch, before the first validation."""
    folder, validate = tmp_path / "run", Validator.validate

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGTERM)
        return validate(self, *arguments)

    def raise_in_step(number):
        if where == "a step" and number == 5:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch, before_steps(raise_in_step):
        if where == "a validation":
            patch.setattr(Validator, "validate", interrupted)
        with pytest.raises(Interrupted) as stopped:
            run(settings(cache, "training.save_every_seconds=1000"), folder)
    assert stopped.value.can_resume and stopped.value.signal_number == signal.SIGTERM
    assert state_of(folder) == state
    run(settings(cache), folder, resume=True)
    assert_same_weights(folder, finished)
    assert losses(folder) == losses(finished)


@pytest.mark.nightly
def test_the_first_checkpoint_comes_after_an_epoch_and_before_it_a_run_begins_anew(cache, tmp_path):
    folder, brief = tmp_path / "run", ("training.epochs=2", "training.steps_per_epoch=2")
    config = settings(cache, *brief, "training.save_every_seconds=1000")
    run_until_power_cut(config, folder, num_steps=1)
    assert not (folder / "checkpoint-latest.pt").exists()
    assert command("train", "--resume", "--output", folder, "--epochs", 1, "--quiet") == 0
    assert [epoch for epoch, _ in losses(folder)] == [1]
    run_until_power_cut(config, tmp_path / "other", num_steps=1)
    run_until_power_cut(config, tmp_path / "other", num_steps=3)  # also without --resume
    assert state_of(tmp_path / "other") == (1, 0)


def test_a_run_with_a_patch_size_of_its_own_choice_resumes(cache, tmp_path):
    folder = tmp_path / "run"
    planned = ("patches.size=auto", "training.batch_size=auto")
    chosen = (*planned, *BRIEF, "training.save_every_seconds=0")
    run_until_power_cut(settings(cache, *chosen), folder, num_steps=1)
    before = load_checkpoint(folder / "checkpoint-latest.pt").patch_size
    assert before is not None and before != (16, 16, 16)
    run(load_config(folder / "config.yaml"), folder, resume=True)
    assert load_checkpoint(folder / "checkpoint-latest.pt").patch_size == before


def test_a_run_is_not_overwritten_and_a_second_training_leaves_it_to_the_first(finished, cache):
    before = contents(finished)
    with pytest.raises(ConfigError, match="--resume"):
        run(settings(cache), finished)
    with RunFolder(finished).locked():
        for resume in (False, True):
            with pytest.raises(ConfigError, match="undisturbed is in use by another training run"):
                run(settings(cache, "training.epochs=4"), finished, resume)
    assert contents(finished) == before


def test_memory_that_a_step_lacks_is_explained(cache, tmp_path):
    def fail(number):
        raise MemoryError

    with before_steps(fail), pytest.raises(DoesNotFitError, match="memory"):
        run(settings(cache, *BRIEF), tmp_path / "run", is_bare=False)
