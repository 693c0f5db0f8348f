"""Checks whether a run may be continued with the current settings and data.

Training and validation cases must not change: scores would belong to other cases, and networks
could have trained on validation cases. Learning rate, batch, patches and devices may change.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unet3d.config import Config, Reading
from unet3d.config.configuration import in_yaml
from unet3d.errors import CheckpointError, ConfigError, counted
from unet3d.inputs.plain_data import is_close
from unet3d.planning.experiment import Experiment
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training.saving import TrainingState

logger = logging.getLogger(__name__)

FIXED = (
    *("data.fold", "training.seed", "training.optimizer"),
    *(f"data.reading.{name}" for name in Reading.model_fields),
)
"""Settings that must not change in a resumed run."""


@dataclass(frozen=True, kw_only=True)
class Past:
    """The state of a run when it was last saved."""

    folder: RunFolder
    """The run's files."""
    saved: Checkpoint
    """The run's latest checkpoint."""
    split: CaseSplit
    """Training and validation cases of that checkpoint."""
    state: TrainingState
    """Training state of that checkpoint."""

    @classmethod
    def of(cls, folder: RunFolder) -> "Past":
        """Read the latest checkpoint of a run."""
        saved = load_checkpoint(folder.latest)
        if not saved.training or saved.split is None:
            raise CheckpointError(
                f"{folder.latest} holds a network but no training to continue; start a new run"
            )
        try:
            state = TrainingState.from_plain(saved.training.get("state"))
        except ValueError as error:
            raise CheckpointError(f"{folder.latest} cannot be resumed from: {error}") from error
        return cls(folder=folder, saved=saved, split=saved.split, state=state)

    def is_finished(self, epochs: int) -> bool:
        """Return whether a number of epochs is done, and final validation and summary are saved."""
        is_validated = not self.split.validation or self.folder.has_validation()
        return self.state.epoch >= epochs and is_validated and self.folder.has_summary()

    def check_settings(self, config: Config) -> None:
        """Check that the settings suit the run, before the data are read."""
        before, now = self.saved.config.flat(), config.flat()
        self._refuse(_changed(before, now, FIXED))
        done, epochs = self.state.epoch, config.training.epochs
        if epochs < done + (self.state.step > 0):
            part = f" and {counted(self.state.step, 'step')}" if self.state.step else ""
            raise ConfigError(
                f"training.epochs is {epochs}, but {self.folder.path} has already done "
                f"{counted(done, 'epoch')}{part}; give more"
            )

    def check_experiment(self, experiment: Experiment) -> None:
        """Check that data and network are the run's; log other changes."""
        preparation = self.saved.preprocessing.to_dict(), experiment.preprocessing.to_dict()
        self._refuse([*experiment.split.changes_since(self.split), *_changed(*preparation)])
        if self.saved.topology != experiment.topology:
            raise CheckpointError(
                f"{self.folder.latest} holds another network than the settings now ask for; "
                "resume with the settings of config.yaml, or start a new run in another --output"
            )
        before, now = self.saved.config.flat(), experiment.config.flat()
        changes = [
            f"{key} from {before[key]} to {now[key]}"
            for key in now
            if now[key] not in (before[key], "auto") and key != "training.epochs"
        ]
        if changes:
            logger.info("changed since the run was saved: %s", ", ".join(changes))

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ConfigError(
                f"{self.folder.path} cannot be continued: {'; '.join(changes)}; resume with the "
                "same data and settings, or start a new run in another --output"
            )


def _changed(
    before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str] | None = None
) -> list[str]:
    """Return a phrase for each key whose plain values differ."""
    changed = [key for key in keys or now if not is_close(before.get(key), now.get(key))]
    return [
        f"{key} changed from {_in_words(before.get(key))} to {_in_words(now.get(key))}"
        for key in changed
    ]


def _in_words(value: Any) -> str:
    """Return a plain value in words; of a channel, its normalisation without the statistics."""
    if isinstance(value, list):
        value = [one.get("kind", one) if isinstance(one, dict) else one for one in value]
    return in_yaml(value)
