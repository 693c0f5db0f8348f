"""How much of a file this process has in memory."""

from pathlib import Path


def resident_kib(path: Path) -> int:
    """Return the KiB of a file, or of the files in a folder, that are mapped and in memory now.

    Args:
        path: The file or folder; files that have been deleted count, too.
    """
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        next(int(one.split()[1]) for one in lines if one.startswith("Rss:"))
        for line in lines
        if str(path) in line
    )
