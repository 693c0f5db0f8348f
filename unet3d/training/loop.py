"""The training loop: steps, validation, checkpoints. The executor hides devices and modes.

A run can be stopped at any moment and continued: batches depend only on (seed, epoch, step), the
learning rate depends only on the step, and everything else is in the checkpoint.
"""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from rich.console import Console

from unet3d.distributed import is_started
from unet3d.errors import ConfigError
from unet3d.interruption import Interrupted, InterruptionRequest, deferred_interruption
from unet3d.memory.meter import measured_steps
from unet3d.model import LossTerms, SegmentationLoss
from unet3d.model.optimizer import Optimization
from unet3d.parallel.precision import image_dtype
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import Batch, PatchSampler
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.progress import ProgressLine
from unet3d.runs.run_folder import RunFolder
from unet3d.training.cases import RunContext, Stopped, Watcher
from unet3d.training.cores import DataClock, waiting_note
from unet3d.training.final_validation import FinalResult, FinalValidation
from unet3d.training.recording import RunRecorder, epoch_metrics
from unet3d.training.saving import CheckpointSaver, TrainingState, divergence_error
from unet3d.training.validation import Validation, Validator


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A finished training run; its results are in its folder."""

    folder: RunFolder
    """Folder of the run."""
    memory: dict[str, Any] | None
    """What ``memory.json`` holds; None where nothing was left to train."""


class TrainingLoop:
    """One training run, or one rank's share of it."""

    def __init__(
        self, context: RunContext, num_workers: int, prediction: MemoryEstimate | None
    ) -> None:
        """Prepare the first step; ``num_workers`` processes cut patches, 0: this process does.

        Predicted memory is recorded beside the measured memory.
        """
        self.context = context
        self.group, self.executor = context.group, context.executor
        self.experiment = experiment = context.experiment
        self.config = experiment.config
        self._prediction = prediction
        dims = context.dims
        is_on_cpus = all(device.type == "cpu" for device in dims.all_devices)
        self._cpu_precision = context.precision if is_on_cpus else ""
        self.state = TrainingState(cpu_precision=self._cpu_precision)
        self.optimization = Optimization(
            context.executor.module, self.config.training, context.precision
        )
        regions = experiment.preprocessing.region_classes
        self._loss = SegmentationLoss.of(self.config.training, regions)
        # All ranks of a replica return the same loss, so only the first one adds it.
        self._adds_loss = dims.shard_of(dims.rank) == 0
        self.loader = _make_loader(context, num_workers)
        self.validator = Validator(context)
        self.final_validation = FinalValidation(context)
        self.saver = CheckpointSaver(context, self.optimization)
        self.recorder = RunRecorder(context)
        self._clock = DataClock(context.executor.input_device)

    def load(self) -> None:
        """Continue from the latest checkpoint; no file is changed before the first step is taken.

        Raises CheckpointError if its optimizer is another one, or its weights are not finite.
        """
        state = self.saver.load(self.loader.num_steps)
        self.state = replace(state, cpu_precision=self._cpu_precision)
        self.recorder.resumed_epoch = self.state.epoch

    def run(self, console: Console, quiet: bool) -> TrainingResult:
        """Train to the last epoch, with a live line on the console.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
            ConfigError: Training has diverged; saved checkpoints are from before.
            RankError: Another rank died or hangs.
        """
        settings = self.config.training
        line = ProgressLine(
            console,
            num_epochs=settings.epochs,
            num_steps=self.loader.num_steps,
            validate_every=settings.validate_every if self.experiment.validation else 0,
            quiet=quiet or not self.group.is_first,
        )
        with (
            closing(self.loader),
            deferred_interruption(self.group.size > 1 or is_started()) as interruption,
            line.shown(),
        ):
            if self.recorder.resumed_epoch is None:
                self.recorder.begin()
            is_first = True
            while self.state.epoch < settings.epochs:
                self._train_epoch(line, interruption)
                is_due, is_kept = self._is_due(), self._is_due() or self.state.epoch == 0
                if is_kept:
                    self._check_weights()
                validation = self._validate(line, interruption) if is_due else None
                metrics = self._end_epoch(validation)
                self.recorder.write_epoch(metrics)
                if is_kept:
                    self._keep(validation)
                    self.recorder.draw_progress()
                note = self._waiting_note(metrics)
                # No note for the first epoch, in which the loading processes start.
                line.epoch_done(metrics, None if is_first else note)
                is_first = False
            self.recorder.begin()
            self.recorder.update_reserved()
            final = self._validate_finally(line, interruption)
        self.recorder.write_summary(final)
        return TrainingResult(folder=self.context.folder, memory=self.recorder.memory)

    def _train_epoch(self, line: ProgressLine, interruption: InterruptionRequest) -> None:
        """Take the remaining steps of an epoch; the first time, memory is measured."""
        optimizer = self.optimization.optimizer
        if self.recorder.memory is not None or self.state.step >= self.loader.num_steps:
            self._take_steps(line, interruption)
            return
        with measured_steps(self.executor, optimizer) as meter:
            self._take_steps(line, interruption)
        self.recorder.write_memory(meter, optimizer, self._prediction)

    def _take_steps(self, line: ProgressLine, interruption: InterruptionRequest) -> None:
        state = self.state
        self.executor.module.train()
        began = time.monotonic()
        losses: list[tuple[int, LossTerms]] = []
        for batch in self._clock.timed(self.loader.epoch(state.epoch, first_step=state.step)):
            terms = self._step(batch)
            num_samples = batch.num_samples if self._adds_loss else 0
            losses.append((num_samples, terms))
            # The loss of the step before is shown: reading the last one would leave a GPU idle.
            _, shown = losses[-2:][0]
            state.step += 1
            stop, save = self.group.all_reduce_flags(
                interruption.signal_number or 0, self.saver.is_due()
            )
            if stop or save:
                state.seconds += time.monotonic() - began
                began = time.monotonic()
                self._add_steps(losses)
                self._check_weights()
                self.recorder.begin()
                self.saver.save(state)
            if stop:
                self._stop(stop)
            # This comes last because reading a loss waits for the device, which may itself wait
            # for a rank that hangs; the flags, just read, have named that rank.
            if line.wants_loss():
                line.step_done(state.epoch, state.step, shown.total.item())
        self._add_steps(losses)
        state.seconds += time.monotonic() - began
        self.recorder.begin()

    def _step(self, batch: Batch) -> LossTerms:
        state, executor = self.state, self.executor
        done = state.epoch * self.loader.num_steps + state.step
        self.group.note(done, f"epoch {state.epoch + 1}, step {state.step + 1}")
        dtype = image_dtype(executor.module)
        image = batch.image.to(executor.input_device, dtype, non_blocking=True)
        # Wait for copies from a GPU, or a CPU would read them before they arrive.
        to_gpu = executor.output_device.type == "cuda"
        target = batch.target.to(executor.output_device, non_blocking=to_gpu)
        terms: LossTerms = executor.forward_backward(
            image,
            target,
            self._loss,
            self.optimization.scale,
            weight=batch.weight,
            planes=batch.planes,
        )
        self.optimization.step(self._learning_rate(done))
        return terms

    def _learning_rate(self, step: int) -> float:
        num_steps = self.config.training.epochs * self.loader.num_steps
        return self.optimization.learning_rate(step, num_steps)

    def _add_steps(self, losses: list[tuple[int, LossTerms]]) -> None:
        """Add losses to the epoch's sums, and clear their list; this waits for the devices."""
        self.state.add_steps(losses, self._clock.read(), self.group)
        if not self.state.is_finite:
            raise self._diverged("the loss is not finite")
        losses.clear()

    def _check_weights(self) -> None:
        """Check that weights are finite; losses would show it only in the next step."""
        if any(self.group.exchange(not self.saver.is_finite())):
            raise self._diverged("the weights are not finite")

    def _diverged(self, what: str) -> ConfigError:
        where = f"{what} in epoch {self.state.epoch + 1}"
        return divergence_error(where, self.config.training.learning_rate)

    def _is_due(self) -> bool:
        """Return whether this epoch ends with a validation."""
        number, settings = self.state.epoch + 1, self.config.training
        return number % settings.validate_every == 0 or number == settings.epochs

    def _validate(self, line: ProgressLine, interruption: InterruptionRequest) -> Validation | None:
        """Validate the network; None: there are no validation cases."""
        if not self.experiment.validation:
            return None
        number = self.state.epoch + 1
        watcher = Watcher(
            num_steps=number * self.loader.num_steps,
            interruption=interruption,
            progress=partial(line.validating, self.state.epoch),
        )
        try:
            return self.validator.validate(number, watcher)
        except Stopped as stopped:
            self.saver.save(self.state)
            self._stop(stopped.signal_number)

    def _validate_finally(
        self, line: ProgressLine, interruption: InterruptionRequest
    ) -> FinalResult | None:
        """Segment the validation cases with the final network, and save the results."""
        watcher = Watcher(
            num_steps=self.state.epoch * self.loader.num_steps,
            interruption=interruption,
            progress=line.predicting,
        )
        try:
            final = self.final_validation.run(self.saver.checkpoint(self.state), watcher)
        except Stopped as stopped:
            self._stop(stopped.signal_number)
        rules = () if final is None else tuple(choice.rule for choice in final.choices)
        if rules != self.saver.postprocessing:
            self.saver.save(self.state, postprocessing=rules)
        return final

    def _end_epoch(self, validation: Validation | None) -> dict[str, Any]:
        """End this epoch, and return its line of ``metrics.jsonl``."""
        num_steps = self.loader.num_steps
        metrics = epoch_metrics(
            self.state,
            num_steps=num_steps,
            learning_rate=self._learning_rate((self.state.epoch + 1) * num_steps - 1),
            validation=validation,
        )
        self.state = self.state.next_epoch()
        return metrics

    def _waiting_note(self, metrics: dict[str, Any]) -> str | None:
        is_augmented = self.config.patches.augmentation != "none"
        waited = self.loader.take_waited()
        return waiting_note(metrics, waited, self.executor.input_device, is_augmented)

    def _keep(self, validation: Validation | None) -> None:
        """Save the network at the end of an epoch, also as the best one if its Dice has risen."""
        improved = validation is not None and self.state.note_dice(validation.mean_dice)
        self.saver.save(self.state, improved)

    def _stop(self, signal_number: int) -> NoReturn:
        """End all ranks together: if one ended earlier, the launcher would kill the others."""
        self.group.exchange(None)
        raise Interrupted(signal_number, can_resume=True)


def _make_loader(context: RunContext, num_workers: int) -> PatchLoader:
    """Return the loader of a rank; ``num_workers`` processes cut patches, 0: this process does."""
    experiment, dims, executor = context.experiment, context.dims, context.executor
    settings, device = experiment.config, executor.input_device
    spatial = executor if isinstance(executor, SpatialExecutor) else None
    shard = dims.shard_of(dims.rank)
    sampler = PatchSampler(
        cases=experiment.training,
        settings=settings.patches,
        size=experiment.patch_size,
        stride=experiment.topology.total_stride,
        batch_size=settings.training.num_patches,
        seed=settings.training.seed,
    )
    return PatchLoader(
        sampler,
        num_steps=settings.training.steps_per_epoch,
        num_workers=num_workers,
        device=device,
        augments_on_device=device.type == "cuda",
        rank=dims.replica_of(dims.rank),
        num_ranks=dims.world_size // dims.num_shards,  # all threads of a process count as one
        slab=None if spatial is None else partial(spatial.rule.slab, shard),
        gather=None if spatial is None else spatial.gather,
    )
