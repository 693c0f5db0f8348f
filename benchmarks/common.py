"""Common parts of the benchmarks: arguments, times, records, and monitored processes."""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unet3d.config import Shape
from unet3d.distributed import STORE_PORT
from unet3d.distributed.processes import die_with_parent
from unet3d.distributed.ranks import Ranks, num_cores
from unet3d.distributed.rendezvous import joined, store_for_ranks
from unet3d.memory.allocator import use_expandable_segments
from unet3d.parallel import Machine

use_expandable_segments()  # as the command line does

CHANNELS = "32,64,128,256,320,320"
"""Channels per level of nnU-Net's plain network, the default of every benchmark."""

GIB = 2**30

PACKAGES = ("unet3d-parallel", "monai", "nnunetv2", "dynamic-network-architectures")
"""Packages whose versions a record has, if they are installed."""

SECONDS_BETWEEN_LOOKS = 0.2


# Arguments


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of all scripts."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write a record of all that was measured")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of ``1,2,3``."""
    return tuple(int(number) for number in text.split(",") if number)


def shape(text: str) -> Shape:
    """Return voxels along X, Y, Z from ``192,192,192``."""
    x, y, z = numbers(text)
    return x, y, z


def words(text: str) -> tuple[str, ...]:
    """Return the words of ``a,b``."""
    return tuple(word for word in text.split(",") if word)


def one_device() -> str:
    """Return the name of the device that is used by default."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def all_devices() -> str:
    """Return the names of all GPUs, or ``cpu`` twice without GPUs."""
    return ",".join(map(str, range(torch.cuda.device_count()))) or "cpu,cpu"


def devices_named(names: Sequence[str]) -> tuple[torch.device, ...]:
    """Return the devices of this machine with these names."""
    machine = Machine.here()
    return tuple(machine.device(name) for name in names)


def seen_alone(device: torch.device) -> dict[str, str]:
    """Return an environment that shows only this GPU to nnU-Net, which uses the first it sees."""
    if device.type != "cuda":
        return {}
    gpu, seen = device.index or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[gpu] if seen else str(gpu)}


# Times and memory


def used_gpus() -> list[int]:
    """Return the GPUs on which this process has memory."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(gpu)]


def synchronize() -> None:
    """Wait until every GPU that this process uses is idle."""
    for gpu in used_gpus():
        torch.cuda.synchronize(gpu)


def timed(work: Callable[[], Any], in_a_row: int = 1, repeats: int = 1) -> list[float]:
    """Return the seconds that work takes, each from an idle machine to an idle machine.

    Args:
        work: The function to time, already warm.
        in_a_row: Calls without a wait between them; the time is divided by their number.
        repeats: Number of times to return.
    """
    seconds = []
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        for _ in range(in_a_row):
            work()
        synchronize()
        seconds.append((time.perf_counter() - began) / in_a_row)
    return seconds


def forget_peaks() -> None:
    """Reset the peak memory of GPUs."""
    synchronize()
    for gpu in used_gpus():
        torch.cuda.reset_peak_memory_stats(gpu)


def peaks() -> dict[str, list[int]]:
    """Return the peak of allocated and of reserved memory of each used GPU."""
    gpus = used_gpus()
    return {
        "peak_bytes": [torch.cuda.max_memory_allocated(gpu) for gpu in gpus],
        "reserved_bytes": [torch.cuda.max_memory_reserved(gpu) for gpu in gpus],
    }


# Records


def command() -> str:
    """Return the command without this machine's folders, to repeat it elsewhere."""
    script, *rest = sys.argv
    said = [Path(one).name if Path(one).is_absolute() else one for one in rest]
    return shlex.join([f"benchmarks/{Path(script).name}", *said])


