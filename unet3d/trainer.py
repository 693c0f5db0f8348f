"""The Python interface of training: what ``unet3d train`` does, without the command line."""

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT
from threading import Lock
from typing import Any, Literal

import torch
from rich.console import Console

from unet3d.api import Device, FileName, Segmenter, load, names_of
from unet3d.config import parsed_value, preset_changes
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, Unet3dError, reason_of
from unet3d.inputs.reading import read_json
from unet3d.interruption import Interrupted
from unet3d.runs.finding import checkpoint_in
from unet3d.runs.run_folder import RunFolder
from unet3d.training.folds import request_over_folds
from unet3d.training.plan import Request
from unet3d.training.start import choose_run, train_run

logger = logging.getLogger(__name__)

_lock = Lock()
"""Held by the one training of this process, whose random numbers and threads are the process's."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A training that has come to its end."""

    folder: Path
    """The run's folder, as ``unet3d train`` leaves it."""
    checkpoint: Path
    """The file of the final network."""
    mean_dice: float | None
    """Mean Dice of the validation cases as the final network segments them; None: none count."""
    dice: Mapping[str, float | None]
    """The same of each label, by its name; None where no case has it."""

    def load(self, devices: Device | Sequence[Device] | None = None) -> Segmenter:
        """Load the final network on devices, as :func:`unet3d.api.load` does."""
        return load(self.folder, devices=devices)


def train(
    dataset: FileName | None = None,
    *,
    output: FileName | None = None,
    config: FileName | None = None,
    preset: str | Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    devices: Device | Sequence[Device] | None = None,
    epochs: int | None = None,
    fold: int | Literal["none"] | None = None,
    init: FileName | None = None,
    resume: bool = False,
) -> TrainedRun:
    """Train a network, or continue to, as ``unet3d train`` does.

    One device, or one network in stages on several, is trained in this process. Where a mode needs
    a process for each device, they are started, and end with this call.

    Nothing is shown: progress goes to the logger ``unet3d`` at level INFO. Random numbers and
    threads of PyTorch are afterwards as they were before. Ctrl-C, SIGTERM and SIGHUP save a
    checkpoint first; a thread other than the main one does not hear of them. A process trains one
    network at a time: threads wait for one another.

    Args:
        dataset: Folder of the data set, or its dataset.json; None: built-in phantom heads, or where
            a run is continued, its own.
        output: Folder of the run; None: a new one below ``runs/``, or the newest to continue.
        config: YAML file of settings; what is auto is smaller where there is no GPU.
        preset: Names of settings that belong together, over those of the file.
        settings: Any others, over those, such as ``{"training.batch_size": 4}``.
        devices: Such as ``"cuda:0"``, 0, ``"cpu"``, or ``"0,1"``, of which the setting
            ``parallel.mode`` says what is on each; None: the first GPU, or the CPU.
        epochs: Epochs in all; more of them extend a run that is continued.
        fold: Which fold validates; "none" trains on every case.
        init: Checkpoint, or folder of a run, with whose weights to begin.
        resume: Whether to continue the run in ``output``, or the newest one.

    Returns:
        The run, with the Dice of its validation cases.

    Raises:
        Unet3dError: For every reason that can be explained, such as a setting that is refused
            (ConfigError) or a data set that cannot be used (DatasetError).
        KeyboardInterrupt: Ctrl-C; with ``resume`` what is saved is continued.
        Interrupted: SIGTERM or SIGHUP, likewise.
    """
    ranks = Ranks.from_environment()
    if ranks.world_size > 1:
        raise ConfigError(
            f"torchrun has started {ranks.world_size} ranks, which only the command joins; start "
            "it with torchrun -m unet3d train, or name the devices here without torchrun"
        )
    named = {
        "data.dataset": dataset,
        "parallel.devices": None if devices is None else tuple(names_of(devices)),
        "training.epochs": epochs,
        "data.fold": fold,
        "training.init": None if init is None else checkpoint_in(Path(init)),
    }
    changes = {key: value for key, value in named.items() if value is not None}
    request = Request(
        config_path=None if config is None else Path(config),
        changes={
            **preset_changes([preset] if isinstance(preset, str) else preset),
            **{key: parsed_value(key, value) for key, value in (settings or {}).items()},
            **changes,
        },
        output=None if output is None else Path(output),
        resume=resume,
    )
    over_folds = request_over_folds(request, None, ranks)
    if over_folds is not None:
        raise ConfigError(
            f"{over_folds.output} is a run over several folds; continue it with unet3d train "
            f"--resume --output {over_folds.output}, or name the folder of one fold"
        )
    try:
        with _lock, _state_of_torch_kept():
            folder = _train(request, ranks)
            final = read_json(folder.summary).get("final") or {}
    except OSError as error:  # such as a full disk, in the middle of a run
        place = f"{error.filename}: " if error.filename else ""
        raise Unet3dError(f"{place}{reason_of(error)}") from error
    return TrainedRun(
        folder=folder.path.absolute(),
        checkpoint=folder.latest.absolute(),
        mean_dice=final.get("mean_dice"),
        dice=final.get("dice") or {},
    )


def _train(request: Request, ranks: Ranks) -> RunFolder:
    group = Group(ranks)
    run = choose_run(request, group)
    # Processes that are started write what is worth a line here; quiet ones only warn.
    quiet = not logger.isEnabledFor(logging.INFO)
    level = logging.WARNING if quiet else logging.INFO
    try:
        train_run(
            run,
            group,
            Console(file=io.StringIO()),  # no terminal, so that epochs are logged
            quiet,
            say=lambda line: logger.log(level, "%s", line),
        )
    except Interrupted as interruption:
        if interruption.signal_number != SIGINT:
            raise
        advice = f"; resume=True continues {run.folder.path}" if interruption.can_resume else ""
        raise KeyboardInterrupt(f"stopped{advice}") from None
    return run.folder


@contextmanager
def _state_of_torch_kept() -> Iterator[None]:
    """Leave random numbers, threads and switches as they were."""
    benchmark, num_threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(num_threads)
