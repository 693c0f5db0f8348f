"""The memory that the slots of all ranks took in training: ``memory.json`` and ``memory.png``."""

from typing import Any

import torch

from unet3d.distributed.group import Group
from unet3d.memory.meter import MemoryMeter
from unet3d.memory.record import memory_record, merged_records, reserved_bytes
from unet3d.parallel import Executor
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.memory import write_memory_picture
from unet3d.runs.run_folder import RunFolder, writing


def report_memory(
    meter: MemoryMeter,
    *,
    mode: str,
    executor: Executor,
    optimizer: torch.optim.Optimizer,
    prediction: MemoryEstimate | None,
    folder: RunFolder,
    group: Group,
) -> dict[str, Any]:
    """Write what was measured beside what was predicted, and return what ``memory.json`` holds.

    Args:
        meter: After the measured steps of this rank.
        mode: Parallel mode of the training.
        executor: The placed network.
        optimizer: Its optimizer, after a step.
        prediction: Of this rank's memory; None: there is none.
        folder: Where the first rank writes.
        group: The ranks; all of them call it.
    """
    measured = meter.read(optimizer)
    own = memory_record(
        mode,
        executor.slots,
        measured,
        None if prediction is None else prediction.memory,
        meter.timeline(measured),
    )
    record = merged_records(group.exchange(own))
    if group.is_first:
        folder.write_json(folder.memory, record)
        with writing(folder.memory_picture):
            write_memory_picture(record, folder.memory_picture)
    return record


def update_reserved(
    record: dict[str, Any], executor: Executor, folder: RunFolder, group: Group
) -> None:
    """Write down what the allocators have reserved in the end.

    Steps are measured while they are launched; those of small volumes are captured later, and keep
    memory of their own.

    Args:
        record: What :func:`report_memory` returned; it is changed.
        executor: The placed network.
        folder: Where the first rank writes.
        group: The ranks; all of them call it.
    """
    own = [reserved_bytes(slot.device) for slot in executor.slots]
    reserved = [number for numbers in group.exchange(own) for number in numbers]
    is_changed = False
    for slot, number in zip(record["slots"], reserved, strict=True):
        measured = slot["measured"]
        if number > measured["reserved_bytes"]:
            measured["reserved_bytes"] = number
            is_changed = True
    if is_changed and group.is_first:
        folder.write_json(folder.memory, record)
