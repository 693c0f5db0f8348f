"""What the numbers of slots mean, for every report on memory: parts, units, notes."""

from collections.abc import Mapping, Sequence
from typing import Any

from unet3d.reports.format import unit_for

PARTS = ("parameters", "gradients", "optimizer", "activations")
"""What is counted of a slot's memory."""
REST = "rest of the peak"
PART_HEADS = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "acti-\nvations")
"""The parts as heads of columns, broken by hand so that tables fit 80 characters."""


def bar_parts(
    slot: Mapping[str, Any], slots: Sequence[Mapping[str, Any]], kind: str = "measured"
) -> dict[str, int]:
    """Return the bytes of each part of a slot's peak, :data:`REST` last.

    What a GPU's peak holds beyond the counted parts is work space, shared by the slots on it.

    Args:
        slot: One slot of a record.
        slots: All slots of the record.
        kind: ``measured`` or ``predicted``.
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


def memory_notes(slots: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader of these slots' numbers must know.

    Args:
        slots: All slots of a record.
    """
    devices = [slot["device"] for slot in slots]
    notes = []
    if "cpu" in devices:
        notes.append("On a CPU the peak is the sum of what is counted: a lower bound.")
    places = [_place(slot) for slot in slots if slot["device"] != "cpu"]
    if len(places) > len(set(places)):
        notes.append("Slots that share a GPU each show the peak of the whole GPU.")
    return notes


def slot_line(index: int, device: str, precision: str, blocks: Sequence[str]) -> str:
    """Return what a slot is, in one short line.

    Args:
        index: Number of the slot.
        device: Name of its device.
        precision: What it computes in.
        blocks: Names of its blocks, in their order; at least one.
    """
    ends = blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
    number = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
    return f"slot {index} on {device}, {precision}: {number}, {ends}"


def slab_line(planes: Sequence[int]) -> str:
    """Return how patches are divided, in one short line.

    Args:
        planes: Planes of each slab of the largest patch, in order.
    """
    least, most = min(planes), max(planes)
    each = f"{least}" if least == most else f"{least} to {most}"
    return f"patches of {sum(planes)} planes along X: {len(planes)} slabs of {each}"


def _place(slot: Mapping[str, Any]) -> tuple[int, str]:
    """Return where a slot is: ranks of two machines may each have a ``cuda:0``."""
    return slot.get("rank", 0), slot["device"]


def unit_of(slots: Sequence[Mapping[str, Any]], kind: str = "measured") -> tuple[str, int]:
    """Return the unit for these slots by their largest peak, and the bytes in it.

    Args:
        slots: All slots of a record.
        kind: ``measured`` or ``predicted``.
    """
    return unit_for(max(slot[kind]["peak_bytes"] for slot in slots))
