"""Processes that start with PyTorch and the package loaded: forks of a server that has one thread.

``python -m unet3d train`` spends four seconds on imports, and so does each of its ranks. If a test
does not depend on how processes start, :func:`start` forks a process that has imported everything,
and its ranks are forks of that fork.
"""

import atexit
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from unet3d import interruption
from unet3d.__main__ import main
from unet3d.distributed import commands
from unet3d.distributed.commands import import_variables

_NUMBER_BYTES = 32
"""Bytes of a message, which is a process id or an exit status."""

PRELOADED = (
    "torch",
    "torch._dynamo",  # every optimizer of PyTorch imports it, which takes a second
    "contourpy",
    "matplotlib.pyplot",
    "monai.metrics",
    "nibabel",
    "rich.console",
    "scipy.ndimage",
    "unet3d.cli.app",
    "unet3d.distributed.launcher",
    "unet3d.inference.evaluation",
    "unet3d.inference.predictor",
    "unet3d.training.job",
)


class Warm:
    """A forked process, with the parts of :class:`subprocess.Popen` that tests use."""

    def __init__(self, pid: int, channel: socket.socket, files: tuple[Any, Any]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._files = files

    def __del__(self) -> None:
        for one in (self._channel, *self._files):
            one.close()

    def poll(self) -> int | None:
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(["unet3d"], timeout or 0)
        return status

    def _status(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            self._channel.settimeout(seconds)
            try:
                self.returncode = int(self._channel.recv(_NUMBER_BYTES))
            except (BlockingIOError, TimeoutError):
                return None
            self._channel.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return stdout and stderr."""
        self.wait(timeout)
        return self.written(0), self.written(1)

    def written(self, which: int) -> str:
        """Return the output so far, of stdout (0) or stderr (1)."""
        size = os.fstat(self._files[which].fileno()).st_size
        return os.pread(self._files[which].fileno(), size, 0).decode()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: Sequence[object], cwd: Path | None = None, **variables: str) -> Warm:
    """Start ``unet3d WORDS`` in its own session.

    Args:
        words: Arguments of the command.
        cwd: Its current folder; None: this process's.
        variables: Environment variables that are added to this process's.
    """
    return call(run_command, [str(word) for word in words], cwd=cwd, **variables)


def run(
    words: Sequence[object], timeout: float = 120, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``unet3d WORDS`` to its end; see :func:`start`."""
    return _completed(start(words, **more), timeout)


def run_call(
    work: Callable[..., object], *arguments: object, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module in a new process, to its end; see :func:`call`."""
    return _completed(call(work, *arguments, **variables), timeout)


def _completed(process: Warm, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        output, errors = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess([], process.wait(), output, errors)


def call(
    work: Callable[..., object], *arguments: object, cwd: Path | None = None, **variables: str
) -> Warm:
    """Start a call of a module's function in a new process.

    The process ends with status 0, or with 1 if the function raises an error.
    """
    ours, theirs = socket.socketpair()
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    environment = {**_environment(), **variables}
    request = work.__module__, work.__qualname__, arguments, str(cwd or Path.cwd()), environment
    with theirs, tempfile.TemporaryFile() as file:
        pickle.dump(request, file)
        file.seek(0)
        fds = [theirs.fileno(), file.fileno(), *(one.fileno() for one in files)]
        socket.send_fds(_server(), [b"r"], fds)
    ours.settimeout(60)
    return Warm(int(ours.recv(_NUMBER_BYTES)), ours, files)


@cache
def _server() -> socket.socket:
    """Start the server, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.warm", str(theirs.fileno())],
            env=_environment(),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        **import_variables(),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }


def serve(requests: socket.socket) -> None:
    """Fork a process for each request and report its end, until all clients are gone."""
    for name in PRELOADED:
        importlib.import_module(name)
    # If PyTorch has CUDA, fake tensors make autograd start a thread for a GPU, though none is to
    # be seen here, and a fork may not go backward after that.
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    gc.collect()
    gc.freeze()
    children: dict[int, socket.socket] = {}
    while True:
        requests.settimeout(0.02 if children else None)
        with suppress(TimeoutError):
            _, fds, _, _ = socket.recv_fds(requests, 1, 4)
            if not fds:
                return
            child = os.fork()
            if not child:
                _begin(*fds)
            children[child] = socket.socket(fileno=fds[0])
            children[child].send(f"{child}".encode().ljust(_NUMBER_BYTES))
            for fd in fds[1:]:
                os.close(fd)
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with children.pop(child) as channel, suppress(BrokenPipeError):
                    channel.send(f"{os.waitstatus_to_exitcode(status)}".encode())


def _begin(channel: int, request: int, output: int, errors: int) -> NoReturn:
    """Turn this fork into the process of a request."""
    os.close(channel)
    with open(request, "rb") as file:
        module, name, arguments, folder, environment = pickle.load(file)
    os.chdir(folder)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    _as_process(lambda: getattr(importlib.import_module(module), name)(*arguments), environment)


def _as_process(work: Callable[[], object], environment: Mapping[str, str]) -> NoReturn:
    """Run work as in a new process with its own session, and end the process."""
    status = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        for number in interruption.SIGNALS:
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        interruption._stop = interruption._Stop()  # the parent's own is in use
        logging.getLogger().handlers.clear()
        tempfile.tempdir = None  # variables may name another one
        # New streams, because 1 and 2 may be pipes now, and were files.
        sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))
        work()
        status = 0
    except SystemExit as ending:
        status = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def run_command(words: list[str]) -> None:
    """Run ``unet3d WORDS``; its ranks, and trainings of folds, are forks."""
    vars(commands)["subprocess"] = SimpleNamespace(
        Popen=_Rank, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )
    vars(commands)["loading_ahead"] = lambda *_: nullcontext()  # they have loaded all
    sys.argv = ["unet3d", *words]
    main()


class _Rank:
    """A rank as a fork of the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: int | None,
        stderr: int | None,
        **_: object,
    ) -> None:
        reading, writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            if stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if stderr is not None:
                os.dup2(writing, 2)
            sys.argv = ["unet3d", *command[3:]]
            _as_process(main, env)
        os.close(writing)
        self.stderr = open(reading, errors="backslashreplace") if stderr is not None else None

    def poll(self) -> int | None:
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        return self._status(0)

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
