"""Which data a run is made with: ``data.json``, and what is said of it at the start."""

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
    """Return how many cases train and validate; a second line names those that do both.

    The same case may stand in a data set twice, under two names.
    """
    split, config = experiment.split, experiment.config
    lines = [
        f"data: {dataset_name(config)}, {len(split.training)} cases train, "
        f"{len(split.validation) or 'none'} validate (fold {config.data.fold})"
    ]
    if split.twins:
        names = some(sorted(split.twins), MAX_NAMES)
        lines.append(f"{len(split.twins)} of these are trained on too, under other names: {names}")
    return lines
