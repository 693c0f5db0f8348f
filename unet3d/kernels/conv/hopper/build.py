"""Compiles the ``.cu`` files of this folder with NVRTC, and caches the results.

PyTorch's wheels for CUDA include NVRTC, so neither a compiler nor CUDA's headers need to be
installed. NVRTC takes one to three seconds per variant, so its results, cubins, are cached in the
user's cache folder.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from unet3d.atomic import make_folder, users_cache, write_atomically
from unet3d.errors import CacheError, reason_of
from unet3d.inputs.plain_data import key_of

logger = logging.getLogger(__name__)

ARCHITECTURE = "sm_90a"
"""Hopper with its architecture-specific instructions; such a cubin runs on no other
architecture."""

MAX_THREADS = 8
"""Variants that are compiled in parallel; NVRTC 12 compiles only one at a time."""

_FOLDER = Path(__file__).parent
_DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def building(
    sources: tuple[str, ...], defines: tuple[tuple[str, int], ...], driver: int
) -> Future[bytes]:
    """Begin to make a cubin in a thread, as :func:`cubin` does, and return a future of it."""
    future: Future[bytes] = Future()
    turns = _turns()

    def make() -> None:
        with turns:
            try:
                # Unlike an executor's, these jobs do not delay the end of the program.
                if not threading.main_thread().is_alive():
                    raise RuntimeError("the program ends before a kernel was compiled")
                future.set_result(cubin(sources, dict(defines), driver))
            except BaseException as error:  # raised by ``result()``
                future.set_exception(error)

    threading.Thread(target=make, name="kernels").start()
    return future


def cubin(sources: Sequence[str], defines: Mapping[str, int], driver: int = 0) -> bytes:
    """Return the cubin of concatenated files of this folder, from the cache or newly compiled.

    ``driver`` is the version of the driver that will load it. OSError: NVRTC was not found;
    RuntimeError: it cannot compile the files.
    """
    source = "".join((_FOLDER / name).read_text() for name in sources)
    flags = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17"]
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    path = _kept_at(key_of([source, flags, _version(), driver]))
    kept = None if path is None else _read(path)
    if kept is not None:
        return kept
    made = _compiled(source, sources[-1], flags)
    if path is not None:
        _keep(path, made)
    return made


@functools.cache
def nvrtc() -> Any:
    """Return NVRTC as a ctypes library; OSError: none can be loaded."""
    reason = "PyTorch's packages hold none"
    for name in _names():
        try:
            if os.path.isabs(name):
                # NVRTC from a wheel only finds its second library if that is already loaded.
                for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(builtins))
            return ctypes.CDLL(name)
        except OSError as error:
            if os.path.isabs(name):
                reason = str(error)
    raise OSError(f"NVRTC, which compiles kernels, cannot be loaded: {reason}")


def _names() -> Iterator[str]:
    """Yield possible files and names of NVRTC, first for the CUDA version of PyTorch."""
    version = f"libnvrtc.so.{(torch.version.cuda or '13').partition('.')[0]}"
    packages = importlib.util.find_spec("nvidia")
    folders = [] if packages is None else packages.submodule_search_locations or []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    yield from map(str, sorted(found, key=lambda path: (path.name != version, path)))
    yield from (version, "libnvrtc.so.13", "libnvrtc.so.12")
    yield from map(str, sorted(Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")))


@functools.cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.cache
def _turns() -> threading.Semaphore:
    # NVRTC 12 has its own lock, but waiting for it cannot be interrupted, and has no order.
    at_a_time = MAX_THREADS if _version()[0] >= 13 else 1
    return threading.Semaphore(min(at_a_time, len(os.sched_getaffinity(0))))


def _compiled(source: str, name: str, flags: Sequence[str]) -> bytes:
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
    )
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        code = library.nvrtcCompileProgram(program, len(flags), options)
        if code != 0:
            _check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check(library.nvrtcGetProgramLog(program, log))
            _check(code, log.value.decode(errors="replace"))
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        made = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, made))
        return made.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, log: str = "") -> None:
    """Raise RuntimeError for an NVRTC error code, with the log's first error."""
    if code != 0:
        errors = [line.strip() for line in log.splitlines() if "error" in line]
        raise RuntimeError(f"NVRTC cannot compile: {errors[0] if errors else f'code {code}'}")


def _kept_at(key: str) -> Path | None:
    """Return the path of a key's cubin in the cache, or None if the user has no cache folder."""
    try:
        return users_cache() / "kernels" / f"{key}.cubin"
    except CacheError:
        _say_that_nothing_is_kept("this user has no home folder")
        return None


def _read(path: Path) -> bytes | None:
    """Return a cached cubin, or None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(kept).digest() == digest:
        return kept
    logger.warning("%s is damaged and not used; a new one replaces it", path)
    return None


def _keep(path: Path, made: bytes) -> None:
    """Cache a cubin, preceded by its digest, if the folder is writable."""
    try:
        make_folder(path.parent)
        write_atomically(path, lambda file: file.write(hashlib.sha256(made).digest() + made))
    except OSError as error:
        _say_that_nothing_is_kept(f"{path.parent}: {reason_of(error)}")


@functools.cache
def _say_that_nothing_is_kept(reason: str) -> None:
    logger.info("compiled kernels are not cached, so every start takes seconds longer: %s", reason)
