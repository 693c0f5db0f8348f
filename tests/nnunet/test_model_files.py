"""Which networks a path selects."""

import errno
import os
import re
import shutil
from contextlib import ExitStack
from unittest import mock

import pytest

from tests.networks import random_checkpoint
from tests.nnunet.models import archive_of, write_model
from unet3d.errors import CheckpointError
from unet3d.nnunet.model_files import known_as, network_in, networks_in
from unet3d.runs.checkpoint import save_checkpoint
from unet3d.runs.run_folder import RunFolder

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def touched(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def model_of(folder, *folds):
    """Create the files of a model, with content that is never read."""
    files = [f"fold_{fold}/checkpoint_{which}.pth" for fold in folds for which in ("final", "best")]
    for name in ("plans.json", "dataset.json", *files):
        touched(folder / name)
    return folder


def names(paths):
    assert all(path.name == "checkpoint_final.pth" for path in paths)
    return [path.parent.name for path in paths]


def test_folds_of_a_model(tmp_path):
    model = model_of(tmp_path / NAME, 0, 1, 10, 2, "all")
    touched(model / "fold_3" / "checkpoint_best.pth")  # training has not ended
    assert names(networks_in(model)) == ["fold_0", "fold_1", "fold_2", "fold_10"]
    assert names(networks_in(model, [2, 0])) == ["fold_2", "fold_0"]
    assert names(networks_in(model / "fold_all")) == ["fold_all"]
    assert names(networks_in(model / "fold_1", [1])) == ["fold_1"]
    best = model / "fold_1" / "checkpoint_best.pth"
    assert networks_in(best) == (best,)
    assert names(networks_in(model / "fold_1")) == ["fold_1"]
    # The fold on all cases is used if there is no other.
    assert names(networks_in(model_of(tmp_path / "other" / NAME, "all"))) == ["fold_all"]


def test_training_starts_from_one_fold_of_a_model(tmp_path):
    model = model_of(tmp_path / NAME, 0, 1)
    assert names([network_in(model / "fold_1")]) == ["fold_1"]
    with pytest.raises(CheckpointError, match=r"several checkpoints: .*fold_0/.*; name one of"):
        network_in(model)
    assert names([network_in(model_of(tmp_path / "other" / NAME, 0))]) == ["fold_0"]
    archive_of(model, tmp_path / "Task.zip")
    with pytest.raises(CheckpointError, match=r"Task.zip is an archive; unpack it, and name its"):
        network_in(tmp_path / "Task.zip")


def test_the_folder_of_a_data_set_with_one_model(tmp_path):
    folder = tmp_path / "Dataset001_Phantoms"
    model_of(folder / NAME, 0)
    model_of(folder / "nnUNetTrainer__nnUNetPlans__2d", 0)
    assert names(networks_in(folder)) == ["fold_0"]
    model_of(folder / "nnUNetTrainer__nnUNetPlans__3d_lowres", 0)
    with pytest.raises(CheckpointError, match="has several models: .*3d_fullres.*3d_lowres"):
        networks_in(folder)


def test_folds_that_are_not_there(tmp_path):
    model = model_of(tmp_path / NAME, 0, "all")
    for place, folds, said in (
        (model, [3], "has no fold 3; it has 0, all"),
        (model_of(tmp_path / "empty"), None, "there is no checkpoint_final.pth in .*; train it"),
        (model / "fold_0", [1], "fold_0 has no fold 1; it has 0"),
        (model / "fold_0/checkpoint_final.pth", [1], "has no fold 1; it has 0"),
        (model / "fold_all", [0], "fold_all has no fold 0; it has all"),
    ):
        with pytest.raises(CheckpointError, match=said):
            networks_in(place, folds)


def test_networks_of_ours_are_found_as_before(tmp_path):
    run = tmp_path / "run"
    for fold in (0, 1):
        (run / f"fold{fold}").mkdir(parents=True)
        save_checkpoint(random_checkpoint(), run / f"fold{fold}" / "checkpoint-latest.pt")
        (run / f"fold{fold}" / "summary.json").write_text("{}")
    found = networks_in(run)
    assert [path.parent.name for path in found] == ["fold0", "fold1"]
    assert networks_in(run, [1]) == found[1:] and networks_in(found[0]) == found[:1]
    for place, fold, said in (
        (run, 2, "has no fold 2; it has 0, 1"),
        (found[0], 1, "has no fold 1; it has 0"),
        (run / "fold0", 1, "fold0 has no fold 1; it has 0"),
    ):
        with pytest.raises(CheckpointError, match=said):
            networks_in(place, [fold])


def test_a_run_of_one_fold_answers_to_its_number(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    save_checkpoint(random_checkpoint(), run.latest)
    for fold, known in ((3, 3), ("none", None)):
        run.write_data({"fold": fold})
        for path in (run.path, run.latest):
            assert networks_in(path) == (run.latest,)
            if known is not None:
                assert networks_in(path, [known]) == (run.latest,)
            with pytest.raises(CheckpointError, match=f"no fold 0; it has {known or 'all'}$"):
                networks_in(path, [0])
    shutil.copy(run.latest, run.path / "checkpoint-best.pt")
    assert networks_in(run.path, None) == (run.latest,)


def test_checkpoints_that_are_named_after_folds(tmp_path):
    for fold in (0, 2):
        save_checkpoint(random_checkpoint(), tmp_path / f"fold_{fold}.pt")
    assert networks_in(tmp_path, [2]) == (tmp_path / "fold_2.pt",)
    with pytest.raises(CheckpointError, match="has no fold 1; it has 0, 2"):
        networks_in(tmp_path, [1])


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """An exit stack that removes unpacked archives; they are in the folder ``temporary``."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with ExitStack() as stack:
        yield stack
    assert not list(folder.iterdir())


def test_an_archive_is_unpacked(tmp_path, stack):
    model = write_model(tmp_path / NAME, 0, 1)
    (model / "fold_0" / "progress.png").write_bytes(b"picture")
    archive, temporary = archive_of(model, tmp_path / "model.zip"), tmp_path / "temporary"
    found = networks_in(archive, None, stack)
    assert names(found) == ["fold_0", "fold_1"]
    for name in ("plans.json", "dataset.json", "fold_1/checkpoint_final.pth"):
        assert (found[1].parents[1] / name).read_bytes() == (model / name).read_bytes()
    assert not list(temporary.rglob("progress.png"))
    assert names(networks_in(archive, [1], stack)) == ["fold_1"]
    # The archive may hold the model's files at its root.
    path = tmp_path / "other.ZIP"
    shutil.move(shutil.make_archive(str(tmp_path / "other"), "zip", model), path)
    assert known_as(networks_in(path, None, stack)[0]) == path / "fold_0" / "checkpoint_final.pth"


def test_a_place_in_an_archive_may_be_named(tmp_path, stack):
    folder = tmp_path / "Dataset001_Phantoms"
    model_of(folder / NAME, 0, 1)
    model_of(folder / "nnUNetTrainer__nnUNetPlans__3d_lowres", 0)
    archive = archive_of(folder, tmp_path / "model.zip", prefix="")
    inside = archive / "Dataset001_Phantoms"
    fold = inside / NAME / "fold_1"
    assert names(networks_in(inside / NAME, [1], stack)) == ["fold_1"]
    assert names(networks_in(fold, None, stack)) == ["fold_1"]
    for file in ("checkpoint_final.pth", "checkpoint_best.pth"):
        (found,) = networks_in(fold / file, None, stack)
        assert (found.name, known_as(found)) == (file, fold / file)
        assert (found.parents[1] / "plans.json").is_file()
    models = f"{inside / NAME}, {inside}/nnUNetTrainer__nnUNetPlans__3d_lowres;"
    for place, folds, message in (
        (archive, None, f"has several models: {re.escape(models)}"),
        (fold, [0], "fold_1 has no fold 0; it has 1"),
        (inside / NAME / "fold_7", None, r"model\.zip/.*/fold_7 has no plans\.json"),
        (archive / "elsewhere", None, r"model\.zip/elsewhere has no plans\.json"),
    ):
        with pytest.raises(CheckpointError, match=message):
            networks_in(place, folds, stack)


def test_checkpoints_that_are_not_the_final_ones_are_named(tmp_path, stack):
    model = model_of(tmp_path / NAME)
    best = touched(model / "fold_0" / "checkpoint_best.pth")
    archive = archive_of(model, tmp_path / "model.zip")
    inside = archive / "Dataset001_Phantoms" / NAME / "fold_0" / best.name
    for place, one in (
        (model, best),
        (archive, inside),
        (best.parent, best),
        (inside.parent, inside),
    ):
        missing = f"no checkpoint_final.pth in .*; name what it has: {re.escape(str(one))}$"
        with pytest.raises(CheckpointError, match=missing):
            networks_in(place, None, stack)
        assert len(networks_in(one, None, stack)) == 1
    touched(model / "fold_1" / "checkpoint_final.pth")
    with pytest.raises(CheckpointError, match="has no fold 0; it has 1$"):
        networks_in(model, [0])


def test_archives_that_cannot_be_used(tmp_path, stack, monkeypatch):
    empty, broken = archive_of(tmp_path / "none", tmp_path / "e.zip"), tmp_path / "broken.zip"
    broken.write_bytes(b"PK\3\4 and no more")
    archive = archive_of(write_model(tmp_path / NAME, 0), tmp_path / "model.zip")
    with pytest.raises(CheckpointError, match=r"has no plans\.json"):
        networks_in(empty, None, stack)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("zipfile.ZipFile.extractall", full)
    for path, where, message in (
        (broken, stack, "is damaged"),
        (archive, None, "unpack it, and name its folder"),
        (archive, stack, "cannot unpack .*: No space left on device; TMPDIR may name"),
    ):
        with pytest.raises(CheckpointError, match=message):
            networks_in(path, None, where)
