"""How much memory each slot takes, measured.

``parameters``, ``gradients`` and ``optimizer`` are counted from the tensors themselves.
``activations`` are the bytes that autograd keeps for backward, counted while it saves them: the
same on a CPU and on a GPU, and per slot even where two slots share a device. ``peak`` and
``reserved`` come from the CUDA allocator; on a CPU, which has none that could be asked, the peak
is the sum of the other four, and so a lower bound.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unet3d.saved_tensors import handling, storage_key


class SlotLike(Protocol):
    """What this module needs to know of a slot."""

    @property
    def index(self) -> int:
        """Its number, from 0."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that it runs."""
        ...


@dataclass(frozen=True)
class SlotMemory:
    """Bytes that one slot holds in training, predicted or measured.

    Attributes:
        parameters_bytes: Master weights and buffers.
        gradients_bytes: Their gradients.
        optimizer_bytes: State of the optimizer, such as momentum.
        activations_bytes: Largest sum, at any moment, of what is kept for backward.
        peak_bytes: Largest use of the device during a step, work space included.
        reserved_bytes: What the allocator took from the device to serve it.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peak_bytes: int
    reserved_bytes: int

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name."""
        return asdict(self)


class MemoryMeter:
    """Measures the slots of one executor during training steps.

    Use it as ``executor.watch_forward = meter.watch`` for the steps to be measured, between
    :meth:`start` and :meth:`read`.
    """

    def __init__(self, slots: Sequence[SlotLike], module: nn.Module) -> None:
        """Prepare to measure.

        Args:
            slots: Where the network's blocks are.
            module: The network; the storages of its parameters and buffers are not activations.
        """
        self._slots = list(slots)
        self._module = module
        self._kept = {slot.index: _KeptBytes() for slot in slots}
        self._gradients_bytes = {slot.index: 0 for slot in slots}

    def start(self) -> None:
        """Forget earlier peaks."""
        for kept in self._kept.values():
            kept.peak = kept.now
        self._gradients_bytes = dict.fromkeys(self._gradients_bytes, 0)
        for device in self._gpus():
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def watch(self, slot: SlotLike) -> Iterator[None]:
        """Count what autograd saves in the context as kept by a slot.

        Args:
            slot: Whose forward pass runs in the context.
        """
        kept = self._kept[slot.index]
        own = [*self._module.parameters(), *self._module.buffers()]
        owned = {storage_key(value) for value in own}

        with handling(lambda tensor: _Saved(tensor, kept, storage_key(tensor) not in owned)):
            yield

    def note_gradients(self) -> None:
        """Count the gradients that are there now; call it before they are cleared."""
        for slot in self._slots:
            gradients = [
                parameter.grad
                for module in self._block_modules(slot)
                for parameter in module.parameters()
                if parameter.grad is not None
            ]
            known = self._gradients_bytes[slot.index]
            self._gradients_bytes[slot.index] = max(known, _num_bytes(gradients))

    def read(self, optimizer: torch.optim.Optimizer) -> dict[int, SlotMemory]:
        """Return what each slot held at most since :meth:`start`, by slot index.

        Args:
            optimizer: Of the network's parameters, after a step.
        """
        for device in self._gpus():
            torch.cuda.synchronize(device)
        return {slot.index: self._read_slot(slot, optimizer) for slot in self._slots}

    def _read_slot(self, slot: SlotLike, optimizer: torch.optim.Optimizer) -> SlotMemory:
        modules = self._block_modules(slot)
        parameters = [value for module in modules for value in module.parameters()]
        buffers = [value for module in modules for value in module.buffers()]
        states = [
            value
            for parameter in parameters
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor)
        ]
        parameters_bytes = _num_bytes([*parameters, *buffers])
        gradients_bytes = self._gradients_bytes[slot.index]
        optimizer_bytes = _num_bytes(states)
        activations_bytes = self._kept[slot.index].peak
        if slot.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(slot.device)
            reserved_bytes = torch.cuda.max_memory_reserved(slot.device)
        else:
            peak_bytes = parameters_bytes + gradients_bytes + optimizer_bytes + activations_bytes
            reserved_bytes = peak_bytes
        return SlotMemory(
            parameters_bytes,
            gradients_bytes,
            optimizer_bytes,
            activations_bytes,
            peak_bytes,
            reserved_bytes,
        )

    def _block_modules(self, slot: SlotLike) -> list[nn.Module]:
        return [block.module for block in self._module.blocks() if block.name in slot.blocks]  # type: ignore[operator]

    def _gpus(self) -> set[torch.device]:
        return {slot.device for slot in self._slots if slot.device.type == "cuda"}


class _KeptBytes:
    """Running count of the storages that one slot keeps; several tensors may share one."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._holders: dict[int, int] = {}

    def add(self, key: int, size: int) -> None:
        holders = self._holders.get(key, 0)
        if holders == 0:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._holders[key] = holders + 1

    def drop(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self.now -= size


class _Saved:
    """A tensor that autograd keeps; counted until autograd lets go of it."""

    def __init__(self, tensor: Tensor, kept: _KeptBytes, counts: bool) -> None:
        self.tensor = tensor
        if counts:
            key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
            kept.add(key, size)
            weakref.finalize(self, kept.drop, key, size)

    def restore(self) -> Tensor:
        return self.tensor


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device: a GPU's own, or the machine's.

    Args:
        device: A CPU or CUDA device.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_record(
    parallel: str,
    slots: Sequence[SlotLike],
    measured: dict[int, SlotMemory],
    predicted: dict[int, SlotMemory],
) -> dict[str, Any]:
    """Return what ``memory.json`` holds.

    Args:
        parallel: The mode.
        slots: The slots, in order.
        measured: Per slot index.
        predicted: Likewise, before the training started.
    """
    return {
        "parallel": parallel,
        "slots": [
            {
                "slot": slot.index,
                "device": str(slot.device),
                "blocks": list(slot.blocks),
                "device_bytes": device_bytes(slot.device),
                "predicted": predicted[slot.index].to_dict(),
                "measured": measured[slot.index].to_dict(),
            }
            for slot in slots
        ],
    }


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
