"""The checkpoints that a command takes where none is named."""

from pathlib import Path

from unet3d.errors import ConfigError, some


def newest_checkpoints() -> tuple[Path, ...]:
    """Return the checkpoints of the newest finished run, or raise ConfigError.

    Also where runs of several data sets are there, finished or not: the scan may belong to any.
    """
    from unet3d.runs.finding import checkpoints_in, dataset_of, newest_runs
    from unet3d.runs.run_folder import RUNS

    finished = newest_runs(finished=True)
    if not finished:
        raise ConfigError(
            f"no checkpoint: there is no finished run in {RUNS.absolute()}; name one with "
            "--checkpoint FILE, or make one with unet3d train DATASET"
        )
    newest: dict[str, Path] = {}
    for run in (*finished, *newest_runs(finished=False)):
        newest.setdefault(dataset_of(run), run.path)
    if len(newest) > 1:
        known = [
            f"--checkpoint {path} ({f'trained on {dataset}' if dataset else 'of unknown data'})"
            for dataset, path in newest.items()
        ]
        raise ConfigError(f"runs/ has runs of {len(newest)} data sets; add one of {some(known)}")
    return checkpoints_in(finished[0].path)
