"""``unet3d predict`` with an archive of nnU-Net: the network's name, and removal of the copy."""

import json
import signal
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.cli import slow_prediction
from tests.cli.slow_prediction import WINDOWS
from tests.command_line import names_in, refusal, wait_until
from tests.images.samples import noise, write_volume
from tests.nnunet.models import archive_of, content_of, write_model
from tests.products import by_night
from unet3d.cli.predict import predict

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"
CHECKPOINT = f"weights/Task.zip/Dataset001_Phantoms/{NAME}/fold_0/checkpoint_final.pth"
OPTIONS = ("-o", "out", "--checkpoint", "weights/Task.zip", "--no-tta", "--statistics")


@pytest.fixture
def temporary(folder, monkeypatch):
    """The folder for temporary files, of these tests and of the processes that they start."""
    place = folder.parent / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@pytest.fixture
def archive(folder):
    """An archive of a model, beside two scans."""
    Path("weights").mkdir()
    model = write_model(Path(NAME), 0)
    for case in "ab":
        for channel in range(2):
            path = folder / f"scans/{case}_000{channel}.nii.gz"
            write_volume(path, noise((24, 24, 8), seed=channel))
    return archive_of(model, Path("weights/Task.zip"))


@pytest.mark.parametrize("devices", ["cpu,cpu", *by_night("cpu")])
def test_a_network_is_called_by_its_place_in_the_archive(devices, archive, temporary):
    done = warm.run(["predict", "scans", *OPTIONS, "--devices", devices])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"using {CHECKPOINT}\n")
    for case in "ab":
        statistics = json.loads(Path(f"out/{case}.json").read_text())
        assert statistics["checkpoints"] == [CHECKPOINT]
    assert not list(temporary.glob(".unfinished-*"))


def test_messages_name_the_place_in_the_archive(archive, temporary, capsys):
    model = Path(NAME)
    torch.save({**content_of(), "init_args": {}}, model / "fold_0/checkpoint_final.pth")
    archive_of(model, archive)
    said = refusal(capsys, "predict", "scans", *OPTIONS, "--devices", "cpu")
    assert said.startswith(f"Error: {CHECKPOINT} is not a checkpoint that can be used: init_args.c")
    assert str(temporary) not in said and not list(temporary.glob(".unfinished-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_of_the_ranks_only_the_first_unpacks_it(archive, temporary, monkeypatch, rank):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, str(value))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    found = []

    def note(request, *_):
        found.append((len(request.checkpoints), len(names_in(temporary, ".unfinished-*"))))

    monkeypatch.setattr("unet3d.inference.prediction.predict", note)
    predict.main(["scans", *OPTIONS], standalone_mode=False)
    assert found == [(1 - rank, 1 - rank)]
    assert not list(temporary.glob(".unfinished-*"))


@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL", *by_night("SIGTERM", "SIGHUP")])
def test_the_copy_goes_however_the_command_ends(number, archive, temporary):
    arguments = ["predict", "scans", *OPTIONS, "--probabilities", "--devices", "cpu"]
    process = warm.call(slow_prediction.predict, arguments, 0, 2)
    wait_until(lambda: WINDOWS in process.written(0), process)
    assert names_in(temporary, ".unfinished-*")
    process.send_signal(signal.Signals[number])
    process.communicate(timeout=60)
    assert process.returncode != 0
    if number == "SIGKILL":  # the next prediction removes it
        assert names_in(temporary, ".unfinished-*")
        done = warm.run(arguments)
        assert done.returncode == 0, done.stderr
        assert names_in("out", ".*") == []
    assert names_in(temporary, ".unfinished-*") == []
