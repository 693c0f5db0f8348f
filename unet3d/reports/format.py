"""Amounts, sizes, durations and scores in words: the same in every report."""

from collections.abc import Sequence

MIB = 1024**2
GIB = 1024**3
MIN_BYTES_IN_GIB = 8 * GIB
"""Peaks from this one on are shown in GiB; parts of a smaller one would read 0.00."""
NOTHING = "–"


def unit_for(peak_bytes: int) -> tuple[str, int]:
    """Return the unit in which the largest number of a report is read best, and its bytes."""
    return ("GiB", GIB) if peak_bytes >= MIN_BYTES_IN_GIB else ("MiB", MIB)


def amount(num_bytes: int, unit_bytes: int) -> str:
    """Return a number of bytes in a unit, with the digits that matter."""
    amount = num_bytes / unit_bytes
    if amount >= 100:
        return f"{amount:,.0f}"
    if 0 < amount < 0.001:
        return "<0.001"
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def size_text(shape: Sequence[int]) -> str:
    """Return voxels along X, Y, Z as people write them, such as ``192x192x160``."""
    return "x".join(map(str, shape))


def score(value: float | None, digits: int = 3) -> str:
    """Return a score, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Return seconds as people write them, such as ``2 h 05 min`` or ``41 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
