"""A place to work in, a scan and a network, for every test of the command line."""

from pathlib import Path

import pytest

from tests.command_line import Words, scan_array
from tests.networks import write_checkpoint
from tests.volumes.samples import write_volume


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a space in its name, and a cache, of the test's own."""
    here = tmp_path / "my files"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return here


@pytest.fixture
def scan(folder: Path) -> Path:
    """An image with noise in it."""
    return write_volume(folder / "a scan.nii.gz", scan_array())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("network") / "random.pt", patch_size=(8, 8, 8))


@pytest.fixture
def predicting(checkpoint: Path) -> Words:
    """Arguments that segment what is named after them."""
    return ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
