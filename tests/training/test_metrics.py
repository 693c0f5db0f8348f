import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unet3d.parallel import ParallelDims
from unet3d.training.metrics import ScalarFile, epoch_metrics, run_summary
from unet3d.training.state import TrainingState
from unet3d.training.validation import Validation

STATE = TrainingState(
    epoch=4,
    loss={"total": 12.0, "dice": 4.0, "cross_entropy": 8.0},
    num_samples=8,
    seconds=2.5,
    waited_seconds=0.625,
)


def test_an_epoch_without_validation_has_no_dice():
    assert epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=None) == {
        "epoch": 5,
        "step": 15,
        "loss": 1.5,
        "dice_loss": 0.5,
        "cross_entropy": 1.0,
        "seconds": 2.5,
        "waited_seconds": 0.625,
        "learning_rate": 0.25,
    }


def test_tensorboard_gets_what_is_known(tmp_path):
    validation = Validation(
        dice={"mean": 0.25, "absent": None}, mean_dice=0.5, loss=0.75, seconds=1.5
    )
    metrics = epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=validation)
    assert metrics["dice"] == {"mean": 0.25, "absent": None} and metrics["mean_dice"] == 0.5
    assert metrics["seconds"] == 2.5 and metrics["validation_seconds"] == 1.5
    ScalarFile(tmp_path).write(metrics)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert found == {
        "loss": [(5, 1.5)],
        "dice_loss": [(5, 0.5)],
        "cross_entropy": [(5, 1.0)],
        "learning_rate": [(5, 0.25)],
        "dice/mean": [(5, 0.25)],
        "mean_dice": [(5, 0.5)],
        "validation_loss": [(5, 0.75)],
        "waited_seconds": [(5, 0.625)],
    }


def test_the_summary_is_of_the_best_validation_and_of_all_seconds():
    state = TrainingState().next_epoch(4.0)
    state.note_dice({"a": 0.75, "b": 0.25}, 0.5)
    state.seconds, state.waited_seconds = 10.0, 4.0
    state = state.next_epoch(2.0)
    state.note_dice({"a": 0.5, "b": 0.25}, 0.375)
    cpu = torch.device("cpu")
    dims = ParallelDims(mode="spatial", replicas=((cpu,) * 3,) * 2, num_replicas=2, num_shards=3)
    summary = run_summary(state, dims=dims, devices=["cpu"] * 6, precision="float32", final=None)
    assert summary["final"] is None
    assert [summary[key] for key in ("parallel", "replicas", "shards")] == ["spatial", 2, 3]
    assert (summary["best_dice"], summary["best_epoch"]) == (0.5, 1)
    assert summary["dice"] == {"a": 0.75, "b": 0.25}
    keys = ("seconds", "training_seconds", "validation_seconds", "waited_seconds")
    assert [summary[key] for key in keys] == [16.0, 10.0, 6.0, 4.0]
