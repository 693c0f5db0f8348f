"""Why a training is not finite any more: an image, or else the learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unet3d.errors import ConfigError, Unet3dError, VolumeError
from unet3d.model import LossTerms
from unet3d.preparation.cache import PreparedCase

LARGEST_USUAL = 1e4
"""Prepared intensities beyond this are named as the cause; normalised ones have a deviation of 1,
and Hounsfield units that are not normalised end at 3071."""


MAX_SUSPECTS = 16
"""Images that are looked at when training has diverged; reading them all might take hours."""


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """What a step left behind."""

    num_samples: int
    """This rank's patches that count."""
    terms: LossTerms
    """Their mean loss, on a device."""
    cases: tuple[str, ...]
    """The cases of the patches."""


def suspects(losses: Sequence[StepLoss]) -> list[str]:
    """Return the cases that may have made the loss NaN or infinite, the likeliest first.

    A bad image shows in the loss of its own step, or through its gradients in that of the next.
    """
    totals = [loss.terms.total.item() for loss in losses]
    first_bad = next((i for i, total in enumerate(totals) if not math.isfinite(total)), len(losses))
    names = [name for loss in reversed(losses[: first_bad + 1]) for name in loss.cases]
    return list(dict.fromkeys(names))[:MAX_SUSPECTS]


def image_fault(cases: Sequence[PreparedCase]) -> str | None:
    """Return what is wrong with the first image that no network can be trained on, or None."""
    for case in cases:
        image = torch.from_numpy(case.image().copy())
        low, high = (extreme.item() for extreme in torch.aminmax(image))
        if not math.isfinite(low) or not math.isfinite(high):
            return f"the prepared image of case {case.name} holds NaN or infinite intensities"
        if max(-low, high) > LARGEST_USUAL:
            return (
                f"the prepared image of case {case.name} has intensities up to "
                f"{max(-low, high, key=abs):.3g}"
            )
    return None


def divergence_error(what: str, fault: str | None, learning_rate: float) -> Unet3dError:
    """Return the error for a training that is not finite any more."""
    if fault is not None:
        return VolumeError(
            f"{what}: {fault}; correct the image or leave the case out (unet3d check names "
            "such images)"
        )
    return ConfigError(
        f"{what}; use a smaller training.learning_rate than {learning_rate:g}, which also "
        "--resume takes: what was saved before is finite"
    )
