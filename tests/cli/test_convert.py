"""``unet3d convert`` as a user meets it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.command_line import names_in, refusal, run
from tests.networks import write_checkpoint
from tests.nnunet.models import archive_of, write_model
from unet3d.nnunet.loading import load_network
from unet3d.runs.checkpoint import load_checkpoint, save_checkpoint
from unet3d.runs.run_folder import RunFolder

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def test_a_model_becomes_a_checkpoint_and_several_folds_a_folder(capsys):
    model = write_model(Path(NAME), 0, 2)
    assert run("convert", NAME, "--folds", "0", "-o", "model.pt") == 0
    out = capsys.readouterr().out
    assert out == f"{NAME}/fold_0/checkpoint_final.pth -> model.pt\n"
    read = load_network(model / "fold_0/checkpoint_final.pth")
    assert load_checkpoint(Path("model.pt")).preprocessing == read.preprocessing
    said = refusal(capsys, "convert", NAME, "-o", "other.pt")
    assert "the model has 2 folds, but other.pt holds one network; name a fold with --folds" in said
    assert run("convert", NAME, "--folds", "2", "-o", "model.pt", "--overwrite") == 0
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
    assert not list(scratch.glob(".unfinished-*"))
    assert run("convert", name, "-o", "same.pt") == 0


@pytest.mark.parametrize("folds", [(2, 3), ("all",)])
def test_folds_keep_their_numbers_and_weights_there_and_back(folds, capsys):
    write_model(Path(NAME), 0, *folds)
    names = [f"fold_{fold}" for fold in folds]
    chosen = (NAME, "--folds", "2,3") if folds != ("all",) else (f"{NAME}/fold_all",)
    assert run("convert", *chosen, "-o", "models") == 0
    assert names_in("models") == [f"{name}.pt" for name in names]
    for source, output in ((("models",), "back"), (chosen, "copy")):
        assert run("convert", *source, "--to", "nnunet", "-o", output) == 0
        assert names_in(output, "fold_*") == names
        for fold in folds:
            path = Path(output, f"fold_{fold}/checkpoint_final.pth")
            content = torch.load(path, weights_only=False)
            assert content["init_args"]["fold"] == fold
            before, after = load_network(Path(NAME, *path.parts[1:])), load_network(path)
            assert after.preprocessing == before.preprocessing
            assert all(after.model[name].equal(value) for name, value in before.model.items())
    said = refusal(capsys, "convert", "models", "--to", "nnunet", "-o", "back")
    assert "back exists; add --overwrite to replace it" in said


def test_networks_are_numbered_as_they_are_named(capsys):
    write_model(Path(NAME), 0, 1)
    assert run("convert", NAME, "-o", "models") == 0
    Path("models/fold_1.pt").rename("models/other.pt")
    # Files of one folder keep their names.
    assert run("convert", "models", "-o", "copies") == 0
    assert names_in("copies") == ["fold_0.pt", "other.pt"]
    # Files without a number are counted.
    assert run("convert", "copies", "--to", "nnunet", "-o", "counted") == 0
    assert names_in("counted", "fold_*") == ["fold_0", "fold_1"]
    # Checkpoints of a run over folds have the number of their folder.
    for old, fold in (("fold_0", 1), ("other", 4)):
        Path(f"run/fold{fold}").mkdir(parents=True)
        Path(f"models/{old}.pt").rename(f"run/fold{fold}/checkpoint-best.pt")
    assert run("convert", "run", "--to", "nnunet", "-o", "of run") == 0
    assert names_in("of run", "fold_*") == ["fold_1", "fold_4"]
    # The checkpoint of a single run has the fold that the run records.
    for fold, name in (("none", "fold_all"), (3, "fold_3")):
        run_folder = RunFolder(Path(f"run of {fold}"))
        run_folder.create()
        Path("run/fold1/checkpoint-best.pt").rename(run_folder.best)
        run_folder.write_data({"fold": fold})
        assert run("convert", run_folder.path, "--to", "nnunet", "-o", f"model {fold}") == 0
        assert names_in(f"model {fold}", "fold_*") == [name]
        run_folder.best.rename("run/fold1/checkpoint-best.pt")


def test_postprocessing_that_nnunet_leaves_out_is_named(caplog):
    write_model(Path(NAME), 0)
    assert run("convert", NAME, "-o", "model.pt") == 0
    for number, rules in enumerate(((), ((1,),))):
        network = replace(load_checkpoint(Path("model.pt")), postprocessing=rules)
        save_checkpoint(network, Path("model.pt"))
        assert run("convert", "model.pt", "--to", "nnunet", "-o", f"back {number}") == 0
        assert ("nnU-Net keeps all components" in caplog.text) == bool(rules)


def test_only_a_model_is_replaced(capsys):
    write_model(Path(NAME), 0, 1)
    to_nnunet = ("convert", NAME, "--to", "nnunet", "--overwrite", "-o")
    assert run(*to_nnunet, "back") == 0
    assert run(*to_nnunet, "back", "--folds", "1") == 0
    assert names_in("back") == ["dataset.json", "fold_1", "plans.json"]
    assert names_in(".") == sorted(["back", NAME])
    Path("mine").mkdir()
    Path("mine/precious").touch()
    Path("link").symlink_to("back")
    for name in ("mine", "link"):
        said = refusal(capsys, *to_nnunet, name)
        assert f"{name} exists, but is not the folder of a model; choose another --output" in said
    assert Path("mine/precious").exists()
    for name in (NAME, ".", f"{NAME}/fold_0"):  # the model is read from there
        assert "cannot hold the results" in refusal(capsys, *to_nnunet, name)
    assert Path(NAME, "fold_0/checkpoint_final.pth").exists()


def test_folders_are_not_named_like_files(capsys):
    write_model(Path(NAME), 0)
    for words, message in (
        (("-o", "model.PT"), "model.PT ends in .PT; name a file *.pt, or a folder"),
        (("-o", "model.zip"), "model.zip ends in .zip"),
        (("-o", "model.txt"), "model.txt ends in .txt"),
        (("-o", "model.nii.gz"), "model.nii.gz cannot hold the results"),
        (("--to", "nnunet", "-o", "model.pt"), "model.pt ends in .pt; name a folder with --output"),
    ):
        assert message in refusal(capsys, "convert", NAME, *words)
    assert names_in(".") == [NAME]
    for name, words in (("models.v2", ()), ("back.v2", ("--to", "nnunet"))):  # .v2 is no ending
        assert run("convert", NAME, *words, "-o", name) == 0
        assert Path(name).is_dir()


def test_what_cannot_be_converted(capsys):
    write_checkpoint(Path("model.pt"))
    said = refusal(capsys, "convert", "model.pt", "--to", "nnunet", "-o", "model")
    assert "nnU-Net cannot predict with this network: each image keeps its own spacing" in said
    assert not Path("model").exists()
    assert "no such file" in refusal(capsys, "convert", "none.pth", "-o", "a.pt").lower()
    assert "cannot write no/a.pt" in refusal(capsys, "convert", "model.pt", "-o", "no/a.pt")
