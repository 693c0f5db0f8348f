from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from unet3d.training.metrics import epoch_metrics, write_scalars
from unet3d.training.state import TrainingState
from unet3d.training.validation import Validation

STATE = TrainingState(
    epoch=4,
    loss={"total": 12.0, "dice": 4.0, "cross_entropy": 8.0},
    num_samples=8,
    seconds=2.5,
)


def test_an_epoch_without_validation_has_no_dice() -> None:
    assert epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=None) == {
        "epoch": 5,
        "step": 15,
        "loss": 1.5,
        "dice_loss": 0.5,
        "cross_entropy": 1.0,
        "seconds": 2.5,
        "learning_rate": 0.25,
    }


def test_tensorboard_gets_what_is_known(tmp_path: Path) -> None:
    validation = Validation(dice={"mean": 0.25, "absent": None}, mean_dice=0.5)
    metrics = epoch_metrics(STATE, num_steps=3, learning_rate=0.25, validation=validation)
    assert metrics["dice"] == {"mean": 0.25, "absent": None} and metrics["mean_dice"] == 0.5
    with SummaryWriter(str(tmp_path)) as scalars:
        write_scalars(scalars, metrics)
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
    }
