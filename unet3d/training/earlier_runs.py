"""Finding the run to continue, and the settings that it was trained with."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from unet3d.config import Config, load_config
from unet3d.datasets.dataset import Case, load_dataset
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import validated
from unet3d.preparation.cache import Cache
from unet3d.runs.case_split import CaseSplit, content_of
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.finding import folds_in, newest_run, recorded_folds
from unet3d.runs.run_folder import RUNS, RunFolder

logger = logging.getLogger(__name__)


def run_to_resume(
    output: Path | None,
    dataset: Path | None = None,
    cache: Path | None = None,
    over_folds: bool = False,
) -> RunFolder:
    """Return the run to continue, which may be one over several folds.

    Args:
        output: Its folder; None: the newest below ``runs/``.
        dataset: The data set that it was made with, wherever that was then; None: any.
        cache: The cache folder, where contents of files are remembered; None: the user's.
        over_folds: Whether it must be one over several folds.

    Raises:
        ConfigError: There is no such run.
        DatasetError: The data set cannot be understood.
        VolumeError: A file of it cannot be read.
    """

    def suits(run: RunFolder) -> bool:
        return not over_folds or recorded_folds(run.path) is not None

    if output is not None:
        run: RunFolder | None = RunFolder(output)
    elif dataset is None:
        run = newest_run(finished=False, suits=suits)
    else:
        maker = _Maker(dataset, cache)
        run = newest_run(finished=False, suits=lambda run: suits(run) and maker.has_made(run))
        if run is None and newest_run(finished=False, suits=suits) is not None:
            raise ConfigError(
                f"no run in {RUNS} was made with {dataset}; name one with --output, or start one "
                "without --resume"
            )
    if run is None or not (run.latest.exists() or recorded_folds(run.path) is not None):
        raise ConfigError(
            f"there is no run to resume in {output or RUNS}; start one without --resume"
        )
    return run


@contextmanager
def recorded_settings(run: RunFolder) -> Iterator[Path]:
    """Provide the file of a run's settings: its ``config.yaml``, or where that is damaged, another.

    Yields:
        A file that :func:`~unet3d.config.load_config` reads.

    Raises:
        ConfigError: A setting in it is refused.
        CheckpointError: It is damaged, and so is the latest checkpoint, which holds them too.
    """
    reason = _damage(run.config)
    if reason is None:
        yield run.config
        return
    logger.warning(
        "%s is damaged (%s); the settings in %s are used", run.config, reason, run.latest.name
    )
    with tempfile.NamedTemporaryFile("w", prefix="unet3d-", suffix=".yaml") as settings:
        settings.write(load_checkpoint(run.latest).config.to_yaml())
        settings.flush()
        yield Path(settings.name)


def _damage(path: Path) -> str | None:
    """Return why a file does not hold what a run wrote; None where it does."""
    try:
        config = load_config(path)
    except ConfigError as error:
        if isinstance(error.__cause__, ValidationError):  # somebody has changed a setting
            raise
        return str(error)
    missing = sorted(Config.model_fields.keys() - config.model_fields_set)
    return f"it lacks {', '.join(missing)}" if missing else None


class _Maker:
    """A data set that may have made some runs."""

    def __init__(self, path: Path, cache: Path | None) -> None:
        self._path = path
        self._cache = cache
        self._cases: dict[str, Case] | None = None

    def has_made(self, run: RunFolder) -> bool:
        """Return whether a run was made with a data set of this path, or of these contents."""
        if not run.latest.exists():  # one over several folds, all of one data set
            return any(self.has_made(fold) for fold in folds_in(run.path).values())
        record = run.read_data()
        if record is None:  # a run of an earlier version
            try:
                recorded = load_config(run.config).data.dataset
            except ConfigError:
                return False
            return recorded is not None and _description(recorded) == _description(self._path)
        path = record.get("dataset")
        if isinstance(path, str) and _description(Path(path)) == _description(self._path):
            return True
        try:
            split = validated(CaseSplit, record)
        except ValueError:
            return False
        return self._holds({**split.training, **split.validation})

    def _holds(self, contents: dict[str, str]) -> bool:
        if self._cases is None:
            self._cases = {case.name: case for case in load_dataset(self._path).cases}
        if not contents.keys() <= self._cases.keys():
            return False
        store = Cache(self._cache)
        return bool(contents) and all(
            content_of(self._cases[name], store) == digest for name, digest in contents.items()
        )


def _description(path: Path) -> Path:
    """Return the file that describes a data set, which may be named by its folder."""
    return (path / "dataset.json" if path.is_dir() else path).resolve()