def versions() -> dict[str, str]:
    """Return the versions of the packages that are compared."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # it is not installed, which its rows say
            continue
    return found


def write_record(path: Path | None, devices: Sequence[torch.device], **measured: Any) -> None:
    """Write measurements with command, date, devices and versions; None: no file."""
    if path is None:
        return
    names = [str(d) if d.type == "cpu" else torch.cuda.get_device_name(d) for d in devices]
    record = {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "devices": names,
        "cores": num_cores(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "versions": versions(),
    }
    path.write_text(json.dumps({**record, **measured}, indent=1) + "\n")


def say(row: Mapping[str, Any]) -> None:
    """Show a row as soon as it is measured."""
    print(dict(row), file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


# Processes


def in_ranks(
    work: Callable[..., dict[str, Any]], num_ranks: int, *given: object, seconds: float = 600
) -> dict[str, Any]:
    """Run work in ranks, each in a separate process.

    Args:
        work: Takes the group of ranks and ``given``, and returns measurements.
        num_ranks: Number of ranks.
        given: Plain values, because they are sent to other processes.
        seconds: Time limit, after which the ranks are ended.

    Returns:
        Measurements of the first rank, or the ``reason`` why there are none.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with store_for_ranks() as port:
        ranks = [
            context.Process(target=_serve, args=(answers, str(port), rank, num_ranks, work, given))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + seconds
        try:
            while answers.empty() and all(process.exitcode in (None, 0) for process in ranks):
                if time.monotonic() > end:
                    return {"reason": f"took longer than {seconds:.0f} s"}
                if not any(process.is_alive() for process in ranks):
                    break
                time.sleep(0.02)
            if answers.empty():
                return {"reason": f"ranks ended with {[process.exitcode for process in ranks]}"}
            answer: dict[str, Any] = answers.get()
            for process in ranks if "reason" not in answer else ():
                process.join(max(0.0, end - time.monotonic()))
            return answer
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _serve(
    answers: Any,
    port: str,
    rank: int,
    num_ranks: int,
    work: Callable[..., dict[str, Any]],
    given: tuple[object, ...],
) -> None:
    """Do the work of one rank; the first one answers, or one that fails."""
    die_with_parent()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_PORT: port,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    try:
        with joined(Ranks.from_environment()) as group:
            group.open(300)
            answer = work(group, *given)
            if group.is_first:
                answers.put(answer)
    except Exception as error:  # a peer, or a compiler, can raise anything
        answers.put({"reason": reason_of(error)})
        sys.exit(1)


def run_watched(
    said: Sequence[object], environment: Mapping[str, str], threads: int | None = None
) -> dict[str, Any]:
    """Run a command, and return its seconds and its peak memory.

    Host memory covers the command and its child processes; shared memory counts once. GPU memory is
    nvidia-smi's value for the fullest GPU.

    Args:
        said: The command.
        environment: Differences from this process's environment.
        threads: The cores that it may use, with as many threads; None: all.
    """
    stop, host, gpu = threading.Event(), [0], [0]
    before = os.sched_getaffinity(0)
    if threads is not None:  # child processes inherit it
        os.sched_setaffinity(0, sorted(before)[:threads])
        environment = {**environment, "OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    child = subprocess.Popen(
        [str(word) for word in said],
        stdout=sys.stderr.fileno(),
        env={**os.environ, **environment},
    )
    os.sched_setaffinity(0, before)
    looking = [threading.Thread(target=_watch_host, args=(child.pid, stop, host))]
    if shutil.which("nvidia-smi"):
        looking.append(threading.Thread(target=_watch_gpus, args=(stop, gpu)))
    for thread in looking:
        thread.start()
    try:
        status = child.wait()
        seconds = time.perf_counter() - began
    finally:  # an interrupted benchmark must end, too
        stop.set()
    for thread in looking:
        thread.join()
    row: dict[str, Any] = {"seconds": seconds, "host_bytes": max(host), "gpu_bytes": max(gpu)}
    return row if status == 0 else {**row, "reason": f"it ended with {status}"}


def _watch_host(pid: int, stop: threading.Event, held: list[int]) -> None:
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        # The first process's own peak, which polling may miss, and the current memory of all
        # processes. Where Pss is not reported, shared memory counts once per process.
        held.append(_bytes_of(pid, "status", "VmHWM"))
        held.append(
            sum(
                _bytes_of(one, "smaps_rollup", "Pss") or _bytes_of(one, "status", "VmRSS")
                for one in _processes_of(pid)
            )
        )


def _processes_of(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2]  # a name may hold spaces
            parents[int(entry.name)] = int(after_name.split()[1])
        except (OSError, ValueError):  # it has ended
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
        yield pid


def _bytes_of(pid: int, file: str, field: str) -> int:
    """Return a field of the system's report on a process's memory, or 0."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _watch_gpus(stop: threading.Event, held: list[int]) -> None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        held.append(max(map(int, said.split())) * 2**20)
