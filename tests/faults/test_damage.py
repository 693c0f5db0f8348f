"""Damaged files: a command that reads them works, or says in one line what is wrong."""

import random
import shutil

import pytest

from tests.command_line import SMALL, run
from tests.faults.amounts import seeds
from tests.images.samples import noise, write_msd, write_volume
from tests.trainings import bare
from unet3d.planning import placements

TRAINING = ("train", "data", *SMALL, "--output", "run", "--set", "data.cache=cache")
COMMANDS = (
    (*TRAINING, "--resume", "--epochs", "2"),
    ("predict", "scan.nii.gz", "--checkpoint", "run/checkpoint-latest.pt", "--devices", "cpu"),
    ("evaluate", "data/labelsTr", "data/labelsTr"),
    ("check", "data"),
    ("plan", "data", *SMALL[:2], *SMALL[4:], "--set", "data.cache=cache"),
)


def damaged(content, kind, choices):
    begin = choices.randrange(len(content))
    if kind == "a block of zeros":  # data that were not yet on the disk at a power cut
        end = choices.randint(begin + 1, len(content))
        return content[:begin] + bytes(end - begin) + content[end:]
    if kind == "noise":
        return content + choices.randbytes(choices.randint(1, 5000))
    if kind == "cut off":
        return content[:begin]
    flipped = bytearray(content)
    for _ in range(choices.randint(1, 8)):
        flipped[choices.randrange(len(flipped))] ^= 1 << choices.randrange(8)
    return bytes(flipped)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A data set, a run that has trained on it, the cache of both, and a scan."""
    folder = tmp_path_factory.mktemp("whole")
    write_msd(folder / "data", num_cases=3, shape=(12, 12, 12))
    write_volume(folder / "scan.nii.gz", noise((12, 11, 10)))
    with pytest.MonkeyPatch.context() as patch, bare():
        patch.chdir(folder)
        assert run(*TRAINING) == 0
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(whole, tmp_path / "copy"))
    monkeypatch.setattr(placements, "largest_size", lambda *_: None)  # the search takes long
    with bare():
        yield tmp_path / "copy"


@pytest.mark.parametrize("seed", seeds(share=4))
def test_a_damaged_file_is_one_line_at_most(seed, folder, capsys):
    choices = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = choices.choice(files)
    kind = choices.choice(["bits", "cut off", "a block of zeros", "noise"])
    path.write_bytes(damaged(path.read_bytes(), kind, choices))
    for words in COMMANDS:
        capsys.readouterr()
        status = run(*words)
        errors = capsys.readouterr().err
        told = f"{path.relative_to(folder)}, {kind}, {words[0]}: {errors}"
        assert "Traceback" not in errors, told
        assert status in (0, 1), told
        lines = [line for line in errors.splitlines() if line.startswith("Error: ")]
        assert len(lines) == status, told
