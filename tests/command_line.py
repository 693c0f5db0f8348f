"""Run the command line in the tests' process, where warnings are errors, or in a new one."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml

from unet3d.cli.app import main
from unet3d.distributed.commands import import_variables

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

SMALL = (
    *("--devices", "cpu", "--epochs", "1", "--set", "data.num_workers=0"),
    *("--set", "patches.size=8,8,8", "--set", "training.steps_per_epoch=2"),
    *("--set", "model.base_channels=4", "--set", "model.num_levels=2"),
    *("--set", "training.batch_size=2"),
)
"""Options with which ``unet3d train`` takes a second."""


def run(*arguments: object) -> int:
    """Return the exit status of ``unet3d ARGUMENTS``."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ending:
        return ending.code


def in_a_process(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``unet3d ARGUMENTS`` as a user does."""
    command = [sys.executable, "-W", "error", "-m", "unet3d", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=process_environment(), timeout=120, **more
    )


def process_environment():
    """Return the environment of a process without a GPU that imports what the tests import."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **import_variables(), **own}


def error_line(errors: str) -> str:
    """Return the line of the only error on stderr, after checking that it is an explained one."""
    (line,) = errors.splitlines()
    assert line.startswith("Error: "), line
    return line


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run ``unet3d ARGUMENTS``, which must fail, and return its one line of error."""
    capsys.readouterr()
    assert run(*arguments) == 1
    return error_line(capsys.readouterr().err)


def settings_of(run_folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``config.yaml``."""
    return yaml.safe_load((run_folder / "config.yaml").read_text())


def names_in(folder: Path | str, pattern: str = "*") -> list[str]:
    """Return the names of a folder's files, sorted."""
    return sorted(path.name for path in Path(folder).glob(pattern))


def labels_of(path: Path | str) -> np.ndarray:
    """Return the label map in a file."""
    return np.asarray(nib.load(path).dataobj)


def scan_array(shape: tuple[int, int, int] = (14, 13, 12), seed: int = 0) -> np.ndarray:
    """Return an image of noise."""
    return np.random.default_rng(seed).normal(100, 20, shape).astype(np.float32)


def wait_until(is_so, process):
    """Wait until a condition holds; fail if the process ends first."""
    deadline = time.monotonic() + 100
    while not is_so():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
