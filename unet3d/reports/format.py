"""Amounts, sizes, durations, scores, and the memory of slots, in words: the same in every report.

A slot is a stage or a slab on its device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MIB = 1024**2
GIB = 1024**3
MIN_BYTES_IN_GIB = 8 * GIB
"""Peaks from this one on are shown in GiB; parts of a smaller one would read 0.00."""
NOTHING = "–"

PARTS = ("parameters", "gradients", "optimizer", "activations")
"""What is counted of a slot's memory."""
REST = "rest of the peak"
PART_HEADS = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "acti-\nvations")
"""The parts as heads of columns, broken by hand so that tables fit 80 characters."""

Slots = Sequence[Mapping[str, Any]]
"""Those of one record, as ``memory.json`` and ``plan --json`` have them."""


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


def measured_slots(record: Mapping[str, Any]) -> Slots:
    """Return the slots of a ``memory.json`` as reports show them.

    On one CPU, the peak is that of the whole process, which nobody predicts.
    """
    slots: Slots = record["slots"]
    if not is_one_cpu(slots):
        return slots
    measured = slots[0]["measured"]
    peak = {"peak_bytes": max(measured["peak_bytes"], measured["reserved_bytes"])}
    return [{**slots[0], "predicted": None, "measured": {**measured, **peak}}]


def is_one_cpu(slots: Slots) -> bool:
    """Tell whether a training is on one CPU, where there are no slots to compare."""
    return len(slots) == 1 and slots[0]["device"] == "cpu"


def bar_parts(slot: Mapping[str, Any], slots: Slots, kind: str = "measured") -> dict[str, int]:
    """Return the bytes of each part of a slot's peak, ``measured`` or ``predicted``, and the rest.

    What a GPU's peak holds beyond the counted parts is work space, shared by the slots on it.
    """
    counted = sum(
        other[kind][f"{part}_bytes"]
        for other in slots
        if _place(other) == _place(slot)
        for part in PARTS
    )
    bar = {part: slot[kind][f"{part}_bytes"] for part in PARTS}
    bar[REST] = max(0, slot[kind]["peak_bytes"] - counted)
    return bar


def memory_notes(slots: Slots, kind: str = "measured") -> list[str]:
    """Return what a reader of these slots' numbers must know."""
    notes = []
    if is_one_cpu(slots) and kind == "measured":
        notes.append("The peak is that of the whole process, with Python, PyTorch and the data.")
    elif any(slot["device"] == "cpu" for slot in slots):
        notes.append("On a CPU the peak is the sum of what is counted: a lower bound.")
    places = [_place(slot) for slot in slots if slot["device"] != "cpu"]
    if len(places) > len(set(places)):
        notes.append("Slots that share a GPU each show the peak of the whole GPU.")
    return notes


def unit_of(slots: Slots, kind: str = "measured") -> tuple[str, int]:
    """Return the unit for these slots by their largest peak, and the bytes in it."""
    return unit_for(max(slot[kind]["peak_bytes"] for slot in slots))


def blocks_text(blocks: Sequence[str]) -> str:
    """Return the first and the last of the blocks of a slot."""
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]}"


def slot_line(index: int, device: str, precision: str, blocks: Sequence[str]) -> str:
    """Return what a slot is, and in which precision it computes, in one short line."""
    ends = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    number = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
    return f"slot {index} on {device}, {precision}: {number}, {ends}"


def slab_line(planes: Sequence[int]) -> str:
    """Return how patches are divided, in one short line; planes are those of each slab."""
    least, most = min(planes), max(planes)
    each = f"{least}" if least == most else f"{least} to {most}"
    return f"patches of {sum(planes)} planes along X: {len(planes)} slabs of {each}"


def _place(slot: Mapping[str, Any]) -> tuple[int, str]:
    """Return where a slot is: ranks of two machines may each have a ``cuda:0``."""
    return slot.get("rank", 0), slot["device"]
