"""``unet3d convert`` as a user meets it."""

from pathlib import Path

import pytest

from tests.command_line import refusal, run
from tests.networks import write_checkpoint
from tests.nnunet.models import archive_of, write_model
from unet3d.nnunet.reading import load_model
from unet3d.runs.checkpoint import load_checkpoint

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def test_a_model_becomes_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(Path(NAME), 0)
    assert run("convert", NAME, "-o", "model.pt") == 0
    out = capsys.readouterr().out
    assert out == f"{NAME}/fold_0/checkpoint_final.pth -> model.pt\n"
    read = load_model(model / "fold_0/checkpoint_final.pth")
    assert load_checkpoint(Path("model.pt")).preprocessing == read.preprocessing
    assert run("convert", NAME, "-o", "model.pt", "--overwrite") == 0


def test_folds_need_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(Path(NAME), 0, 2)
    said = refusal(capsys, "convert", NAME, "-o", "model.pt")
    assert "it has 2 folds, and model.pt takes one network; name a fold with --folds" in said
    assert run("convert", NAME, "--folds", "2", "-o", "model.pt") == 0
    assert run("convert", NAME, "-o", "models") == 0
    assert sorted(path.name for path in Path("models").iterdir()) == ["fold_0.pt", "fold_2.pt"]
    said = refusal(capsys, "convert", NAME, "-o", "models")
    assert "models/fold_0.pt exists; add --overwrite" in said


def test_an_archive_is_unpacked_and_its_copy_removed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = folder / "temporary"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    model = write_model(Path(NAME), 0)
    archive_of(model, Path("model.zip"))
    assert run("convert", "model.zip", "-o", "model.pt") == 0
    name = f"model.zip/Dataset001_Phantoms/{NAME}/fold_0/checkpoint_final.pth"
    assert capsys.readouterr().out == f"{name} -> model.pt\n"
    assert not list(scratch.iterdir())
    assert run("convert", name, "-o", "same.pt") == 0
    before, after = (load_checkpoint(Path(file)).model for file in ("model.pt", "same.pt"))
    assert all(after[key].equal(value) for key, value in before.items())


def test_there_and_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(Path(NAME), 0, 1)
    assert run("convert", NAME, "-o", "models") == 0
    assert run("convert", "models", "--to", "nnunet", "-o", "back") == 0
    for fold in (0, 1):
        before = load_model(Path(f"{NAME}/fold_{fold}/checkpoint_final.pth"))
        after = load_model(Path(f"back/fold_{fold}/checkpoint_final.pth"))
        assert after.preprocessing == before.preprocessing
        assert all(after.model[name].equal(value) for name, value in before.model.items())
    said = refusal(capsys, "convert", "models", "--to", "nnunet", "-o", "back")
    assert "back exists; choose another --output" in said


def test_what_cannot_be_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(folder / "model.pt")
    said = refusal(capsys, "convert", "model.pt", "--to", "nnunet", "-o", "model")
    assert "nnU-Net cannot predict with this network: each image keeps its own spacing" in said
    assert not Path("model").exists()
    assert "no such file" in refusal(capsys, "convert", "none.pth", "-o", "a.pt").lower()
    said = refusal(capsys, "convert", "model.pt", "-o", "missing/a.pt")
    assert "cannot write missing/a.pt" in said


@pytest.mark.parametrize("folds", ["0,x", "-1", "", "all,0"])
def test_folds_that_are_none(folder: Path, folds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "model", "--folds", folds, "-o", "a.pt") == 2
    assert "names no folds" in capsys.readouterr().err


def test_files_of_one_folder_keep_their_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path(NAME), 0, 1)
    assert run("convert", NAME, "-o", "models") == 0
    assert run("convert", "models", "-o", "copies") == 0
    for name in ("fold_0.pt", "fold_1.pt"):
        before, after = (load_checkpoint(Path(where, name)).model for where in ("models", "copies"))
        assert all(after[key].equal(value) for key, value in before.items())
