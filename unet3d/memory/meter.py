"""How much memory each slot takes, measured.

``parameters``, ``gradients`` and ``optimizer`` are counted from the tensors themselves.
``activations`` are the bytes that autograd keeps for backward, counted while it saves them: the
same on a CPU and on a GPU, and per slot even where two slots share a device. ``peak`` comes from
the CUDA allocator. A CPU has no such allocator, so its peak is the sum of the other four: a lower
bound.

In a step, each action of the schedule ends with a mark. GPUs do work after Python has queued it,
but the allocator hands out memory when work is queued. So marks are in the order of queueing, and
are not a time axis.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.memory.saved_tensors import handling
from unet3d.torch_private import storage_key


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for one stage or replica.

    Two slots may name one device, as in ``cpu,cpu``.
    """

    index: int
    """Its number, from 0."""
    device: torch.device
    blocks: tuple[str, ...]
    """Names of the blocks that run on the slot."""


@dataclass(frozen=True, kw_only=True)
class SlotMemory:
    """Bytes that one slot holds in a training step, predicted or measured."""

    parameters_bytes: int
    """Master weights and buffers."""
    gradients_bytes: int
    """Gradients of the parameters."""
    optimizer_bytes: int
    """State of the optimizer, such as momentum."""
    activations_bytes: int
    """Peak of the bytes kept for backward."""
    peak_bytes: int
    """Largest use of the device during a step, work space included."""

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name."""
        return asdict(self)


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


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The marks of one step on one GPU, or of one slot on a CPU."""

    device: str
    slots: tuple[int, ...]
    """Numbers of the slots whose memory this is."""
    marks: tuple[Mark, ...]
    """One mark for each action of the step, including actions of other slots."""


class Observer:
    """Observes the actions that an executor launches; this base class ignores them.

    Actions that are replayed from CUDA graphs make no tensors, so they are not reported.
    """

    def during(self, slot: Slot, kind: str, micro_batch: int) -> AbstractContextManager[None]:
        """Return a context for a ``forward``, ``loss`` or ``backward`` of a slot."""
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        """Note that a tensor's memory was freed, or allocated again; others may share it."""


class MemoryMeter(Observer):
    """Measures the slots of one executor during training steps.

    Use it as ``executor.observer = meter`` for the steps to be measured, between :meth:`start`
    and :meth:`read`. ``network`` is a BlockNetwork, which this layer cannot import.
    """

    def __init__(self, slots: Sequence[Slot], network: Any) -> None:
        self._slots = list(slots)
        self._modules = {block.name: block.module for block in network.blocks()}
        self._kept = {slot.index: _KeptBytes() for slot in slots}
        self._gradients_bytes = {slot.index: 0 for slot in slots}
        devices = dict.fromkeys(slot.device for slot in slots)
        self._gpus = {device: _GpuMemory(device) for device in devices if device.type == "cuda"}
        self._marks: dict[torch.device | int, list[Mark]] = defaultdict(list)
        """Marks of the latest step, per GPU, or on a CPU per slot."""
        self._saw_action = False

    def start(self) -> None:
        """Forget earlier peaks."""
        for kept in self._kept.values():
            kept.peak = kept.recent_peak = kept.now
        self._gradients_bytes = dict.fromkeys(self._gradients_bytes, 0)
        for gpu in self._gpus.values():
            gpu.start()
        self._marks.clear()

    @contextmanager
    def during(self, slot: Slot, kind: str, micro_batch: int) -> Iterator[None]:
        """Count tensors that autograd saves in the context for a slot, and mark its end."""
        if kind == "forward" and micro_batch == 0 and slot.index == self._slots[0].index:
            self._marks.clear()  # a new step begins
        self._saw_action = True
        with nullcontext() if kind == "backward" else self._counting(slot):
            yield
        self._mark(slot.index, kind, micro_batch)

    def resized(self, tensor: Tensor) -> None:
        """Count the current size of a tensor's memory, which was offloaded or came back."""
        for kept in self._kept.values():
            kept.resize(storage_key(tensor), tensor.untyped_storage().nbytes())

    def end_step(self) -> None:
        """Mark the end of the optimizer's step; call it before the gradients are cleared.

        A replayed step has no other marks, so it gets none here.
        """
        if self._saw_action:
            self._mark(None, "optimizer", None)
        self._saw_action = False

    @contextmanager
    def _counting(self, slot: Slot) -> Iterator[None]:
        kept = self._kept[slot.index]
        owned = {storage_key(value) for value in _tensors(self._modules.values())}
        with handling(lambda tensor: _Saved(tensor, kept, storage_key(tensor) not in owned)):
            yield

    def note_gradients(self) -> None:
        """Count the gradients that are there now; call it before they are cleared."""
        for slot in self._slots:
            known = self._gradients_bytes[slot.index]
            self._gradients_bytes[slot.index] = max(known, self._gradients_now(slot))

    def read(self, optimizer: torch.optim.Optimizer) -> dict[int, SlotMemory]:
        """Return the peak memory of each slot since :meth:`start`, by slot index."""
        for gpu in self._gpus.values():
            gpu.take()
        return {slot.index: self._read_slot(slot, optimizer) for slot in self._slots}

    def timeline(self, measured: Mapping[int, SlotMemory]) -> tuple[Timeline, ...]:
        """Return the marks of the last step: for each GPU, and for each slot on a CPU."""
        lines = []
        for device in self._gpus:
            slots = tuple(slot.index for slot in self._slots if slot.device == device)
            marks = tuple(self._marks[device])
            lines.append(Timeline(device=str(device), slots=slots, marks=marks))
        for slot in self._slots:
            if slot.device.type != "cuda":
                memory = measured[slot.index]
                more = memory.parameters_bytes + memory.optimizer_bytes
                marks = tuple(
                    replace(mark, bytes=mark.bytes + more, peak_bytes=mark.peak_bytes + more)
                    for mark in self._marks[slot.index]
                )
                lines.append(Timeline(device=str(slot.device), slots=(slot.index,), marks=marks))
        return tuple(sorted(lines, key=lambda line: line.slots))

    def _read_slot(self, slot: Slot, optimizer: torch.optim.Optimizer) -> SlotMemory:
        states = [
            value
            for parameter in self._parameters(slot)
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        ]
        owned = _tensors(self._modules[name] for name in slot.blocks)
        parts = {
            "parameters_bytes": _num_bytes([one for one in owned if one.device == slot.device]),
            "gradients_bytes": self._gradients_bytes[slot.index],
            "optimizer_bytes": _num_bytes(states),
            "activations_bytes": self._kept[slot.index].peak,
        }
        is_gpu = slot.device.type == "cuda"
        peak = self._gpus[slot.device].peak_bytes if is_gpu else sum(parts.values())
        return SlotMemory(**parts, peak_bytes=peak)

    def _gradients_now(self, slot: Slot) -> int:
        return _num_bytes([one.grad for one in self._parameters(slot) if one.grad is not None])

    def _parameters(self, slot: Slot) -> list[nn.Parameter]:
        """Return the slot's parameters on its device, without copies made by nn.DataParallel."""
        modules = (self._modules[name] for name in slot.blocks)
        every = (one for module in modules for one in module.parameters())
        return [one for one in every if one.device == slot.device]

    def _mark(self, slot: int | None, kind: str, micro_batch: int | None) -> None:
        mark = partial(Mark, slot=slot, kind=kind, micro_batch=micro_batch)
        for device, gpu in self._gpus.items():
            now, peak = gpu.take()
            self._marks[device].append(mark(bytes=now, peak_bytes=peak))
        for other in self._slots:
            if other.device.type != "cuda":
                now, peak = self._kept[other.index].take()
                more = self._gradients_now(other)
                self._marks[other.index].append(mark(bytes=now + more, peak_bytes=peak + more))


