"""Dice of the validation cases, which the ranks divide among them."""

from dataclasses import dataclass

import torch

from unet3d.distributed.group import Group
from unet3d.distributed.interruption import InterruptionRequest
from unet3d.inference.evaluation import dice_per_class
from unet3d.inference.sliding_window import predict_logits
from unet3d.kernels import strongest_class
from unet3d.parallel import Executor
from unet3d.parallel.precision import image_dtype
from unet3d.planning.experiment import Experiment
from unet3d.volumes.cache import PreparedCase


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What a validation found, the same in all ranks."""

    dice: dict[str, float | None]
    """Mean over the cases for each label but the background; None where no case has the label."""
    mean_dice: float | None
    """Mean over the labels."""
    stop: int = 0
    """Number of the signal that ended it early; 0: it is complete."""


class Validator:
    """Segments the validation cases as prediction would, and compares them with their labels."""

    def __init__(self, experiment: Experiment, executor: Executor, group: Group) -> None:
        """Prepare to validate.

        Args:
            experiment: Cases, labels and the settings of prediction.
            executor: The placed network.
            group: The ranks that divide the cases among them.
        """
        self._experiment = experiment
        self._executor = executor
        self._group = group

    def validate(self, epoch: int, num_steps: int, interruption: InterruptionRequest) -> Validation:
        """Return the Dice of each label, each case counted once; all ranks call it.

        Args:
            epoch: Number of the epoch that ends with it, from 1.
            num_steps: Steps done since the beginning.
            interruption: Ends it before the next case.
        """
        self._executor.module.eval()
        cases = self._experiment.validation
        own: dict[int, list[float | None]] = {}
        for index in range(self._group.ranks.rank, len(cases), self._group.size):
            if interruption.signal_number is not None:
                break
            name = cases[index].name
            self._group.note(num_steps, f"validation of epoch {epoch}, case {name}")
            own[index] = self._dice(cases[index])
        answers = self._group.exchange([interruption.signal_number or 0, list(own.items())])
        stop = max(number for number, _ in answers)
        if stop:
            return Validation(dice={}, mean_dice=None, stop=stop)
        by_case = {index: values for _, items in answers for index, values in items}
        return self._mean_over_cases([by_case[index] for index in range(len(cases))])

    def _dice(self, case: PreparedCase) -> list[float | None]:
        """Return the Dice of each class in one case."""
        experiment, executor = self._experiment, self._executor
        settings = experiment.config.inference
        window = settings.window
        if window == "auto":
            window = experiment.patch_size or "whole"
        image = torch.from_numpy(case.image().copy()).to(image_dtype(executor.module))
        logits = predict_logits(
            executor, image, experiment.topology, window, settings.overlap, settings.batch_size
        )
        label = torch.from_numpy(case.label().copy()).to(logits.device)
        return dice_per_class(
            strongest_class(logits), label, len(experiment.preprocessing.label_names)
        )

    def _mean_over_cases(self, scores: list[list[float | None]]) -> Validation:
        names = self._experiment.preprocessing.label_names
        means = {name: _mean([of[index] for of in scores]) for index, name in enumerate(names)}
        del means[names[0]]
        return Validation(dice=means, mean_dice=_mean(list(means.values())))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
