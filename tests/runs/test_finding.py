"""Finding runs and checkpoints by the names of folders."""

import os

import pytest

from unet3d.errors import CheckpointError
from unet3d.runs.finding import checkpoints_in, chosen_folds, newest_run
from unet3d.runs.run_folder import RunFolder, folds_in


def put_run(folder, name, begun, finished):
    run = RunFolder(folder / "runs" / name)
    run.create()
    run.write_data({"number": begun})
    for path, time in ((run.latest, begun), (run.summary, finished)):
        if time is not None:
            path.write_text("x")
            os.utime(path, (time, time))


def name_of(run):
    return None if run is None else run.path.name


def test_the_newest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_run(finished=True) is None
    (tmp_path / "runs").mkdir()
    assert newest_run(finished=False) is None
    (tmp_path / "runs" / "notes.txt").write_text("no run")
    put_run(tmp_path, "empty", None, None)
    assert newest_run(finished=False) is None
    put_run(tmp_path, "z-old", 100, 200)
    put_run(tmp_path, "b-finished-last", 300, 900)
    put_run(tmp_path, "c-finished-first", 350, 800)
    put_run(tmp_path, "a-going-on", 1000, None)
    assert name_of(newest_run(finished=True)) == "b-finished-last"
    assert name_of(newest_run(finished=False)) == "a-going-on"
    old = newest_run(finished=False, suits=lambda run: (run.read_data() or {})["number"] < 350)
    assert name_of(old) == "b-finished-last"
    assert newest_run(finished=False, suits=lambda run: False) is None
    (tmp_path / "runs" / "loop").symlink_to("loop")
    assert name_of(newest_run(finished=False)) == "a-going-on"


def test_a_run_over_folds_is_as_new_as_its_newest_fold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put_run(tmp_path, "one", 500, 500)
    put_run(tmp_path, "folds/fold0", 400, 400)
    assert name_of(newest_run(finished=False)) == "one"
    put_run(tmp_path, "folds/fold3", 600, None)
    assert name_of(newest_run(finished=False)) == "folds"
    assert name_of(newest_run(finished=True)) == "one"
    (tmp_path / "runs/folds/summary.json").write_text("{}")
    assert name_of(newest_run(finished=True)) == "folds"


def test_folds_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("fold10", "fold9", "fold0", "fold", "folds", "fold1b", "validation"):
        (tmp_path / name).mkdir()
    assert {number: run.path.name for number, run in folds_in(tmp_path).items()} == {
        0: "fold0",
        9: "fold9",
        10: "fold10",
    }
    assert folds_in(tmp_path / "fold0" / "absent") == {}


def names_in(path):
    return [str(file.relative_to(path)) for file in checkpoints_in(path)]


def test_an_unfinished_run_is_named_but_not_a_copied_checkpoint(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.latest.touch()
    assert checkpoints_in(tmp_path) == (run.latest,)
    run.data.write_text("{}")
    assert caplog.messages == []
    assert checkpoints_in(tmp_path) == (run.latest,)
    assert caplog.messages == [f"{tmp_path}: training has not finished"]
    run.summary.write_text("{}")
    assert checkpoints_in(tmp_path) == (run.latest,) and len(caplog.messages) == 1


def test_a_folder_stands_for_one_checkpoint_of_each_fold(tmp_path, caplog):
    for fold in (0, 2, 10):
        put_run(tmp_path, f"mine/fold{fold}", 1, None)
    mine = tmp_path / "runs" / "mine"
    for fold in (0, 10):
        (mine / f"fold{fold}" / "summary.json").write_text("{}")
    (mine / "fold3").mkdir()  # a fold that has not begun
    files = [f"fold{fold}/checkpoint-latest.pt" for fold in (0, 2, 10)]
    assert names_in(mine) == files
    assert caplog.messages == [f"{mine}: training of fold2, fold3 has not finished"]


def test_a_folder_of_checkpoints_stands_for_all_of_them(tmp_path):
    with pytest.raises(CheckpointError, match="nor another file ..pt"):
        checkpoints_in(tmp_path)
    for name in ("b.pt", "a.pt", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "c.pt").mkdir()
    assert names_in(tmp_path) == ["a.pt", "b.pt"]
    assert checkpoints_in(tmp_path / "b.pt") == (tmp_path / "b.pt",)
    # A run selects one checkpoint, whatever other files it has.
    put_run(tmp_path, "run", 1, None)
    (tmp_path / "runs/run/other.pt").touch()
    assert names_in(tmp_path / "runs/run") == ["checkpoint-latest.pt"]


@pytest.mark.parametrize(
    ("given", "folds"),
    [(None, None), (["all"], None), (0, (0,)), ("2,0,2", (2, 0)), (["0", 1], (0, 1))],
    ids=repr,
)
def test_folds_are_given_as_numbers_or_text(given, folds):
    assert chosen_folds(given) == folds


@pytest.mark.parametrize("given", ["all,0", -1, "0,", [True], ["1,2"], "12345"], ids=repr)
def test_what_names_no_folds_is_refused(given):
    with pytest.raises(ValueError, match="names no folds; give numbers such as 0,2, or all"):
        chosen_folds(given)
