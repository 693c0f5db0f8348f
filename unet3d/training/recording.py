"""Records, metrics and pictures in a run's folder, which the first rank writes."""

import io
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unet3d import __version__
from unet3d.atomic import append
from unet3d.errors import counted, some
from unet3d.memory.meter import MemoryMeter
from unet3d.memory.record import memory_record, merged_records, reserved_bytes
from unet3d.planning.experiment import Experiment
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.curves import progress_figure
from unet3d.reports.figures import write_figure
from unet3d.reports.memory import memory_figure
from unet3d.reports.tables import is_one_cpu
from unet3d.runs.run_folder import writing
from unet3d.training.cases import RunContext
from unet3d.training.final_validation import FinalResult
from unet3d.training.request import dataset_name
from unet3d.training.saving import TrainingState
from unet3d.training.validation import Validation

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    HAS_TENSORBOARD = True
except ImportError:  # an optional dependency
    HAS_TENSORBOARD = False

SCALARS = ("loss", "dice_loss", "cross_entropy", "learning_rate", "waited_seconds")
"""Numbers of each epoch for TensorBoard."""

MAX_NAMES = 2
"""Most cases that a line names."""


class RunRecorder:
    """Writes the files of one run; in all ranks but the first it writes nothing."""

    def __init__(self, context: RunContext) -> None:
        """Collect the names of all ranks' devices, without writing; a collective call."""
        self.resumed_epoch: int | None = None
        """Complete epochs of the run that is continued; None: it is a new one."""
        self.memory: dict[str, Any] | None = None
        """What ``memory.json`` holds; None: no step was measured yet."""
        self._context = context
        self._folder, self._group = context.folder, context.group
        own_devices = [device_name(slot.device) for slot in context.executor.slots]
        self._devices = [name for names in self._group.exchange(own_devices) for name in names]
        self._scalars: ScalarFile | None = None
        self._has_begun = False

    def begin(self) -> None:
        """Make the folder ready, once.

        A resumed run is not changed until there is something to save: changed settings that fail in
        the first step must not remain in its ``config.yaml``.
        """
        if self._has_begun or not self._group.is_first:
            return
        self._has_begun = True
        if self.resumed_epoch is not None:
            self._folder.reopen(self.resumed_epoch)
        self._folder.write_data(data_record(self._context.experiment))
        self._folder.write_config(self._context.experiment.config)
        if HAS_TENSORBOARD:
            with writing(self._folder.tensorboard):
                self._scalars = ScalarFile(self._folder.tensorboard)

    def write_memory(
        self,
        meter: MemoryMeter,
        optimizer: torch.optim.Optimizer,
        prediction: MemoryEstimate | None,
    ) -> None:
        """Write the memory of each slot, measured and predicted; all ranks call it after a step."""
        measured = meter.read(optimizer)
        own = memory_record(
            self._context.experiment.config.parallel.mode,
            self._context.executor.slots,
            measured,
            None if prediction is None else prediction.memory,
            meter.timeline(measured),
        )
        self.memory = merged_records(self._group.exchange(own))
        if self._group.is_first:
            self._folder.write_json(self._folder.memory, self.memory)
            self._draw_memory(self.memory)

    def _draw_memory(self, record: dict[str, Any]) -> None:
        with writing(self._folder.memory_picture):
            write_figure(memory_figure(record), self._folder.memory_picture)

    def update_reserved(self) -> None:
        """Record the reserved memory of allocators, or of a process on a CPU; a collective call.

        Memory is measured in steps that are launched. Steps of small volumes are captured later,
        and their graphs keep additional memory.
        """
        if self.memory is None:
            return
        own = [reserved_bytes(slot.device) for slot in self._context.executor.slots]
        reserved = [number for numbers in self._group.exchange(own) for number in numbers]
        for slot, number in zip(self.memory["slots"], reserved, strict=True):
            measured = slot["measured"]
            measured["reserved_bytes"] = max(number, measured["reserved_bytes"])
        if self._group.is_first:
            self._folder.write_json(self._folder.memory, self.memory)
            if is_one_cpu(self.memory["slots"]):  # whose picture shows this peak
                self._draw_memory(self.memory)

    def write_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Add the numbers of an epoch, a line of ``metrics.jsonl``."""
        if self._group.is_first:
            self._folder.append_metrics(metrics)
        if self._scalars is not None:
            with writing(self._folder.tensorboard):
                self._scalars.write(metrics)

    def draw_progress(self) -> None:
        """Draw the curves of all epochs so far, which takes about a second."""
        if not self._group.is_first:
            return
        path = self._folder.progress_picture
        with writing(path):
            write_figure(progress_figure(self._folder.read_metrics(), self._title()), path)

    def _title(self) -> str:
        config, path = self._context.experiment.config, self._folder.path.absolute()
        fold = "every case" if config.data.fold == "none" else f"fold {config.data.fold}"
        return f"{path.parent.name}/{path.name}: {fold} of {dataset_name(config)}"

    def write_summary(self, final: FinalResult | None) -> None:
        """Write the results of a finished run; ``metrics.jsonl`` has them by epoch.

        ``best_dice``, ``best_epoch`` and ``dice`` are of the validation with the largest mean Dice,
        whose network is ``checkpoint-best.pt``; without validation cases they are None or empty.
        ``final`` has the results of the final network on the validation cases, segmented as by
        ``unet3d predict``. ``seconds`` is the time of steps and validations, without preparation
        and ``final``; ``waited_seconds`` is the time in steps that devices waited for data.
        """
        if not self._group.is_first:
            return
        dims, lines = self._context.dims, self._folder.read_metrics()
        validated = [line for line in lines if line.get("mean_dice") is not None]
        best = max(validated, key=lambda line: float(line["mean_dice"]), default={})

        def total(*keys: str) -> float:
            return sum(float(line.get(key, 0)) for line in lines for key in keys)

        summary = {
            "best_dice": best.get("mean_dice"),
            "best_epoch": best.get("epoch"),
            "dice": best.get("dice", {}),
            "final": None if final is None else final.to_dict(),
            "epochs": self._context.experiment.config.training.epochs,
            "seconds": total("seconds", "validation_seconds"),
            "training_seconds": total("seconds"),
            "validation_seconds": total("validation_seconds"),
            "waited_seconds": total("waited_seconds"),
            "parallel": dims.mode,
            "replicas": dims.num_replicas,
            "shards": dims.num_shards,
            "devices": self._devices,
            "precision": self._context.precision,
            "versions": {
                "unet3d": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
            },
        }
        self._folder.write_json(self._folder.summary, summary)


def epoch_metrics(
    state: TrainingState, *, num_steps: int, learning_rate: float, validation: Validation | None
) -> dict[str, Any]:
    """Return the line of ``metrics.jsonl`` for an epoch of ``num_steps`` steps.

    ``learning_rate`` is the rate of its last step. Without a validation the line has no Dice.
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

    Not PyTorch's writer: its thread ends with a traceback if the disk is full.
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
        values |= {key: metrics.get(key) for key in keys}  # no prefix: dice/mean may be a label's
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


def device_name(device: torch.device) -> str:
    """Return a device of this machine with the name of its hardware."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({name})"


def data_record(experiment: Experiment) -> dict[str, Any]:
    """Return the content of ``data.json``, except the version."""
    config = experiment.config
    return {
        "dataset": None if config.data.dataset is None else str(config.data.dataset),
        "fingerprint": experiment.split.fingerprint,
        "fold": config.data.fold,
        "seed": config.training.seed,
        "preprocessing": experiment.preprocessing.to_dict(),
        **asdict(experiment.split),
    }


def data_lines(experiment: Experiment) -> list[str]:
    """Return a line that counts training and validation cases, and one on cases that are in both.

    A data set may contain the same case twice, under two names.
    """
    split, config = experiment.split, experiment.config
    num_validation = len(split.validation)
    validation = counted(num_validation, "validation case") if num_validation else "no validation"
    lines = [
        f"data: {dataset_name(config)}, {counted(len(split.training), 'training case')}, "
        f"{validation} (fold {config.data.fold})"
    ]
    if split.twins:
        names = some(sorted(split.twins), MAX_NAMES)
        lines.append(f"validation cases that are also training cases, under other names: {names}")
    return lines
