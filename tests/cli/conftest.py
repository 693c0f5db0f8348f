"""A current folder, a scan and a network for every test of the command line."""

import pytest

from tests.command_line import scan_array
from tests.images.samples import write_volume
from tests.networks import write_checkpoint


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty current folder, with a space in its name, and a cache of the test's own."""
    here = tmp_path / "my files"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return here


@pytest.fixture
def scan(folder):
    """An image of noise."""
    return write_volume(folder / "a scan.nii.gz", scan_array())


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A network with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("network") / "random.pt", patch_size=(8, 8, 8))


@pytest.fixture
def predicting(checkpoint):
    """Arguments of ``unet3d predict``; the test adds the scans."""
    return ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
