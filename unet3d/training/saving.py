"""The checkpoints of a run: the state of training, when to save it, and reading it back."""

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field, replace
from typing import Any

import torch
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from torch import is_tensor

from unet3d.distributed.group import Group
from unet3d.errors import CheckpointError, ConfigError, counted
from unet3d.inference.postprocessing import Rule
from unet3d.inputs.plain_data import explained, printable
from unet3d.model import LossTerms
from unet3d.model.optimizer import Optimization
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unet3d.training.cases import RunContext

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, config=ConfigDict(extra="ignore", strict=True, allow_inf_nan=False))
class TrainingState:
    """Finished epochs and steps, and the sums of the current epoch."""

    cpu_precision: str = ""
    """Precision of a network on CPUs alone, which ``auto`` keeps; empty: unknown."""
    epoch: int = 0
    """Epochs that are complete, validation included."""
    step: int = 0
    """Finished steps of the current epoch."""
    loss: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "dice": 0.0, "cross_entropy": 0.0}
    )
    """Sums of the losses of all samples in the finished steps of the current epoch, by term."""
    num_samples: int = 0
    """Samples in these steps, in all ranks together."""
    seconds: float = 0.0
    """Duration of these steps."""
    waited_seconds: float = 0.0
    """The part of these seconds in which devices waited for data."""
    best_dice: float = -1.0
    """Largest mean Dice of all validations; -1 before the first one."""

    def add_steps(
        self, losses: Sequence[tuple[int, LossTerms]], waited_seconds: float, group: Group
    ) -> None:
        """Add the measurements of some steps of all ranks; this waits for the devices.

        ``losses`` holds for each step the number of this rank's samples and their mean loss. The
        waiting time is averaged over the ranks, because a step takes the same time in all ranks.
        """
        counted = [(num_samples, terms) for num_samples, terms in losses if num_samples]
        own = [
            float(sum(n * getattr(terms, name).item() for n, terms in counted))
            for name in self.loss
        ]
        num_samples, waited, *sums = group.sum([sum(n for n, _ in counted), waited_seconds, *own])
        self.num_samples += int(num_samples)
        self.waited_seconds += waited / group.size
        for name, value in zip(self.loss, sums, strict=True):
            self.loss[name] += value

    @property
    def is_finite(self) -> bool:
        """Whether the loss is still a number; if not, training has diverged."""
        return math.isfinite(self.loss["total"])

    @property
    def mean_loss(self) -> dict[str, float]:
        """Mean over the samples of the epoch so far."""
        return {name: value / max(self.num_samples, 1) for name, value in self.loss.items()}

    def note_dice(self, mean_dice: float | None) -> bool:
        """Return whether the last validation is the best so far, and remember it if it is."""
        if mean_dice is None or mean_dice <= self.best_dice:
            return False
        self.best_dice = mean_dice
        return True

    def next_epoch(self) -> "TrainingState":
        """Return the state at the start of the next epoch."""
        return TrainingState(
            epoch=self.epoch + 1, best_dice=self.best_dice, cpu_precision=self.cpu_precision
        )

    @classmethod
    def from_plain(cls, values: Any) -> "TrainingState":
        """Return the state in a checkpoint; missing fields get defaults.

        Raises ValueError if a field has another type or is not finite.
        """
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError("it holds no training state")
        try:
            state = cls(**values)
        except ValidationError as error:
            raise ValueError(explained(error)) from error
        if state.loss.keys() != cls().loss.keys():
            raise ValueError(f"loss has the terms {printable(', '.join(map(str, state.loss)))}")
        return state


class CheckpointSaver:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, context: RunContext, optimization: Optimization) -> None:
        """Start to count the time until the first checkpoint is due."""
        self._context = context
        self._folder, self._group = context.folder, context.group
        self._module = context.executor.module
        self._optimization = optimization
        self._saved_at = time.monotonic()
        self.postprocessing: tuple[Rule, ...] = ()
        """Rules for components in the latest checkpoint; empty again after further training."""

    def is_due(self) -> bool:
        """Return whether a new checkpoint is due; always False in ranks other than the first."""
        if not self._group.is_first:
            return False
        age = time.monotonic() - self._saved_at
        return age >= self._context.experiment.config.training.save_every_seconds

    def save(
        self,
        state: TrainingState,
        improved: bool = False,
        postprocessing: tuple[Rule, ...] = (),
    ) -> None:
        """Write the latest checkpoint in the first rank; if ``improved``, also as the best one.

        ``postprocessing`` names the components that predictions with the checkpoint keep.
        """
        self.postprocessing = postprocessing
        if not self._group.is_first:
            return
        checkpoint = replace(self.checkpoint(state), postprocessing=postprocessing)
        if improved:
            save_checkpoint(checkpoint, self._folder.best)
        save_checkpoint(checkpoint, self._folder.latest)
        self._saved_at = time.monotonic()  # writing takes time, too

    def checkpoint(self, state: TrainingState) -> Checkpoint:
        """Return a checkpoint of the current state, which shares the network's tensors."""
        experiment = self._context.experiment
        return Checkpoint(
            topology=experiment.topology,
            preprocessing=experiment.preprocessing,
            patch_size=experiment.patch_size,
            config=experiment.config,
            split=experiment.split,
            model=self._module.state_dict(),
            training={
                "state": asdict(state),
                "random": torch.get_rng_state(),
                **self._optimization.state_dict(),
            },
        )

    def is_finite(self) -> bool:
        """Return whether all values to save are finite; this waits for the devices."""
        states = self._optimization.optimizer.state.values()
        tensors = [value for of_one in states for value in of_one.values() if is_tensor(value)]
        return all_finite([*self._module.state_dict().values(), *tensors])

    def load(self, num_steps: int) -> TrainingState:
        """Load the latest checkpoint in all ranks, and return its training state.

        An epoch has ``num_steps``, which may be fewer than before. Raises CheckpointError if the
        optimizer is another one, or weights are not finite.
        """
        path = self._folder.latest
        checkpoint = self._group.file_from_first(path, load_checkpoint)
        self._module.load_state_dict(checkpoint.model)
        self.postprocessing = checkpoint.postprocessing
        try:
            self._optimization.load_state_dict(checkpoint.training)
            torch.set_rng_state(checkpoint.training["random"])
            state = TrainingState.from_plain(checkpoint.training["state"])
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
        if not self.is_finite():
            raise CheckpointError(
                f"{path} holds weights that are not finite: its training has diverged; start a "
                "new run in another --output"
            )
        state.step = min(state.step, num_steps)
        part = f" and {counted(state.step, 'step')}" if state.step else ""
        logger.info("resumed after %s%s", counted(state.epoch, "epoch"), part)
        return state


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no number is NaN or infinite; this waits for the devices."""
    numbers = [one.detach() for one in tensors if one.is_floating_point() and one.numel()]
    largest = torch.nn.utils.get_total_norm(numbers, math.inf)
    return math.isfinite(largest.item())


def divergence_error(what: str, learning_rate: float) -> ConfigError:
    """Return the error for a diverged training run."""
    return ConfigError(
        f"{what}; use a smaller training.learning_rate than {learning_rate:g}, also with "
        "--resume: the last checkpoint is finite. With data.normalization none, also look for "
        "images with extreme intensities"
    )
