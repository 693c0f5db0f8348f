"""Where a training stands: what a checkpoint holds beside network and optimizer."""

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from unet3d.distributed.group import Group
from unet3d.inputs.plain_data import explained, printable
from unet3d.model import LossTerms


@dataclass(kw_only=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class TrainingState:
    """Epochs and steps that are done, and the sums of the epoch that is not."""

    cpu_precision: str = ""
    """What a network on CPUs alone is computed in, which ``auto`` keeps; empty: not known."""
    epoch: int = 0
    """Epochs that are complete, validation included."""
    step: int = 0
    """Steps done in the epoch after them."""
    loss: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "dice": 0.0, "cross_entropy": 0.0}
    )
    """Sums over those steps, of the loss of each sample."""
    num_samples: int = 0
    """Samples in those steps, of all ranks."""
    seconds: float = 0.0
    """Time spent in those steps."""
    waited_seconds: float = 0.0
    """The part of it that the devices waited for data."""
    total_seconds: float = 0.0
    """Time spent in the steps of the complete epochs."""
    total_waited_seconds: float = 0.0
    """The part of it that the devices waited for data."""
    validation_seconds: float = 0.0
    """Time spent in the validations of the complete epochs."""
    last_validation_seconds: float = 0.0
    """Time that the last validation took; 0 before the first one."""
    best_dice: float = -1.0
    """Largest mean Dice of all validations; -1 before the first one."""
    best_epoch: int = 0
    """Epoch, from 1, after which it was reached; 0 where that is not known."""
    best_labels: dict[str, float | None] = field(default_factory=dict)
    """Dice of each label in that validation."""

    def add_steps(
        self, losses: Sequence[tuple[int, LossTerms]], waited_seconds: float, group: Group
    ) -> None:
        """Add what some steps, of all ranks, have measured; this waits for the devices.

        For each step there are the number of this rank's samples, and their mean loss. Of the time
        that devices waited for data the mean over the ranks counts, because all of them take the
        same time for a step.
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

    def note_dice(self, dice: dict[str, float | None], mean_dice: float | None) -> bool:
        """Return whether the last validation is the best so far, and remember it if it is."""
        if mean_dice is None or mean_dice <= self.best_dice:
            return False
        self.best_dice, self.best_epoch, self.best_labels = mean_dice, self.epoch, dice
        return True

    def next_epoch(self, validation_seconds: float | None) -> "TrainingState":
        """Return the state at the start of the next epoch; None: there was no validation."""
        last = self.last_validation_seconds if validation_seconds is None else validation_seconds
        return replace(
            self,
            epoch=self.epoch + 1,
            step=0,
            loss=dict.fromkeys(self.loss, 0.0),
            num_samples=0,
            seconds=0.0,
            waited_seconds=0.0,
            total_seconds=self.total_seconds + self.seconds,
            total_waited_seconds=self.total_waited_seconds + self.waited_seconds,
            validation_seconds=self.validation_seconds + (validation_seconds or 0.0),
            last_validation_seconds=last,
        )

    @classmethod
    def from_plain(cls, values: Any) -> "TrainingState":
        """Return the state whose fields a checkpoint holds; those that it lacks have defaults.

        Raises ValueError where a field is unknown, of another type, or not finite.
        """
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError("it holds no state of a training")
        try:
            state = cls(**values)
        except ValidationError as error:
            raise ValueError(explained(error)) from error
        if state.loss.keys() != cls().loss.keys():
            raise ValueError(f"loss has the terms {printable(', '.join(map(str, state.loss)))}")
        return state
