"""``unet3d convert`` as a user meets it."""

from pathlib import Path

import pytest
import torch

from tests.command_line import refusal, run
from tests.networks import write_checkpoint
from tests.nnunet.models import archive_of, write_model
from unet3d.nnunet.reading import load_model
from unet3d.runs.checkpoint import load_checkpoint

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def names_in(folder: str, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in Path(folder).glob(pattern))


def test_a_model_becomes_a_checkpoint(capsys):
    model = write_model(Path(NAME), 0)
    assert run("convert", NAME, "-o", "model.pt") == 0
    out = capsys.readouterr().out
    assert out == f"{NAME}/fold_0/checkpoint_final.pth -> model.pt\n"
    read = load_model(model / "fold_0/checkpoint_final.pth")
    assert load_checkpoint(Path("model.pt")).preprocessing == read.preprocessing
    assert run("convert", NAME, "-o", "model.pt", "--overwrite") == 0


def test_folds_need_a_folder(capsys):
    write_model(Path(NAME), 0, 2)
    said = refusal(capsys, "convert", NAME, "-o", "model.pt")
    assert "it has 2 folds, and model.pt takes one network; name a fold with --folds" in said
    assert run("convert", NAME, "--folds", "2", "-o", "model.pt") == 0
    assert run("convert", NAME, "-o", "models") == 0
    assert names_in("models") == ["fold_0.pt", "fold_2.pt"]
    said = refusal(capsys, "convert", NAME, "-o", "models")
    assert "models/fold_0.pt exists; add --overwrite" in said


def test_an_archive_is_unpacked_and_its_copy_removed(capsys, monkeypatch):
    scratch = Path("temporary").absolute()
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


def test_there_and_back(capsys):
    write_model(Path(NAME), 0, 1)
    assert run("convert", NAME, "-o", "models") == 0
    assert run("convert", "models", "--to", "nnunet", "-o", "back") == 0
    for fold in (0, 1):
        before = load_model(Path(f"{NAME}/fold_{fold}/checkpoint_final.pth"))
        after = load_model(Path(f"back/fold_{fold}/checkpoint_final.pth"))
        assert after.preprocessing == before.preprocessing
        assert all(after.model[name].equal(value) for name, value in before.model.items())
    said = refusal(capsys, "convert", "models", "--to", "nnunet", "-o", "back")
    assert "back exists; add --overwrite to replace it" in said


@pytest.mark.parametrize("folds", [(2, 3), ("all",)])
def test_folds_keep_their_numbers(folds, capsys):
    write_model(Path(NAME), 0, *folds)
    chosen = ("--folds", ",".join(map(str, folds)))
    names = [f"fold_{fold}" for fold in folds]
    assert run("convert", NAME, *chosen, "-o", "models") == 0
    assert sorted(path.stem for path in Path("models").iterdir()) == names
    for source, output in (("models", "back"), (NAME, "copy")):
        words = chosen if source == NAME else ()
        assert run("convert", source, *words, "--to", "nnunet", "-o", output) == 0
        assert names_in(output, "fold_*") == names
        for fold in folds:
            content = torch.load(f"{output}/fold_{fold}/checkpoint_final.pth", weights_only=False)
            assert content["init_args"]["fold"] == fold


def test_networks_are_numbered_as_they_are_named(capsys):
    write_model(Path(NAME), 0, 1)
    assert run("convert", NAME, "-o", "models") == 0
    # Files of one folder keep their names.
    assert run("convert", "models", "-o", "copies") == 0
    for name in ("fold_0.pt", "fold_1.pt"):
        before, after = (load_checkpoint(Path(where, name)).model for where in ("models", "copies"))
        assert all(after[key].equal(value) for key, value in before.items())
    # Those without a number are counted.
    Path("copies/fold_1.pt").rename("copies/other.pt")
    assert run("convert", "copies", "--to", "nnunet", "-o", "counted") == 0
    assert names_in("counted", "fold_*") == ["fold_0", "fold_1"]
    # Those of a run have the number of their folder.
    for old, fold in ((0, 1), (1, 4)):
        Path(f"run/fold{fold}").mkdir(parents=True)
        Path(f"models/fold_{old}.pt").rename(f"run/fold{fold}/checkpoint-best.pt")
    assert run("convert", "run", "--to", "nnunet", "-o", "of run") == 0
    assert names_in("of run", "fold_*") == ["fold_1", "fold_4"]


def test_only_a_model_is_replaced(capsys):
    write_model(Path(NAME), 0, 1)
    to_nnunet = ("convert", NAME, "--to", "nnunet", "--overwrite", "-o")
    assert run(*to_nnunet, "back") == 0
    assert run(*to_nnunet, "back", "--folds", "1") == 0
    assert names_in("back") == [
        "dataset.json",
        "fold_1",
        "plans.json",
    ]
    assert names_in(".") == sorted(["back", NAME])
    Path("mine").mkdir()
    Path("mine/precious").touch()
    Path("link").symlink_to("back")
    for name in ("mine", "link"):
        said = refusal(capsys, *to_nnunet, name)
        assert f"{name} exists, and is no folder of a model; choose another --output" in said
    assert Path("mine/precious").exists()
    for name in (NAME, ".", f"{NAME}/fold_0"):  # it is read from there
        assert "is no place for the results" in refusal(capsys, *to_nnunet, name)
    assert Path(NAME, "fold_0/checkpoint_final.pth").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-o", "model.pth"), "model.pth ends in .pth; name a file *.pt, or a folder"),
        (("-o", "model.PT"), "model.PT ends in .PT; name a file *.pt"),
        (("-o", "model.zip"), "model.zip ends in .zip"),
        (("-o", "model.nii.gz"), "model.nii.gz is no place for the results"),
        (("--to", "nnunet", "-o", "model.pt"), "model.pt ends in .pt; name a folder with --output"),
        (("--to", "nnunet", "-o", "model.zip"), "model.zip ends in .zip; name a folder"),
    ],
)
def test_folders_are_not_named_like_files(words, message, capsys):
    write_model(Path(NAME), 0)
    assert message in refusal(capsys, "convert", NAME, *words)
    assert names_in(".") == [NAME]


def test_a_folder_may_have_a_dot_in_its_name(capsys):
    write_model(Path(NAME), 0)
    assert run("convert", NAME, "-o", "models.v2") == 0
    assert run("convert", NAME, "--to", "nnunet", "-o", "back.v2") == 0
    assert Path("models.v2").is_dir() and Path("back.v2").is_dir()
    write_checkpoint(Path("model.pt"))  # in no folder, it keeps its name
    assert run("convert", "model.pt", "-o", "copies") == 0
    assert names_in("copies") == ["model.pt"]


def test_what_cannot_be_converted(capsys):
    write_checkpoint(Path("model.pt"))
    said = refusal(capsys, "convert", "model.pt", "--to", "nnunet", "-o", "model")
    assert "nnU-Net cannot predict with this network: each image keeps its own spacing" in said
    assert not Path("model").exists()
    assert "no such file" in refusal(capsys, "convert", "none.pth", "-o", "a.pt").lower()
    said = refusal(capsys, "convert", "model.pt", "-o", "missing/a.pt")
    assert "cannot write missing/a.pt" in said


@pytest.mark.parametrize("folds", ["0,x", "-1", "", "all,0"])
def test_folds_that_are_none(folds, capsys):
    assert run("convert", "model", "--folds", folds, "-o", "a.pt") == 2
    assert "names no folds" in capsys.readouterr().err
