"""The numbers of a run: a line for each epoch, the same for TensorBoard, and a summary."""

import io
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unet3d import __version__
from unet3d.atomic import append
from unet3d.parallel import ParallelDims
from unet3d.training.final_validation import FinalResult
from unet3d.training.state import TrainingState
from unet3d.training.validation import Validation

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    HAS_TENSORBOARD = True
except ImportError:  # an extra
    HAS_TENSORBOARD = False

SCALARS = ("loss", "dice_loss", "cross_entropy", "learning_rate", "waited_seconds")
"""What TensorBoard gets of each epoch."""


def epoch_metrics(
    state: TrainingState, *, num_steps: int, learning_rate: float, validation: Validation | None
) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl``, at the end of an epoch of so many steps.

    The learning rate is that of its last step; without a validation there is no Dice.
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
        """Begin a file in a folder, which is made if it is missing."""
        folder.mkdir(exist_ok=True)
        # TensorBoard reads files with such names, in the order of their names.
        self._path = folder / f"events.out.tfevents.{int(time.time()):010}.{uuid.uuid4().hex}"
        self._append(file_version="brain.Event:2")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of an epoch, which :func:`epoch_metrics` returned."""
        keys = (*SCALARS, "mean_dice", "validation_loss")
        values = {f"dice/{name}": dice for name, dice in metrics.get("dice", {}).items()}
        values |= {key: metrics.get(key) for key in keys}  # a label may be called mean
        known = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
            if value is not None
        ]
        self._append(step=metrics["epoch"], summary=Summary(value=known))

    def _append(self, **fields: Any) -> None:
        record = io.BytesIO()
        event = Event(wall_time=time.time(), **fields)
        RecordWriter(record).write(event.SerializeToString())
        append(self._path, record.getvalue())


def run_summary(
    state: TrainingState,
    *,
    dims: ParallelDims,
    devices: Sequence[str],
    precision: str,
    final: FinalResult | None,
) -> dict[str, Any]:
    """Return what ``summary.json`` holds; ``devices`` are the names of those of all ranks.

    ``best_dice``, ``best_epoch`` and ``dice`` are of the validation with the largest mean Dice,
    whose network is ``checkpoint-best.pt``; where no case validates they are None or empty.
    ``final`` is what the final network, ``checkpoint-latest.pt``, makes of the validation cases,
    segmented as ``unet3d predict`` does. ``seconds`` are those of the steps and of the validations
    together, without the preparation before and ``final`` after them; ``waited_seconds`` are the
    part of the steps' that the devices waited for data.
    """
    return {
        "best_dice": state.best_dice if state.best_epoch else None,
        "best_epoch": state.best_epoch or None,
        "dice": state.best_labels,
        "final": None if final is None else final.to_dict(),
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
    """Return a device of this machine with the name of its hardware."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({name})"
