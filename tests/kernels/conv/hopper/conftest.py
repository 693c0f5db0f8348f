import pytest

from tests.kernels.conv.hopper.fakes import FakeDriver, FakeNvrtc
from unet3d.kernels.conv.hopper import api, build, driver

CACHED = (build.building, build._version, build._turns, build._say_that_nothing_is_kept)
CACHED += (
    driver._driver_version,
    driver._context,
    driver._tensor_map,
    api.available,
    api._say,
)


@pytest.fixture
def fresh_process(tmp_path, monkeypatch):
    """As a new process: nothing is compiled or loaded, and the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(api.SWITCH, raising=False)
    forget()
    yield
    forget()


def forget():
    for function in CACHED:
        function.cache_clear()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with two sources: one.cu and two.cu."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.cu").write_text(f"text of {name}\n")
    monkeypatch.setattr(build, "_FOLDER", folder)
    return folder


@pytest.fixture
def nvrtc(sources, monkeypatch):
    library = FakeNvrtc()
    monkeypatch.setattr(build, "nvrtc", lambda: library)
    return library


@pytest.fixture
def cuda(nvrtc, monkeypatch):
    library = FakeDriver()
    monkeypatch.setattr(driver, "cuda", lambda: library)
    return library
