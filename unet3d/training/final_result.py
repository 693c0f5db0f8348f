"""What the final network makes of the validation cases, for the summary and ``cases.json``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unet3d import __version__
from unet3d.inference.evaluation import Evaluation
from unet3d.inference.postprocessing import Rule
from unet3d.planning.experiment import Experiment
from unet3d.training.component_choice import Choice


@dataclass(frozen=True, kw_only=True)
class FinalResult:
    """What the final network makes of the validation cases, the same in all ranks."""

    evaluation: Evaluation | None
    """The scores; None where there is no case, or it was stopped."""
    choices: tuple[Choice, ...] = ()
    """The components that are kept from now on."""
    seconds: float = 0.0
    """Time that it took this rank."""
    stop: int = 0
    """Number of the signal that ended it early; 0: it is complete."""

    @property
    def mean_dice(self) -> float | None:
        """Mean Dice over the labels; None where there is none."""
        return None if self.evaluation is None else self.evaluation.mean_dice

    @property
    def rules(self) -> tuple[Rule, ...]:
        """What a checkpoint holds of :attr:`choices`."""
        return tuple(choice.rule for choice in self.choices)

    def to_dict(self) -> dict[str, Any] | None:
        """Return what the run's summary holds of it; None where there was nothing to predict."""
        found = self.evaluation
        if found is None:
            return None
        return {
            "mean_dice": found.mean_dice,
            "dice": {found.name_of(label): found.mean(label).dice for label in found.labels},
            "num_cases": len(found.cases),
            "postprocessing": [list(rule) for rule in self.rules],
            "seconds": self.seconds,
        }


def cases_record(
    experiment: Experiment, checkpoint: str, evaluation: Evaluation, choices: Sequence[Choice]
) -> dict[str, Any]:
    """Return what ``cases.json`` holds.

    Args:
        experiment: The cases and the settings.
        checkpoint: Name of the file of the network.
        evaluation: The scores, in the order in which they are listed.
        choices: The components that are kept.
    """
    config, split = experiment.config, experiment.split
    found = evaluation.to_dict()
    for entry, case in zip(found["cases"], evaluation.cases, strict=True):
        entry["mean_dice"] = case.mean_dice
    left_out = ("without_prediction", "without_label")
    return {
        "unet3d": __version__,
        "checkpoint": checkpoint,
        "epochs": config.training.epochs,
        "fold": config.data.fold,
        "training": sorted(split.training),
        "validation": sorted(split.validation),
        "postprocessing": [
            {
                "largest_component_of": list(choice.rule),
                "dice_before": choice.dice_before,
                "dice_after": choice.dice_after,
            }
            for choice in choices
        ],
        **{key: value for key, value in found.items() if key not in left_out},
    }
