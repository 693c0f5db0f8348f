"""The checkpoints that a command takes where none is named."""

from pathlib import Path

from unet3d.errors import ConfigError


def newest_checkpoints() -> tuple[Path, ...]:
    """Return the checkpoints of the newest finished run.

    Raises:
        ConfigError: There is none, or there are such of several data sets.
    """
    from unet3d.runs.finding import checkpoints_in, dataset_of, newest_run
    from unet3d.runs.run_folder import RUNS

    run = newest_run(finished=True)
    if run is None:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    dataset = dataset_of(run)
    other = newest_run(finished=True, suits=lambda one: dataset_of(one) != dataset)
    if other is not None:
        raise ConfigError(
            f"{run.path} and {other.path} were trained on different data sets; name one of them "
            "with --checkpoint"
        )
    return checkpoints_in(run.path)
