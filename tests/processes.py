"""The processes that a process has started, as the system knows them."""

import time
from pathlib import Path


def children_of(parent: int) -> list[int]:
    """Return the processes that another one has started, in their order."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


def family_of(parent: int) -> list[int]:
    """Return the processes that another one has started, and those that these have."""
    children = children_of(parent)
    return [*children, *(one for child in children for one in family_of(child))]


def is_running(process: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_all_end(processes: list[int], within_seconds: float) -> None:
    """Wait until all processes have ended; it is an error if they do not in time."""
    deadline = time.monotonic() + within_seconds
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
