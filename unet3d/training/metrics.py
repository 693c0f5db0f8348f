"""What a run writes of its numbers: a line for each epoch, scalars for TensorBoard, a summary."""

import io
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from unet3d import __version__
from unet3d.atomic import append
from unet3d.parallel import ParallelDims
from unet3d.training.final_result import FinalResult
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
        "waited_seconds": state.waited_seconds,
        "learning_rate": learning_rate,
    }
    if validation is not None:
        metrics |= {
            "dice": validation.dice,
            "mean_dice": validation.mean_dice,
            "validation_loss": validation.loss,
            "validation_seconds": validation.seconds,
        }
    return metrics


class ScalarFile:
    """Numbers of each epoch for TensorBoard.

    PyTorch's writer has a thread, which on a full disk ends in a traceback.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a file.

        Args:
            folder: Where; made if it is missing.

        Raises:
            OSError: It cannot be written.
        """
        folder.mkdir(exist_ok=True)
        # TensorBoard reads files with such names, in the order of their names.
        self._path = folder / f"events.out.tfevents.{int(time.time()):010}.{uuid.uuid4().hex}"
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of an epoch.

        Args:
            metrics: What :func:`epoch_metrics` returned.

        Raises:
            OSError: The file cannot be written.
        """
        keys = ("loss", "dice_loss", "cross_entropy", "learning_rate")
        values = {key: metrics[key] for key in keys}
        for name, dice in metrics.get("dice", {}).items():
            values[f"dice/{name}"] = dice
        values["mean_dice"] = metrics.get("mean_dice")  # a label may be called mean
        values["validation_loss"] = metrics.get("validation_loss")
        if metrics["seconds"]:
            values["waited_share"] = metrics["waited_seconds"] / metrics["seconds"]
        known = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if value is not None
        ]
        self._append(
            Event(wall_time=time.time(), step=metrics["epoch"], summary=Summary(value=known))
        )

    def _append(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        append(self._path, record.getvalue())


def run_summary(
    state: TrainingState,
    *,
    dims: ParallelDims,
    devices: Sequence[str],
    precision: str,
    final: FinalResult,
) -> dict[str, Any]:
    """Return what ``summary.json`` holds.

    ``best_dice``, ``best_epoch`` and ``dice`` are of the validation with the largest mean Dice,
    whose network is ``checkpoint-best.pt``; ``last_mean_dice`` and ``last_dice`` are of the final
    network, which is ``checkpoint-latest.pt``; where no case validates they are None or empty.
    ``seconds`` are those of the steps and of the validations together, without the preparation
    before them; ``waited_seconds`` are the part of the steps' that the devices waited for data.
    ``final`` is what the final network makes of the validation cases, segmented as
    ``unet3d predict`` does; its ``seconds`` are not in the others.

    Args:
        state: At the end of the training.
        dims: Mode, replicas and shards.
        devices: Names of the devices of all ranks.
        precision: What the network computed in.
        final: The validation at its end.
    """
    return {
        "best_dice": state.best_dice if state.best_epoch else None,
        "best_epoch": state.best_epoch or None,
        "dice": state.best_labels,
        "last_mean_dice": state.last_mean_dice,
        "last_dice": state.last_dice,
        "final": final.to_dict(),
        "epochs": state.epoch,
        "seconds": state.total_seconds + state.validation_seconds,
        "training_seconds": state.total_seconds,
        "validation_seconds": state.validation_seconds,
        "waited_seconds": state.total_waited_seconds,
        "parallel": dims.mode,
        "replicas": dims.num_replicas,
        "shards": dims.num_shards,
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
