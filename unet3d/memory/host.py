"""The host memory available to this process, and the recognition of out-of-memory errors."""

import resource
import sys
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

SMALL_BYTES = 2**26
"""Always assumed to be available, because other programs may be about to end."""

LIMIT_FILES = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""For versions 2 and 1 of control groups: the files with a group's memory limit and use, and the
counters of cached file pages, which the kernel frees when memory is short."""


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process can still allocate without swapping.

    The minimum of the machine's available memory, the rest of each control group's limit (a
    container, a cluster job), and the rest of the address space limit. Unknown limits are ignored.
    """
    rooms = [*_of_groups(proc, cgroups), *_of_address_space(proc)]
    rooms += [
        int(line.split()[1]) * 1024
        for line in _lines(proc / "meminfo")
        if line.startswith("MemAvailable:")  # absent in kernels before 3.14
    ]
    return max(0, min(rooms, default=sys.maxsize))


def shortage(needed_bytes: int) -> str | None:
    """Return a part of a message if the needed bytes exceed the available memory."""
    available = available_bytes()
    if needed_bytes <= max(available, SMALL_BYTES):
        return None
    return (
        f"takes {readable(needed_bytes)} of memory, but this machine has {readable(available)} "
        "available"
    )


def readable(num_bytes: int) -> str:
    """Return an amount of memory in the unit that suits it."""
    unit = min(max(0, num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**unit:.4g} {UNITS[unit]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed, on a GPU or on the host.

    PyTorch has no class for its errors on the host.
    """
    if is_out_of_gpu_memory(error) or isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Tell whether an allocation of PyTorch or cuBLAS failed on a GPU."""
    # By its name, so that code that reads images need not import PyTorch.
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "CUBLAS_STATUS_ALLOC" in str(error)
    return isinstance(error, RuntimeError) and is_torchs


def shortage_reason(error: BaseException) -> str:
    """Return PyTorch's message for a failed allocation, without the location in its code."""
    return str(error).rpartition("DefaultCPUAllocator: ")[2].split(". ")[0]


def _of_groups(proc: Path, cgroups: Path) -> list[int]:
    rooms = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        # Inside a container the name may be the host's, although only the root is visible.
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                rooms += _of_group(folder)
    return rooms


def _of_group(folder: Path) -> list[int]:
    for limit_name, used_name, file_names in LIMIT_FILES:
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # this folder has no limit, or is of the other version
            continue
        counts = dict(line.split() for line in lines)
        given_back = sum(int(counts.get(name, 0)) for name in file_names)
        return [] if limit == "max" else [int(limit) - used + given_back]
    return []


def _of_address_space(proc: Path) -> list[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return []
    return [
        limit - int(line.split()[0]) * resource.getpagesize()
        for line in _lines(proc / "self" / "statm")
    ]


def _lines(path: Path) -> list[str]:
    """Return the lines of a system file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
