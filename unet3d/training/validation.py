"""Dice and loss of the validation cases."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unet3d.inference.image_slab import ImageSlab, Planes
from unet3d.inference.label_scores import dice_per_class
from unet3d.inference.sliding_window import (
    NonFiniteLogitsError,
    logit_slabs,
)
from unet3d.inference.window_network import WindowNetwork
from unet3d.inference.windows import Windows
from unet3d.model import SegmentationLoss
from unet3d.parallel.precision import image_dtype
from unet3d.preparation.cache import PreparedCase
from unet3d.preparation.transform import classes_of
from unet3d.training.cases import RunContext, Watcher, WindowsDone, over_cases
from unet3d.training.saving import divergence_error

MAX_LOGITS = 2**24
"""Logits per piece of the loss computation."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The results of a validation, the same in all ranks except for the time."""

    dice: dict[str, float | None]
    """Mean over the cases for each label but the background, or for each region; None where no case
    has it."""
    mean_dice: float | None
    """Mean over the labels."""
    loss: float | None
    """Mean over the cases of the training loss, at full resolution."""
    seconds: float = field(compare=False)
    """Time that it took this rank."""


class Validator:
    """Segments the validation cases as prediction would, and compares them with their labels."""

    def __init__(self, context: RunContext) -> None:
        """Take the network and the cases of a training run."""
        self._experiment = context.experiment
        self._executor = context.executor
        self._context = context
        regions = self._experiment.preprocessing.region_classes
        self._loss = SegmentationLoss.of(self._experiment.config.training, regions)

    def validate(self, epoch: int, watcher: Watcher) -> Validation:
        """Return the Dice of each label after an epoch, each case counted once.

        Raises ConfigError if the network has diverged, and Stopped after a request to stop.
        """
        began = time.monotonic()
        self._executor.module.eval()
        found = over_cases(
            self._context,
            self._experiment.validation,
            self._scores,
            watcher,
            f"validation of epoch {epoch}",
            with_slabs=True,
        )
        losses, dice = zip(*found, strict=True)
        names = self._experiment.preprocessing.scored
        means = {name: _mean([of[index] for of in dice]) for index, name in enumerate(names)}
        return Validation(
            dice=means,
            mean_dice=_mean(list(means.values())),
            loss=_mean(losses),
            seconds=time.monotonic() - began,
        )

    def _scores(
        self, case: PreparedCase, windows_done: WindowsDone
    ) -> tuple[float, list[float | None]] | None:
        """Return loss and Dice by label or region in a replica's first rank, None in others."""
        experiment, executor = self._experiment, self._executor
        settings = experiment.config.inference
        window = experiment.patch_size or "whole" if settings.window == "auto" else settings.window
        image = Planes.of(torch.from_numpy(case.image().copy()))
        windows = Windows.of(
            image.shape,
            experiment.topology,
            window,
            settings.overlap,
            settings.batch_size,
            [slot.device for slot in executor.slots],
        )
        slab = ImageSlab(image, windows, image_dtype(executor.module))
        preprocessing, axis = experiment.preprocessing, windows.axis
        classes = case.label().copy()
        done, sums, parts = 0, [], []
        try:
            num_classes = experiment.topology.num_classes
            for logits in logit_slabs(
                [WindowNetwork.of(executor)], slab, windows, num_classes, windows_done
            ):
                if not self._context.has_results:  # the first rank of the replica scores them
                    continue
                planes = slice(done, done + logits.shape[1 + axis])
                truth = torch.from_numpy(classes[(*[slice(None)] * axis, planes)])
                sums += self._sums(logits, truth)
                parts.append(classes_of(logits, preprocessing))
                done = planes.stop
        except NonFiniteLogitsError as error:
            raise divergence_error(
                f"the network's output for validation case {case.name} is not finite",
                experiment.config.training.learning_rate,
            ) from error
        if not self._context.has_results:
            return None
        found = torch.cat(parts, axis)
        loss = self._loss.from_sums(torch.stack(sums).sum(0)).total.item()
        if preprocessing.ignore_value is not None:
            # Ignored voxels become background in both, which counts for no label's Dice.
            is_counted = classes < len(preprocessing.label_values)
            found *= torch.from_numpy(is_counted).to(found.device)
            classes = classes * is_counted
        label = torch.from_numpy(classes).to(found.device)
        if not preprocessing.regions:
            return loss, dice_per_class(found, label, len(preprocessing.label_values))[1:]
        return loss, [
            dice_per_class(_is_any_of(found, region), _is_any_of(label, region), 2)[1]
            for region in preprocessing.region_classes
        ]

    def _sums(self, logits: Tensor, classes: Tensor) -> list[Tensor]:
        """Return the sums of the loss of a slab, a few planes at a time to save memory."""
        num_planes = max(1, MAX_LOGITS // logits[:, 0].numel())
        return [
            self._loss.sums(
                logits[None, :, start : start + num_planes],
                classes[None, start : start + num_planes].to(logits.device, torch.int64),
            )
            for start in range(0, len(classes), num_planes)
        ]


def _is_any_of(classes: Tensor, some: Sequence[int]) -> Tensor:
    """Return 1 where a voxel has one of the classes, else 0."""
    return torch.stack([classes == index for index in some]).any(0).to(torch.uint8)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
