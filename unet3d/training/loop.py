"""The training loop: steps, validation, checkpoints. It knows no device and no mode.

A run can be stopped at any moment and continued: batches are a pure function of (seed, epoch,
step), the learning rate of the step, and everything else is in the checkpoint.
"""

import logging
import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from unet3d import __version__
from unet3d.distributed.group import Group
from unet3d.distributed.interruption import Interrupted, InterruptionRequest, deferred_interruption
from unet3d.errors import CheckpointError, ConfigError
from unet3d.inference.evaluation import dice_per_class
from unet3d.inference.sliding_window import predict_logits
from unet3d.memory.meter import MemoryMeter, memory_record, merged_records
from unet3d.model import LossTerms, dice_cross_entropy
from unet3d.model.optimizer import (
    Optimization,
)
from unet3d.parallel import Executor
from unet3d.parallel.precision import (
    image_dtype,
)
from unet3d.planning.experiment import Experiment
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.curves import (
    write_progress_picture,
)
from unet3d.reports.memory import (
    write_memory_picture,
)
from unet3d.reports.progress import ProgressLine
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.volumes.loader import PatchLoader
from unet3d.volumes.patches import Batch

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _State:
    """Where a training stands; what a checkpoint holds beside network and optimizer."""

    epoch: int = 0
    """Epochs that are complete, validation included."""
    step: int = 0
    """Steps done in the epoch after them."""
    loss: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "dice": 0.0, "cross_entropy": 0.0}
    )
    """Sums over those steps, each step weighted by its share of the samples."""
    num_samples: int = 0
    seconds: float = 0.0
    """Spent in those steps."""
    total_seconds: float = 0.0
    best_dice: float = -1.0
    last_dice: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a finished training has to show."""

    folder: RunFolder
    """The run."""
    best_dice: float
    """Largest mean Dice of all validations."""
    memory: dict[str, Any] | None
    """What ``memory.json`` holds; None where nothing was left to train."""


class TrainingLoop:
    """One training, or one rank's share of it."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        executor: Executor,
        folder: RunFolder,
        precision: str,
        num_workers: int,
        prediction: MemoryEstimate | None,
        group: Group,
    ) -> None:
        """Make ready for the first step.

        Args:
            experiment: Cases, preparation and patch size.
            executor: The placed network.
            folder: Where the run's files go.
            precision: For the scaler of float16, and the summary.
            num_workers: Processes that cut patches; 0: this one.
            prediction: Of its memory, to stand beside what is measured; None: there is none.
            group: The ranks that train together; the first writes and shows.
        """
        self.group = group
        self.experiment = experiment
        self.config = experiment.config
        self.executor = executor
        self.folder = folder
        self.precision = precision
        self.prediction = prediction
        self.state = _State()
        self.optimization = Optimization(
            executor.module, self.config.training, precision, keep_gradients=group.size > 1
        )
        self.loader = PatchLoader(
            cases=experiment.training,
            settings=self.config.patches,
            size=experiment.patch_size,
            stride=experiment.topology.total_stride,
            batch_size=self.config.training.batch_size,
            seed=self.config.training.seed,
            num_workers=num_workers,
            pin_memory=executor.input_device.type == "cuda",
            rank=group.ranks.rank,
            num_ranks=group.size,
        )
        self.num_steps = self.config.training.epochs * self.loader.num_steps
        own_devices = [_device_name(slot.device) for slot in executor.slots]
        self.devices = [name for names in group.exchange(own_devices) for name in names]
        self.memory: dict[str, Any] | None = None
        self._saved_at = time.monotonic()

    def run(self, console: Console, quiet: bool) -> TrainingResult:
        """Train to the last epoch.

        Args:
            console: For the live line.
            quiet: No progress at all.

        Raises:
            Interrupted: Ctrl-C or SIGTERM, after a checkpoint was saved.
            ConfigError: The loss is no number any more.
            RankError: Another rank died or hangs.
        """
        epochs = self.config.training.epochs
        is_first = self.group.is_first
        line = ProgressLine(console, epochs, self.loader.num_steps, quiet or not is_first)
        with (
            deferred_interruption(is_rank=self.group.size > 1) as interruption,
            SummaryWriter(str(self.folder.tensorboard)) if is_first else nullcontext() as scalars,
            line.shown(),
        ):
            while self.state.epoch < epochs:
                if self.memory is None and self.state.step < self.loader.num_steps:
                    with self._measured_memory():
                        self._train_epoch(line, interruption)
                else:
                    self._train_epoch(line, interruption)
                metrics = self._finish_epoch(interruption)
                if scalars is not None:
                    self.folder.append_metrics(metrics)
                    _write_scalars(scalars, metrics)
                if "mean_dice" in metrics:
                    improved = self._note_dice(metrics)
                    if is_first:
                        lines = self.folder.read_metrics()
                        write_progress_picture(lines, self.folder.progress_picture)
                    self.save(improved)
                left = epochs - self.state.epoch
                line.epoch_done(metrics, left * metrics["seconds"])
        if is_first:
            self.folder.write_json(self.folder.summary, self._summary())
        return TrainingResult(
            folder=self.folder, best_dice=self.state.best_dice, memory=self.memory
        )

    def _train_epoch(self, line: ProgressLine, interruption: InterruptionRequest) -> None:
        state = self.state
        self.executor.module.train()
        began = time.monotonic()
        sums: list[tuple[int, LossTerms]] = []
        for batch in self.loader.epoch(state.epoch, first_step=state.step):
            terms = self._step(batch)
            sums.append((batch.num_samples, terms))
            state.step += 1
            is_due = time.monotonic() - self._saved_at >= self.config.training.save_every_seconds
            stop, save = self.group.all_reduce_flags(interruption.signal_number or 0, is_due)
            if stop or save:
                state.seconds += time.monotonic() - began
                began = time.monotonic()
                self._add(sums)
                self.save(improved=False)
            if stop:
                self._stop(stop)
            # Last, for reading a loss waits for the device, on which a rank that hangs may be
            # missed; the others' wishes, just read, name it.
            if line.wants_loss():
                line.step_done(state.epoch, state.step, terms.total.item())
        self._add(sums)
        state.seconds += time.monotonic() - began

    def _step(self, batch: Batch) -> LossTerms:
        done = self.state.epoch * self.loader.num_steps + self.state.step
        executor = self.executor
        self.group.note(done, f"epoch {self.state.epoch + 1}, step {self.state.step + 1}")
        image = batch.image.to(
            executor.input_device, image_dtype(executor.module), non_blocking=True
        )
        target = batch.target.to(executor.output_device, non_blocking=True)
        scale = self.optimization.scale * batch.weight
        terms = executor.forward_backward(image, target, dice_cross_entropy, scale)
        self.optimization.step(self.optimization.learning_rate(done, self.num_steps))
        return terms

    def _add(self, terms: list[tuple[int, LossTerms]]) -> None:
        """Add up losses and empty the list; waits for the devices, so it is not done every step.

        Args:
            terms: Of this rank's samples; the sums are of all ranks'.

        Raises:
            ConfigError: Training has diverged; the last checkpoint is from before.
        """
        counted = [(num_samples, loss) for num_samples, loss in terms if num_samples]
        num_samples, *sums = self.group.sum(
            [sum(number for number, _ in counted)]
            + [
                sum(n * getattr(loss, name).item() for n, loss in counted)
                for name in self.state.loss
            ]
        )
        self.state.num_samples += int(num_samples)
        for name, value in zip(self.state.loss, sums, strict=True):
            self.state.loss[name] += value
        terms.clear()
        if not math.isfinite(self.state.loss["total"]):
            raise ConfigError(
                f"the loss is not finite in epoch {self.state.epoch + 1}; use a smaller "
                f"training.learning_rate than {self.config.training.learning_rate}"
            )

    def _finish_epoch(self, interruption: InterruptionRequest) -> dict[str, Any]:
        """Validate if it is time to, and return the epoch's line of metrics."""
        state, settings = self.state, self.config.training
        number = state.epoch + 1
        scores: dict[str, Any] = {}
        if number % settings.validate_every == 0 or number == settings.epochs:
            scores = self._validate(interruption)
        step = number * self.loader.num_steps
        mean = {name: value / max(state.num_samples, 1) for name, value in state.loss.items()}
        metrics = {
            "epoch": number,
            "step": step,
            "loss": mean["total"],
            "dice_loss": mean["dice"],
            "cross_entropy": mean["cross_entropy"],
            "seconds": state.seconds,
            "learning_rate": self.optimization.learning_rate(step - 1, self.num_steps),
            **scores,
        }
        self.state = _State(
            epoch=number,
            total_seconds=state.total_seconds + state.seconds,
            best_dice=state.best_dice,
            last_dice=scores.get("dice", state.last_dice),
        )
        return metrics

    def _validate(self, interruption: InterruptionRequest) -> dict[str, Any]:
        """Return the Dice of each label over the validation cases, each case counted once."""
        self.executor.module.eval()
        names = self.experiment.preprocessing.label_names
        cases, epoch = self.experiment.validation, self.state.epoch + 1
        mine = range(self.group.ranks.rank, len(cases), self.group.size)
        own: dict[int, list[float | None]] = {}
        for index in mine:
            if interruption.signal_number is not None:
                break
            case = cases[index]
            self.group.note(
                epoch * self.loader.num_steps, f"validation of epoch {epoch}, case {case.name}"
            )
            image = torch.from_numpy(case.image().copy()).to(image_dtype(self.executor.module))
            logits = predict_logits(
                self.executor,
                image,
                self.window,
                self.config.inference.overlap,
                self.config.inference.batch_size,
            )
            label = torch.from_numpy(case.label().copy()).to(logits.device)
            own[index] = dice_per_class(logits.argmax(0), label, len(names))
        answers = self.group.exchange([interruption.signal_number or 0, list(own.items())])
        stop = max(number for number, _ in answers)
        if stop:
            self.save(improved=False)
            self._stop(stop)
        by_case = {index: values for _, items in answers for index, values in items}
        scores = [by_case[index] for index in range(len(cases))]
        means = {name: _mean([of[index] for of in scores]) for index, name in enumerate(names)}
        del means[names[0]]
        return {"dice": means, "mean_dice": _mean(list(means.values()))}

    def _stop(self, signal_number: int) -> NoReturn:
        """End here, all ranks together: one that ended earlier would have the others killed."""
        self.group.exchange(None)
        raise Interrupted(signal_number)

    @property
    def window(self) -> Any:
        """What validation cuts volumes into, as prediction will."""
        window = self.config.inference.window
        return (self.experiment.patch_size or "whole") if window == "auto" else window

    def _note_dice(self, metrics: dict[str, Any]) -> bool:
        """Return whether this is the best network so far."""
        dice = metrics["mean_dice"]
        if dice is None or dice <= self.state.best_dice:
            return False
        self.state.best_dice = dice
        return True

    def save(self, improved: bool) -> None:
        """Write the latest checkpoint, and first the best one if this is it."""
        if not self.group.is_first:
            return
        checkpoint = Checkpoint(
            topology=self.experiment.topology,
            preprocessing=self.experiment.preprocessing,
            patch_size=self.experiment.patch_size,
            config=self.config,
            model=self.executor.module.state_dict(),
            training={
                "state": asdict(self.state),
                "random": torch.get_rng_state(),
                **self.optimization.state_dict(),
            },
        )
        if improved:
            save_checkpoint(checkpoint, self.folder.best)
        save_checkpoint(checkpoint, self.folder.latest)
        self._saved_at = time.monotonic()  # writing takes time, too

    def load(self) -> None:
        """Take up the latest checkpoint.

        Raises:
            CheckpointError: It is of another network or optimizer.
        """
        path = self.folder.latest
        checkpoint = self.group.object_from_first(lambda: load_checkpoint(path))
        if checkpoint.topology != self.experiment.topology:
            raise CheckpointError(
                f"{path} holds another network than the settings now ask for; "
                "resume with the settings of config.yaml, or train anew in another --output"
            )
        self.executor.module.load_state_dict(checkpoint.model)
        try:
            self.optimization.load_state_dict(checkpoint.training)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is of another optimizer: {error}") from error
        self.state = _State(**checkpoint.training["state"])
        torch.set_rng_state(checkpoint.training["random"])
        if self.group.is_first:
            self.folder.keep_metrics(self.state.epoch)
        logger.info("resumed after epoch %d, step %d", self.state.epoch, self.state.step)

    @contextmanager
    def _measured_memory(self) -> Iterator[None]:
        """Measure the epoch in the context and write down what each slot held."""
        meter = MemoryMeter(self.executor.slots, self.executor.module)
        unobserved = self.executor.observer
        meter.start()
        self.executor.observer = meter
        optimizer = self.optimization.optimizer
        hooks = (
            optimizer.register_step_pre_hook(lambda *_: meter.note_gradients()),
            optimizer.register_step_post_hook(lambda *_: meter.end_step()),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.executor.observer = unobserved
        measured = meter.read(optimizer)
        own = memory_record(
            self.config.parallel.mode,
            self.executor.slots,
            measured,
            None if self.prediction is None else self.prediction.memory,
            meter.timeline(measured),
        )
        self.memory = merged_records(self.group.exchange(own))
        if self.group.is_first:
            self.folder.write_json(self.folder.memory, self.memory)
            write_memory_picture(self.memory, self.folder.memory_picture)

    def _summary(self) -> dict[str, Any]:
        return {
            "best_dice": self.state.best_dice,
            "dice": self.state.last_dice,
            "epochs": self.state.epoch,
            "seconds": self.state.total_seconds,
            "parallel": self.config.parallel.mode,
            "replicas": self.group.size,
            "devices": self.devices,
            "precision": self.precision,
            "versions": {
                "unet3d": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
            },
        }


def _write_scalars(scalars: SummaryWriter, metrics: dict[str, Any]) -> None:
    values = {key: metrics[key] for key in ("loss", "dice_loss", "cross_entropy", "learning_rate")}
    for name, dice in metrics.get("dice", {}).items():
        values[f"dice/{name}"] = dice
    values["dice/mean"] = metrics.get("mean_dice")
    for tag, value in values.items():
        if value is not None:
            scalars.add_scalar(tag, value, metrics["epoch"])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({name})"
