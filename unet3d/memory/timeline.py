"""Memory over one step: a mark after each action of the schedule.

Python queues work and GPUs do it later, but a GPU's allocator hands out memory while the work is
queued. So marks are in the order in which actions are queued, and no time passes between them.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The memory in use around one action."""

    slot: int | None
    """The slot that acted; None: the optimizer, on all slots."""
    kind: str
    """``forward``, ``loss``, ``backward`` or ``optimizer``."""
    micro_batch: int | None
    """Number of the micro-batch, from 0; None for the optimizer."""
    bytes: int
    """Bytes in use at the end of the action."""
    peak_bytes: int
    """The most bytes in use since the previous action."""

    def plus(self, constant: int) -> "Mark":
        """Return the mark with as many more bytes in use."""
        return Mark(
            slot=self.slot,
            kind=self.kind,
            micro_batch=self.micro_batch,
            bytes=self.bytes + constant,
            peak_bytes=self.peak_bytes + constant,
        )


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The marks of one step on one GPU, or of one slot on a CPU."""

    device: str
    """Its name."""
    slots: tuple[int, ...]
    """Numbers of the slots whose memory this is."""
    marks: tuple[Mark, ...]
    """One mark for each action of the step, including those of other slots."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return asdict(self)


class GpuMemory:
    """What the allocator of one GPU reports, with the peak since the last call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    def start(self) -> None:
        """Forget earlier peaks."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.peak_bytes = 0

    def take(self) -> tuple[int, int]:
        """Return the bytes in use now, and the most since the last call."""
        stats = torch.cuda.memory_stats(self.device)
        peak: int = stats["allocated_bytes.all.peak"]
        self.peak_bytes = max(self.peak_bytes, peak)
        torch.cuda.reset_peak_memory_stats(self.device)
        return stats["allocated_bytes.all.current"], peak
