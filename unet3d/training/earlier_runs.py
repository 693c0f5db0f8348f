"""Finding the run to continue."""

from pathlib import Path

from unet3d.config import load_config
from unet3d.errors import ConfigError
from unet3d.runs.finding import dataset_of, newest_run, recorded_folds
from unet3d.runs.run_folder import RUNS, RunFolder
from unet3d.training.plan import Request

DATASET = "data.dataset"


def run_to_resume(request: Request, over_folds: bool = False) -> RunFolder:
    """Return the run to continue: that of a folder, or else the newest of the data set.

    It may be one over several folds, and must be with ``over_folds``. One that was killed before
    its first checkpoint counts, as its settings are there.
    """
    named = {key: value for key, value in request.changes.items() if key == DATASET}
    dataset = load_config(request.config_path, named).data.dataset

    def suits(run: RunFolder) -> bool:
        if over_folds and recorded_folds(run.path) is None:
            return False
        made_with = dataset_of(run)
        if dataset is None:
            return True
        return bool(made_with) and _description(Path(made_with)) == _description(dataset)

    run = newest_run(finished=False, suits=suits) if request.output is None else None
    if request.output is not None and RunFolder(request.output).config.is_file():
        run = RunFolder(request.output)
    if run is None:
        made_with = "" if request.output or dataset is None else f" that was made with {dataset}"
        raise ConfigError(
            f"there is no run to resume in {request.output or RUNS}{made_with}; name one with "
            "--output, or start one without --resume"
        )
    return run


def _description(path: Path) -> Path:
    """Return the file that describes a data set, which may be named by its folder."""
    return (path / "dataset.json" if path.is_dir() else path).resolve()
