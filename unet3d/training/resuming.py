"""Whether a run may be continued with the settings and the data of now.

What it was trained and validated on may not change, because its scores would then be of other cases
and its networks would have seen the cases that judge them. How it is trained may: learning rate,
batch, patches, devices.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unet3d.config import Config
from unet3d.errors import CheckpointError, ConfigError, some
from unet3d.inputs.plain_data import is_close
from unet3d.model import Topology
from unet3d.planning.experiment import Experiment
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training.state import TrainingState

logger = logging.getLogger(__name__)

SILENT = ("data.", "parallel.", "memory.")
"""Settings that change nothing of what is learned, or whose effect is compared by itself."""
ALSO_SILENT = (
    "patches.memory_gib",
    "training.epochs",
    "training.micro_batches",
    "training.save_every_seconds",
    "training.validate_every",
)


@dataclass(frozen=True, kw_only=True)
class Past:
    """What a run was when it last saved, without its tensors."""

    folder: RunFolder
    """The run's files."""
    config: Config
    """Its settings."""
    topology: Topology
    """Its network."""
    preprocessing: Preprocessing
    """How its images were prepared."""
    split: CaseSplit
    """Its cases."""
    state: TrainingState
    """Where it stood."""

    @classmethod
    def of(cls, folder: RunFolder) -> "Past":
        """Read the latest checkpoint of a run."""
        checkpoint = load_checkpoint(folder.latest)
        if not checkpoint.training or checkpoint.split is None:
            raise CheckpointError(
                f"{folder.latest} holds a network but no training to continue; start a new run"
            )
        try:
            state = TrainingState.from_plain(checkpoint.training.get("state"))
        except ValueError as error:
            raise CheckpointError(f"{folder.latest} cannot be resumed from: {error}") from error
        return cls(
            folder=folder,
            config=checkpoint.config,
            topology=checkpoint.topology,
            preprocessing=checkpoint.preprocessing,
            split=checkpoint.split,
            state=state,
        )

    def is_finished(self, epochs: int) -> bool:
        """Return whether nothing is left to do of so many epochs."""
        is_validated = not self.split.validation or self.folder.has_validation()
        return self.state.epoch >= epochs and is_validated and self.folder.has_summary()

    def check_settings(self, config: Config) -> None:
        """See that the settings suit the run, as far as that can be said without the data."""
        before, now = self.config, config
        self._refuse(
            _changed(
                {
                    "data.fold": (before.data.fold, now.data.fold),
                    "training.seed": (before.training.seed, now.training.seed),
                    "training.optimizer": (before.training.optimizer, now.training.optimizer),
                }
            )
        )
        done, epochs = self.state.epoch, config.training.epochs
        if epochs < done + (self.state.step > 0):
            part = f" and {self.state.step} steps" if self.state.step else ""
            raise ConfigError(
                f"training.epochs is {epochs}, but {self.folder.path} has done {done} epoch(s)"
                f"{part} already; give more"
            )

    def check_experiment(self, experiment: Experiment) -> None:
        """See that the data are those of the run, and its network; say what else has changed."""
        self._refuse(
            [
                *experiment.split.changes_since(self.split),
                *_changes_of_preparation(self.preprocessing, experiment.preprocessing),
            ]
        )
        if self.topology != experiment.topology:
            raise CheckpointError(
                f"{self.folder.latest} holds another network than the settings now ask for; "
                "resume with the settings of config.yaml, or start a new run in another --output"
            )
        before, now = self.config.flat(), experiment.config.flat()
        changes = [
            f"{key} from {before[key]} to {now[key]}"
            for key in now
            if now[key] != before[key] and not key.startswith(SILENT) and key not in ALSO_SILENT
        ]
        if changes:
            logger.info("changed since the run was saved: %s", ", ".join(changes))
        measured = [
            config.inference.model_copy(update={"postprocessing": True})  # not during a training
            for config in (self.config, experiment.config)
        ]
        if measured[0] != measured[1] and self.state.best_dice >= 0:
            logger.warning(
                "settings of inference have changed, so that Dice from now on is measured in "
                "another way than the best so far"
            )

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ConfigError(
                f"{self.folder.path} cannot be continued: {'; '.join(changes)}; resume with what "
                "it was trained on, or start a new run in another --output"
            )


def _changes_of_preparation(before: Preprocessing, now: Preprocessing) -> list[str]:
    kinds = [", ".join(channel.kind for channel in one.channels) for one in (before, now)]
    changes = _changed(
        {
            "label names": (before.label_names, now.label_names),
            "values of labels": (_merged(before), _merged(now)),
            "the ignored label": (before.ignore_value, now.ignore_value),
            "regions": (_named(before), _named(now)),
            "channel names": (before.channel_names, now.channel_names),
            "data.spacing_mm": (before.spacing_mm, now.spacing_mm),
            "cropping": (before.crops_to_nonzero, now.crops_to_nonzero),
            "normalisation": (kinds[0], kinds[1]),
        }
    )
    if not changes and not is_close(before.to_dict(), now.to_dict()):
        changes.append("the statistics of intensities over all cases of the data set changed")
    return changes


def _named(preprocessing: Preprocessing) -> tuple[str, ...]:
    return tuple(
        f"{one.name} of {some(one.values)} as {one.written}" for one in preprocessing.regions
    )


def _merged(preprocessing: Preprocessing) -> tuple[str, ...]:
    values = preprocessing.raw_values or [(value,) for value in preprocessing.label_values]
    return tuple(
        f"{name} of {some(of_one)}"
        for name, of_one in zip(preprocessing.label_names, values, strict=True)
    )


def _changed(values: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [
        f"{name} changed from {_in_words(before)} to {_in_words(now)}"
        for name, (before, now) in values.items()
        if not is_close(before, now)
    ]


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "that of each case" if value is None else str(value)
