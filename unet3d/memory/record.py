"""The recorded memory of a training run: the content of ``memory.json``."""

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from unet3d.memory.meter import Slot, SlotMemory, Timeline


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device: a GPU's own, or the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reserved_bytes(device: torch.device) -> int:
    """Return the peak of memory that a GPU's allocator has reserved in the measurement.

    On a CPU it is the peak resident memory of this process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_record(
    parallel: str,
    slots: Sequence[Slot],
    measured: Mapping[int, SlotMemory],
    predicted: Mapping[int, SlotMemory] | None,
    timelines: Sequence[Timeline] = (),
) -> dict[str, Any]:
    """Return what ``memory.json`` holds; call it right after the measurement."""
    return {
        "parallel": parallel,
        "slots": [
            {
                "slot": slot.index,
                "device": str(slot.device),
                "blocks": list(slot.blocks),
                "device_bytes": device_bytes(slot.device),
                "predicted": predicted and predicted[slot.index].to_dict(),
                "measured": {
                    **measured[slot.index].to_dict(),
                    "reserved_bytes": max(
                        measured[slot.index].peak_bytes, reserved_bytes(slot.device)
                    ),
                },
            }
            for slot in slots
        ],
        "timeline": [asdict(line) for line in timelines],
    }


def merged_records(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of the slots of all ranks, numbered consecutively."""
    slots: list[dict[str, Any]] = []
    timelines: list[dict[str, Any]] = []
    for rank, record in enumerate(records):
        before = len(slots)
        slots += [{**slot, "slot": before + slot["slot"], "rank": rank} for slot in record["slots"]]
        for timeline in record["timeline"]:
            own = [before + slot for slot in timeline["slots"]]
            marks = [
                {**mark, "slot": None if mark["slot"] is None else before + mark["slot"]}
                for mark in timeline["marks"]
            ]
            timelines.append({**timeline, "slots": own, "marks": marks, "rank": rank})
    return {**records[0], "slots": slots, "timeline": timelines}
