"""The training loop: steps, validation, checkpoints. It knows no device and no mode.

A run can be stopped at any moment and continued: batches are a pure function of (seed, epoch,
step), the learning rate of the step, and everything else is in the checkpoint.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from rich.console import Console

from unet3d.distributed import is_started
from unet3d.distributed.group import Group
from unet3d.errors import Unet3dError
from unet3d.interruption import Interrupted, InterruptionRequest, deferred_interruption
from unet3d.memory.meter import measured_steps
from unet3d.model import LossTerms, SegmentationLoss
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Executor, ParallelDims
from unet3d.parallel.precision import image_dtype
from unet3d.patches.patches import Batch
from unet3d.planning.experiment import Experiment
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.progress import ProgressLine
from unet3d.runs.run_folder import RunFolder
from unet3d.training.batches import loading_of, make_loader
from unet3d.training.divergence import StepLoss, divergence_error, image_fault, suspects
from unet3d.training.final_result import FinalResult
from unet3d.training.final_validation import FinalValidation
from unet3d.training.memory_report import report_memory, update_reserved
from unet3d.training.metrics import epoch_metrics
from unet3d.training.recording import RunRecorder
from unet3d.training.saving import CheckpointSaver
from unet3d.training.state import TrainingState
from unet3d.training.validation import Validation, Validator
from unet3d.training.waiting import DataClock


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a finished training has to show."""

    folder: RunFolder
    """The run."""
    state: TrainingState
    """Where the training stands at its end."""
    final_dice: float | None = None
    """Mean Dice of the validation cases as the final network predicts them; None where there are
    none, or nothing was left to do."""
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
        dims: ParallelDims,
        group: Group,
    ) -> None:
        """Prepare the first step.

        Args:
            experiment: Cases, preparation and patch size.
            executor: The placed network.
            folder: Where the run's files go.
            precision: Decides about the scaler of float16; shown in the summary.
            num_workers: Processes that cut patches; 0: this one.
            prediction: What its memory should be, to stand beside what is measured; None: there
                is none.
            dims: Which replica and which slab of its volumes are this rank's.
            group: The ranks that train together; the first writes and shows.
        """
        self.group = group
        self.experiment = experiment
        self.config = experiment.config
        self.executor = executor
        self.folder = folder
        self.prediction = prediction
        is_on_cpus = all(device.type == "cpu" for device in dims.all_devices)
        self._cpu_precision = precision if is_on_cpus else ""
        self.state = TrainingState(cpu_precision=self._cpu_precision)
        self.optimization = Optimization(executor.module, self.config.training, precision)
        regions = experiment.preprocessing.region_classes
        self._loss = SegmentationLoss.of(self.config.training, regions)
        # All shards of a replica return its loss.
        self._adds_loss = dims.shard_of(dims.rank) == 0
        self.loader = make_loader(experiment, executor, dims, num_workers)
        self.validator = Validator(experiment, executor, group, dims.num_shards)
        self.final_validation = FinalValidation(
            experiment=experiment,
            executor=executor,
            folder=folder,
            dims=dims,
            group=group,
        )
        self.saver = CheckpointSaver(
            experiment=experiment,
            module=executor.module,
            optimization=self.optimization,
            folder=folder,
            group=group,
        )
        self.recorder = RunRecorder(
            experiment=experiment,
            executor=executor,
            folder=folder,
            precision=precision,
            dims=dims,
            group=group,
        )
        self.memory: dict[str, Any] | None = None
        self._clock = DataClock(executor.input_device)
        num_ranks_here = group.ranks.local_world_size
        self._loading = loading_of(self.config, executor, num_workers, num_ranks_here)

    def load(self) -> None:
        """Continue from the latest checkpoint; no file is changed before the first step is taken.

        Raises:
            CheckpointError: It is of another network or optimizer.
        """
        state = self.saver.load(self.loader.num_steps)
        self.state = replace(state, cpu_precision=self._cpu_precision)
        self.recorder.resumed_epoch = self.state.epoch

    def run(self, console: Console, quiet: bool) -> TrainingResult:
        """Train to the last epoch.

        Args:
            console: For the live line.
            quiet: No progress at all.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
            ConfigError: Training has diverged; what was saved is from before.
            VolumeError: An image that it was trained on is the reason.
            RankError: Another rank died or hangs.
        """
        settings = self.config.training
        line = ProgressLine(
            console,
            num_epochs=settings.epochs,
            num_steps=self.loader.num_steps,
            validate_every=settings.validate_every if self.experiment.validation else 0,
            validation_seconds=self.state.last_validation_seconds,
            quiet=quiet or not self.group.is_first,
        )
        with (
            closing(self.loader),
            deferred_interruption(self.group.size > 1 or is_started()) as interruption,
            line.shown(),
        ):
            if self.recorder.resumed_epoch is None:
                self.recorder.begin()
            while self.state.epoch < settings.epochs:
                self._train_epoch(line, interruption)
                is_due = self._is_due()
                validation = self._validate(line, interruption) if is_due else None
                metrics = self._end_epoch(validation)
                self.recorder.write_epoch(metrics)
                if is_due:
                    self._keep(validation)
                self.recorder.draw_progress(is_due)
                waits = self._clock.take_start(), self.loader.take_waited()
                line.epoch_done(metrics, self._loading.note(metrics, *waits))
            self.recorder.begin()
            if self.memory is not None:
                update_reserved(self.memory, self.executor, self.folder, self.group)
            final = self._validate_finally(line, interruption)
        self.recorder.write_summary(self.state, final)
        return TrainingResult(
            folder=self.folder, state=self.state, final_dice=final.mean_dice, memory=self.memory
        )

    def _train_epoch(self, line: ProgressLine, interruption: InterruptionRequest) -> None:
        """Take the steps that are left of an epoch, the first time under measurement."""
        is_measured = self.memory is None and self.state.step < self.loader.num_steps
        with self._measured_memory() if is_measured else nullcontext():
            self._take_steps(line, interruption)

    def _take_steps(self, line: ProgressLine, interruption: InterruptionRequest) -> None:
        state = self.state
        self.executor.module.train()
        began = time.monotonic()
        losses: list[StepLoss] = []
        for batch in self._clock.timed(self.loader.epoch(state.epoch, first_step=state.step)):
            terms = self._step(batch)
            num_samples = batch.num_samples if self._adds_loss else 0
            losses.append(StepLoss(num_samples=num_samples, terms=terms, cases=batch.names))
            # Reading the loss of the last step would leave a GPU with nothing to do after it.
            shown = losses[-2:][0].terms
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
        # What a GPU has made would arrive on a CPU after it is read, if nobody waited.
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

    def _add_steps(self, losses: list[StepLoss]) -> None:
        """Add what was measured of steps to the state, and empty the list; waits for the devices.

        Raises:
            ConfigError: Training has diverged; the last checkpoint is from before.
            VolumeError: An image that it was trained on is the reason.
        """
        terms = [(loss.num_samples, loss.terms) for loss in losses]
        self.state.add_steps(terms, self._clock.read(), self.group)
        if not self.state.is_finite:
            fault = self._fault_of_any_rank(suspects(losses))
            raise self._diverged("the loss is not finite", fault)
        losses.clear()

    def _check_weights(self) -> None:
        """See that the network can be saved, which its losses cannot show before the next step.

        Raises:
            ConfigError: Training has diverged; the last checkpoint is from before.
        """
        if any(self.group.exchange(not self.saver.is_finite())):
            raise self._diverged("the weights are not finite", None)

    def _fault_of_any_rank(self, names: Sequence[str]) -> str | None:
        """Return what is wrong with an image that was trained on; all ranks return the same."""
        cases = {case.name: case for case in self.experiment.training}
        faults = self.group.exchange(image_fault([cases[name] for name in names]))
        return next((fault for fault in faults if fault is not None), None)

    def _diverged(self, what: str, fault: str | None) -> Unet3dError:
        where = f"{what} in epoch {self.state.epoch + 1}"
        return divergence_error(where, fault, self.config.training.learning_rate)

    def _is_due(self) -> bool:
        """Return whether this epoch ends with a validation and a checkpoint."""
        number, settings = self.state.epoch + 1, self.config.training
        return number % settings.validate_every == 0 or number == settings.epochs

    def _validate(self, line: ProgressLine, interruption: InterruptionRequest) -> Validation | None:
        """See that the network can be saved, and validate it; None where no case validates."""
        self._check_weights()
        if not self.experiment.validation:
            return None
        epoch = self.state.epoch
        number = epoch + 1
        num_steps = number * self.loader.num_steps
        progress = partial(line.validating, epoch)
        validation = self.validator.validate(number, num_steps, interruption, progress)
        if validation.stop:
            self.saver.save(self.state)
            self._stop(validation.stop)
        return validation

    def _validate_finally(
        self, line: ProgressLine, interruption: InterruptionRequest
    ) -> FinalResult:
        """Predict the validation cases with the final network, and keep what comes out."""
        num_steps = self.state.epoch * self.loader.num_steps
        checkpoint = self.saver.checkpoint(self.state)
        final = self.final_validation.run(checkpoint, num_steps, interruption, line.predicting)
        if final.stop:
            self._stop(final.stop)
        if final.rules != self.saver.postprocessing:
            self.saver.save(self.state, postprocessing=final.rules)
        return final

    def _end_epoch(self, validation: Validation | None) -> dict[str, Any]:
        """Go on to the next epoch, and return the line of metrics of this one."""
        num_steps = self.loader.num_steps
        metrics = epoch_metrics(
            self.state,
            num_steps=num_steps,
            learning_rate=self._learning_rate((self.state.epoch + 1) * num_steps - 1),
            validation=validation,
        )
        if validation is None:
            self.state = self.state.next_epoch(None)
        else:
            self.state = self.state.next_epoch(validation.dice, validation.seconds)
        return metrics

    def _keep(self, validation: Validation | None) -> None:
        """Save the network, as the best one too where a validation says so."""
        improved = validation is not None and self.state.note_dice(validation.mean_dice)
        self.saver.save(self.state, improved)

    def _stop(self, signal_number: int) -> NoReturn:
        """End here, all ranks together: one that ended earlier would have the others killed."""
        self.group.exchange(None)
        raise Interrupted(signal_number, can_resume=True)

    @contextmanager
    def _measured_memory(self) -> Iterator[None]:
        """Measure the steps in the context, and write down what each slot held."""
        optimizer = self.optimization.optimizer
        with measured_steps(self.executor, optimizer) as meter:
            yield
        self.memory = report_memory(
            meter,
            mode=self.config.parallel.mode,
            executor=self.executor,
            optimizer=optimizer,
            prediction=self.prediction,
            folder=self.folder,
            group=self.group,
        )