@contextmanager
def measured_steps(executor: Any, optimizer: torch.optim.Optimizer) -> Iterator[MemoryMeter]:
    """Measure all training steps of an executor in the context; read the meter after it."""
    meter = MemoryMeter(executor.slots, executor.module)
    before = executor.observer
    meter.start()
    executor.observer = meter
    hooks = (
        optimizer.register_step_pre_hook(lambda *_: meter.note_gradients()),
        optimizer.register_step_post_hook(lambda *_: meter.end_step()),
    )
    try:
        yield meter
    finally:
        for hook in hooks:
            hook.remove()
        executor.observer = before


class _GpuMemory:
    """The memory in use that the allocator of one GPU reports, and its peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.peak_bytes = 0

    def take(self) -> tuple[int, int]:
        """Return the bytes in use now, and their peak since the last call."""
        stats = torch.cuda.memory_stats(self.device)
        peak: int = stats["allocated_bytes.all.peak"]
        self.peak_bytes = max(self.peak_bytes, peak)
        torch.cuda.reset_peak_memory_stats(self.device)
        return stats["allocated_bytes.all.current"], peak


class _KeptBytes:
    """Running count of the storages that one slot keeps; several tensors may share one."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self.recent_peak = 0
        self._holders: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def add(self, key: int, size: int) -> None:
        self._holders[key] = self._holders.get(key, 0) + 1
        self._sizes.setdefault(key, 0)
        self.resize(key, size)

    def resize(self, key: int, size: int) -> None:
        if key in self._holders:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            self.peak = max(self.peak, self.now)
            self.recent_peak = max(self.recent_peak, self.now)

    def take(self) -> tuple[int, int]:
        """Return the bytes now, and their peak since the last call."""
        peak, self.recent_peak = self.recent_peak, self.now
        return self.now, peak

    def drop(self, key: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.now -= self._sizes.pop(key)


class _Saved:
    """A tensor that autograd keeps; counted until autograd lets go of it."""

    def __init__(self, tensor: Tensor, kept: _KeptBytes, counts: bool) -> None:
        self.tensor = tensor
        if counts:
            key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
            kept.add(key, size)
            weakref.finalize(self, kept.drop, key)

    def restore(self) -> Tensor:
        return self.tensor


def _tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [one for module in modules for one in (*module.parameters(), *module.buffers())]


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
