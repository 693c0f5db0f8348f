"""Which run is continued, and errors that are found before PyTorch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import process_environment
from tests.images.samples import write_msd
from unet3d.config import Config
from unet3d.errors import ConfigError
from unet3d.runs.run_folder import RunFolder
from unet3d.training.request import Request, run_to_resume


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun_run(name, seconds, dataset, is_saved=True):
    """Create the files of a run that are read to choose it."""
    run = RunFolder(Path("runs") / name)
    run.path.mkdir(parents=True)
    run.write_config(Config())
    run.write_data({"dataset": None if dataset is None else str(dataset)})
    if is_saved:
        run.latest.touch()
    for file in run.path.iterdir():
        os.utime(file, (seconds, seconds))
    return run.path


def chosen(dataset=None, output=None, **options):
    changes = {} if dataset is None else {"data.dataset": dataset}
    return run_to_resume(Request(changes=changes, output=output), **options).path


def test_the_newest_run_of_a_data_set_is_found(here):
    for name in ("a", "b"):
        (here / name).mkdir()
        (here / name / "dataset.json").touch()
    begun_run("old-a", 100, here / "a")
    new_a = begun_run("new-a", 200, here / "a" / "dataset.json")
    b = begun_run("b", 300, here / "b")
    killed = begun_run("killed before its first checkpoint", 500, None, is_saved=False)
    begun_run("phantom", 400, None)
    assert chosen() == killed
    assert chosen(here / "a") == chosen(here / "a" / "dataset.json") == new_a
    assert chosen(Path("b")) == b
    assert chosen(here / "a", output=b) == b  # the named folder decides
    (b / "folds.json").write_text('{"folds": [0]}')
    assert chosen(over_folds=True) == b


def test_without_any_run_it_is_said(here):
    for options, words in (
        ({}, "in runs"),
        ({"dataset": here}, f"in runs that was made with {here}"),
        ({"output": Path("x")}, "in x"),
    ):
        with pytest.raises(ConfigError, match=f"there is no run to resume {words}; name one with"):
            chosen(**options)


REFUSED = """
import ast, sys
from unet3d.cli.app import main
for words in ast.literal_eval(sys.argv[1]):
    try:
        main(["train", *words])
    except SystemExit as ending:
        assert ending.code == 1, words
assert "torch" not in sys.modules
"""


def test_what_pytorch_is_not_needed_for_is_refused_without_it(here):
    data = write_msd(here / "data", num_cases=5)
    run = RunFolder(begun_run("old", 100, data))
    run.write_config(Config().with_values({"data.dataset": str(data)}))
    refused = {
        ("--resume", "--set", "training.epohcs=3"): "did you mean training.epochs?",
        ("--resume", "--fold", "7"): "data has folds 0 to 4, not fold 7",
        ("data", "--fold", "7"): "data has folds 0 to 4, not fold 7",
        ("data", "--folds", "0,7"): "--folds names fold 7, but there are 5, counted from 0",
        ("--resume", "--output", "elsewhere"): "there is no run to resume in elsewhere",
    }
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(list(refused))],
        capture_output=True,
        text=True,
        env=process_environment(),
    )
    assert done.returncode == 0, done.stderr
    for line, said in zip(done.stderr.splitlines(), refused.values(), strict=True):
        assert line.startswith("Error: ") and said in line
