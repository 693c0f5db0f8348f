"""Which run is continued, and with which settings."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.images.samples import write_msd
from tests.networks import write_checkpoint
from unet3d.config import Config, load_config
from unet3d.datasets.dataset import load_dataset
from unet3d.errors import CheckpointError, ConfigError, DatasetError
from unet3d.preparation.cache import Cache
from unet3d.runs.case_split import CaseSplit
from unet3d.runs.run_folder import RunFolder
from unet3d.training.earlier_runs import recorded_settings, run_to_resume


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun_run(name, seconds, dataset, with_record=True):
    """Make a run as far as it is looked at to choose it."""
    run = RunFolder(Path("runs") / name)
    run.path.mkdir(parents=True)
    config = Config() if dataset is None else load_config(None, [f"data.dataset={dataset}"])
    run.write_config(config)
    if with_record:
        cases = () if dataset is None else load_dataset(dataset).cases
        split = CaseSplit.of(cases[:-1], cases[-1:], Cache(Path("cache")))
        run.write_data({"dataset": None if dataset is None else str(dataset), **asdict(split)})
    run.latest.touch()
    os.utime(run.latest, (seconds, seconds))
    return run.path


def test_the_newest_run_of_a_data_set_is_found_wherever_that_is_now(here):
    for number, name in enumerate(("a", "b", "c", "d")):
        write_msd(here / name, shape=(8, 8, 8 + number))
    begun_run("old-a", 100, here / "a")
    new_a = begun_run("new-a", 200, here / "a")
    b = begun_run("b", 300, here / "b")
    phantom = begun_run("phantom", 400, None)
    old_c = begun_run("c", 250, here / "c", with_record=False)
    cache = Path("cache")
    assert run_to_resume(None).path == phantom
    assert run_to_resume(None, here / "a", cache).path == new_a
    assert run_to_resume(None, here / "a" / "dataset.json", cache).path == new_a
    assert run_to_resume(None, Path("b"), cache).path == b
    assert run_to_resume(None, here / "c", cache).path == old_c
    (here / "a").rename(here / "moved")
    assert run_to_resume(None, here / "moved", cache).path == new_a
    with pytest.raises(ConfigError, match="no run in runs was made with .*d; name one with --out"):
        run_to_resume(None, here / "d", cache)
    with pytest.raises(DatasetError, match="there is no data set at"):
        run_to_resume(None, here / "nowhere", cache)
    assert run_to_resume(b, here / "d", cache).path == b  # the folder is named


def test_a_damaged_record_makes_no_run_of_the_data_set(here):
    write_msd(here / "a")
    path = begun_run("run", 100, None)
    for record in (
        *("", "[]", "{}", '{"unet3d": "1", "dataset": 7}'),
        '{"unet3d": "1", "training": {"a": 1}}',
    ):
        (path / "data.json").write_text(record)
        with pytest.raises(ConfigError, match="no run in runs was made with"):
            run_to_resume(None, here / "a", Cache(Path("cache")))


def test_without_any_run_it_is_said(here):
    for arguments in ((None,), (None, here), (Path("x"),)):
        with pytest.raises(ConfigError, match=r"there is no run to resume in (runs|x); start one"):
            run_to_resume(*arguments)


@pytest.mark.parametrize("damage", [b"\0" * 9, b"\xff\xfe", b"", b"data: [", "half", None])
def test_settings_are_taken_from_the_checkpoint_where_their_file_is_damaged(here, damage, caplog):
    run = RunFolder(here / "run")
    write_checkpoint(run.latest)
    run.write_config(load_config(None, ["training.epochs=7"]))
    with recorded_settings(run) as path:
        assert load_config(path).training.epochs == 7
    assert not caplog.records
    text = run.config.read_bytes()
    run.config.unlink()
    if damage is not None:
        run.config.write_bytes(text[: text.index(b"parallel:")] if damage == "half" else damage)
    with recorded_settings(run) as path:
        assert load_config(path).training.epochs == 250
    (warning,) = caplog.messages
    assert "run/config.yaml is damaged (" in warning and "checkpoint-latest.pt are used" in warning
    run.config.write_bytes(text.replace(b"epochs: 7", b"epochs: many"))  # somebody wrote it wrong
    with pytest.raises(ConfigError, match="training.epochs is 'many'"), recorded_settings(run):
        pass
    run.config.write_bytes(b"")
    run.latest.write_bytes(b"damaged too")
    with pytest.raises(CheckpointError), recorded_settings(run):
        pass
