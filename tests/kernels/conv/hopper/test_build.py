"""Kernels are compiled once for all of their inputs, or every time if there is no cache."""

import importlib.machinery
import importlib.util
import logging
import threading
from pathlib import Path

import pytest
import torch

from unet3d.kernels.conv.hopper import build

pytestmark = pytest.mark.usefixtures("fresh_process")

FILES, DEFINES = ("one.cu", "two.cu"), {"TILES": 2, "NORM": 0}
FLAGS = b"--gpu-architecture=sm_90a --std=c++17 -DNORM=0 -DTILES=2"
CUBIN = b"text of one\ntext of two\n " + FLAGS


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "unet3d")
    return caplog


def kept(tmp_path):
    return sorted((tmp_path / "cache/unet3d/kernels").iterdir())


def made_anew(nvrtc, *arguments):
    """Return whether a cubin is compiled, instead of read from the cache, as in a new process."""
    build._version.cache_clear()
    before = len(nvrtc.programs)
    build.cubin(*arguments)
    return len(nvrtc.programs) > before


def test_it_is_compiled_once(nvrtc, tmp_path, log):
    assert build.cubin(FILES, DEFINES, 1) == CUBIN
    assert build.cubin(FILES, dict(reversed(DEFINES.items())), 1) == CUBIN
    assert len(nvrtc.programs) == nvrtc.num_destroyed == len(kept(tmp_path)) == 1
    assert not log.messages


def test_all_that_it_depends_on_is_in_the_key(nvrtc, sources, tmp_path, monkeypatch):
    assert made_anew(nvrtc, FILES, DEFINES, 1)
    assert made_anew(nvrtc, FILES[1:], DEFINES, 1)
    assert made_anew(nvrtc, FILES, {**DEFINES, "NORM": 1}, 1)
    assert made_anew(nvrtc, FILES, DEFINES, 2)
    nvrtc.version = (13, 1)
    assert made_anew(nvrtc, FILES, DEFINES, 1)
    monkeypatch.setattr(build, "ARCHITECTURE", "sm_100a")
    assert made_anew(nvrtc, FILES, DEFINES, 1)
    (sources / "one.cu").write_text("another text\n")
    assert made_anew(nvrtc, FILES, DEFINES, 1)
    assert not made_anew(nvrtc, FILES, DEFINES, 1)
    assert len(kept(tmp_path)) == 7


@pytest.mark.parametrize("damage", [b"", b"short", CUBIN, bytes(32) + CUBIN])
def test_what_is_damaged_is_replaced(damage, nvrtc, tmp_path, log):
    build.cubin(FILES, DEFINES)
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert build.cubin(FILES, DEFINES) == CUBIN
    assert log.messages == [f"{path} is damaged and not used; a new one replaces it"]
    assert kept(tmp_path) == [path] and path.read_bytes() == whole


def test_without_a_folder_that_can_be_written_nothing_is_kept(nvrtc, tmp_path, log):
    (tmp_path / "cache").write_text("a file")
    assert build.cubin(FILES, DEFINES) == build.cubin(FILES, DEFINES) == CUBIN
    assert len(nvrtc.programs) == 2
    (line,) = log.messages
    folder = tmp_path / "cache/unet3d/kernels"
    assert line.startswith("compiled kernels are not cached, so every start takes seconds longer")
    assert line.endswith(f": {folder}: Not a directory")


def test_without_a_home_nothing_is_kept(nvrtc, monkeypatch, log):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert build.cubin(FILES, DEFINES) == build.cubin(FILES, DEFINES) == CUBIN
    (line,) = log.messages
    assert line.endswith("longer: this user has no home folder")


def test_the_first_error_of_a_compilation_is_told(nvrtc):
    nvrtc.log = b"two.cu(3): warning: unused\ntwo.cu(7): error: no such thing\nanother error\n"
    with pytest.raises(
        RuntimeError, match=r"^NVRTC cannot compile: two.cu\(7\): error: no such"
    ) as e:
        build.cubin(FILES, DEFINES)
    assert "\n" not in str(e.value) and nvrtc.num_destroyed == 1


def test_several_are_compiled_at_a_time(nvrtc, monkeypatch):
    nvrtc.barrier._parties = 2
    turns = threading.Semaphore(2)
    monkeypatch.setattr(build, "_turns", lambda: turns)
    begun = [build.building(FILES, (("NORM", norm),), 0) for norm in (0, 1, 0)]
    assert begun[0] is begun[2]
    made = [one.result() for one in begun]
    assert [one[-1:] for one in made] == [b"0", b"1", b"0"] and len(nvrtc.programs) == 2


@pytest.mark.parametrize(("version", "at_a_time"), [((12, 8), 1), ((13, 0), 3)])
def test_how_many_are_compiled_at_a_time(version, at_a_time, nvrtc, monkeypatch):
    nvrtc.version = version
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda process: range(3))
    turns = build._turns()
    assert [turns.acquire(blocking=False) for _ in range(4)].count(True) == at_a_time


def test_the_end_of_the_program_does_not_wait_for_what_has_not_begun(nvrtc, monkeypatch):
    ended = threading.Thread()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    with pytest.raises(RuntimeError, match="the program ends before a kernel was compiled"):
        build.building(FILES, (), 0).result()
    assert not nvrtc.programs


def test_nvrtc_is_that_of_pytorchs_cuda(tmp_path, monkeypatch):
    names = ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13")
    for name in (*names, "cu13/lib/libnvrtc-builtins.so.13.0", "cu13/lib/libnvrtc.alt.so.13"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    package = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    package.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    for version, files in (("12.6", names), ("13.0", reversed(names))):
        monkeypatch.setattr(torch.version, "cuda", version)
        found = list(build._names())
        assert found[:2] == [str(tmp_path / name) for name in files]
        assert found[2] == f"libnvrtc.so.{version[:2]}"


def test_without_nvrtc_the_reason_is_told(tmp_path, monkeypatch):
    build.nvrtc.cache_clear()
    monkeypatch.setattr(build, "_names", lambda: [str(tmp_path / "libnvrtc.so.13"), "libabsent.so"])
    with pytest.raises(OSError, match=r"^NVRTC, which .* cannot be loaded: .*libnvrtc.so.13: "):
        build.nvrtc()


def test_nvrtc_compiles_instructions_of_hopper(sources):
    try:
        build.nvrtc()
    except OSError as error:
        pytest.skip(str(error))
    text = 'extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }\n'
    (sources / "one.cu").write_text("#if ON\n" + text + "#endif\n")
    made = build.cubin(["one.cu"], {"ON": 1})
    assert made.startswith(b"\x7fELF") and made == build.cubin(["one.cu"], {"ON": 1})
    (sources / "one.cu").write_text("__device__ int x = absent;\n")
    with pytest.raises(RuntimeError, match=r'one\.cu\(1\): error: identifier "absent"'):
        build.cubin(["one.cu"], {})
