"""Damaged files: what reads them works, or says in one line what is wrong."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import SMALL, run
from tests.faults.amounts import chance, seeds
from tests.trainings import without_pictures
from tests.volumes.samples import noise, write_msd, write_volume

TRAINING = ("train", "data", *SMALL, "--output", "run", "--set", "data.cache=cache")
COMMANDS = (
    (*TRAINING, "--resume", "--epochs", "2"),
    ("predict", "scan.nii.gz", "--checkpoint", "run/checkpoint-latest.pt", "--devices", "cpu"),
    ("evaluate", "data/labelsTr", "data/labelsTr"),
    ("check", "data"),
    ("plan", "data", *SMALL[:2], *SMALL[4:], "--set", "data.cache=cache"),
)


def flip_bits(content: bytes, choices: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(choices.randint(1, 8)):
        damaged[choices.randrange(len(damaged))] ^= 1 << choices.randrange(8)
    return bytes(damaged)


def cut_off(content: bytes, choices: random.Random) -> bytes:
    return content[: choices.randrange(len(content))]


def zero_a_block(content: bytes, choices: random.Random) -> bytes:
    """Return what a file holds whose data were not on the disk when the power went."""
    begin = choices.randrange(len(content))
    end = choices.randint(begin + 1, len(content))
    return content[:begin] + bytes(end - begin) + content[end:]


def add_noise(content: bytes, choices: random.Random) -> bytes:
    return content + choices.randbytes(choices.randint(1, 5000))


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits,
    cut_off,
    zero_a_block,
    add_noise,
)


@pytest.fixture(scope="module", autouse=True)
def no_pictures():
    with without_pictures():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A data set, a run that has trained on it, the cache of both, and a scan."""
    folder = tmp_path_factory.mktemp("whole")
    write_msd(folder / "data", num_cases=3, shape=(12, 12, 12))
    write_volume(folder / "scan.nii.gz", noise((12, 11, 10)))
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(*TRAINING) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    monkeypatch.chdir(copy)
    yield copy


@pytest.mark.parametrize("seed", seeds(share=4))
def test_a_damaged_file_is_one_line_at_most(seed, folder, capsys):
    choices = chance(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = choices.choice(files)
    damage = choices.choice(DAMAGES)
    path.write_bytes(damage(path.read_bytes(), choices))
    for words in COMMANDS:
        capsys.readouterr()
        status = run(*words)
        errors = capsys.readouterr().err
        told = f"{path.relative_to(folder)}, {damage.__name__}, {words[0]}: {errors}"
        assert "Traceback" not in errors, told
        assert status in (0, 1), told
        lines = [line for line in errors.splitlines() if line.startswith("Error: ")]
        assert len(lines) == status, told
