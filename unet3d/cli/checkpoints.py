"""The checkpoints that a command uses: the named ones, or the newest finished run's."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click

from unet3d.errors import ConfigError, some


def named_checkpoints(
    paths: Sequence[Path], folds: tuple[int, ...] | None = None
) -> tuple[Path, ...]:
    """Return the checkpoints that paths name, each once.

    An archive is unpacked for as long as the command runs.
    """
    from unet3d.nnunet.model_files import networks_in
    from unet3d.runs.finding import refuse_other_file

    unpacked = click.get_current_context().with_resource(ExitStack())
    files = [file for path in dict.fromkeys(paths) for file in networks_in(path, folds, unpacked)]
    for file in files:
        refuse_other_file(file)
    return tuple(dict.fromkeys(files))


def wanted_checkpoints(
    paths: Sequence[Path], folds: tuple[int, ...] | None = None
) -> tuple[Path, ...]:
    """Return the checkpoints that paths name; without paths, the newest finished run's.

    ConfigError if ``runs/`` has runs of several data sets, finished or not, because a scan may
    belong to any of them.
    """
    from unet3d.runs.finding import checkpoints_in, dataset_of, described_in, newest_runs
    from unet3d.runs.run_folder import RUNS, folds_in

    if paths:
        return named_checkpoints(paths, folds)
    if folds is not None:
        raise click.UsageError("--folds chooses folds of a checkpoint; add --checkpoint")
    finished = newest_runs(finished=True)
    if not finished:
        raise ConfigError(
            f"{RUNS.absolute()} has no finished run; name a checkpoint with --checkpoint FILE, "
            "or train one with unet3d train DATASET"
        )
    newest: dict[Path | None, str] = {}
    for run in (*finished, *newest_runs(finished=False)):
        if any(one.checkpoint() for one in (run, *folds_in(run.path).values())):
            dataset = dataset_of(run)
            line = f"--checkpoint {run.path} (trained on {dataset or 'phantoms'})"
            newest.setdefault(described_in(Path(dataset)) if dataset else None, line)
    if len(newest) > 1:
        known = list(newest.values())
        raise ConfigError(f"runs/ has runs of {len(newest)} data sets; add one of {some(known)}")
    return checkpoints_in(finished[0].path)
