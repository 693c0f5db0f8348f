"""The memory that the slots of all ranks took in training: ``memory.json`` and ``memory.png``."""

from typing import Any

import torch

from unet3d.distributed.group import Group
from unet3d.memory.meter import MemoryMeter
from unet3d.memory.record import memory_record, merged_records
from unet3d.parallel import Executor
from unet3d.planning.memory_estimate import MemoryEstimate
from unet3d.reports.memory import write_memory_picture
from unet3d.runs.run_folder import RunFolder


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
        write_memory_picture(record, folder.memory_picture)
    return record
