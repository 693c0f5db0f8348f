"""What a run writes of its numbers: a line for each epoch, scalars for TensorBoard, a summary."""

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from unet3d import __version__
from unet3d.training.state import TrainingState
from unet3d.training.validation import Validation


def epoch_metrics(
    state: TrainingState, *, num_steps: int, learning_rate: float, validation: Validation | None
) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl``.

    Args:
        state: At the end of the epoch's steps.
        num_steps: Steps in an epoch.
        learning_rate: Of the epoch's last step.
        validation: The one at the epoch's end; None where there was none.
    """
    mean = state.mean_loss
    metrics: dict[str, Any] = {
        "epoch": state.epoch + 1,
        "step": (state.epoch + 1) * num_steps,
        "loss": mean["total"],
        "dice_loss": mean["dice"],
        "cross_entropy": mean["cross_entropy"],
        "seconds": state.seconds,
        "learning_rate": learning_rate,
    }
    if validation is not None:
        metrics |= {"dice": validation.dice, "mean_dice": validation.mean_dice}
    return metrics


def write_scalars(scalars: SummaryWriter, metrics: dict[str, Any]) -> None:
    """Write the numbers of an epoch for TensorBoard.

    Args:
        scalars: The run's.
        metrics: What :func:`epoch_metrics` returned.
    """
    values = {key: metrics[key] for key in ("loss", "dice_loss", "cross_entropy", "learning_rate")}
    for name, dice in metrics.get("dice", {}).items():
        values[f"dice/{name}"] = dice
    values["mean_dice"] = metrics.get("mean_dice")  # a label may be called mean
    for tag, value in values.items():
        if value is not None:
            scalars.add_scalar(tag, value, metrics["epoch"])


def run_summary(
    state: TrainingState, *, parallel: str, replicas: int, devices: Sequence[str], precision: str
) -> dict[str, Any]:
    """Return what ``summary.json`` holds.

    Args:
        state: At the end of the training.
        parallel: The mode.
        replicas: How many ranks trained.
        devices: Names of the devices of all ranks.
        precision: What the network computed in.
    """
    return {
        "best_dice": state.best_dice,
        "dice": state.last_dice,
        "epochs": state.epoch,
        "seconds": state.total_seconds,
        "parallel": parallel,
        "replicas": replicas,
        "devices": list(devices),
        "precision": precision,
        "versions": {
            "unet3d": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def device_name(device: torch.device) -> str:
    """Return a device with the name of its hardware.

    Args:
        device: A CPU or CUDA device of this machine.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({name})"
