"""Which data a run is made with: ``data.json``, and what is said of it at the start."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from unet3d.config import Config
from unet3d.errors import some
from unet3d.planning.experiment import Experiment

MAX_NAMES = 2
"""Cases that a line names."""


def data_record(experiment: Experiment) -> dict[str, Any]:
    """Return what ``data.json`` holds beside the version."""
    config = experiment.config
    return {
        "dataset": None if config.data.dataset is None else str(config.data.dataset),
        "fingerprint": experiment.split.fingerprint,
        "fold": config.data.fold,
        "seed": config.training.seed,
        "preprocessing": experiment.preprocessing.to_dict(),
        **asdict(experiment.split),
    }


def dataset_name(config: Config) -> str:
    """Return what the data set of a training is called: its folder, or ``phantom``."""
    source = config.data.dataset
    if source is None:
        return "phantom"
    return source.parent.name if source.is_file() else source.name


def data_lines(experiment: Experiment) -> list[str]:
    """Return which cases train and which validate, a line each.

    A third one names those that validate although they train, under another name.
    """
    split, fold = experiment.split, experiment.config.data.fold
    lines = [
        _line(f"training on {len(split.training)} case(s)", split.training),
        _line(f"validating on {len(split.validation)} case(s) (fold {fold})", split.validation)
        if split.validation
        else "no validation: every case is trained on (fold none)",
    ]
    if split.twins:
        head = f"{len(split.twins)} of these are trained on too, under other names"
        lines.append(_line(head, split.twins))
    return lines


def _line(head: str, names: Iterable[str]) -> str:
    return f"{head}: {some(sorted(names), MAX_NAMES)}"
