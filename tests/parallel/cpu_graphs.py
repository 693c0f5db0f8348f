"""CUDA graphs emulated on a CPU: operations are recorded, and replayed on the same memory."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedOperations(TorchDispatchMode):
    """Records every operation in its context."""

    def __init__(self):
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, dict(kwargs or {}), made))
        return made

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.data.copy_(value)


class CpuGraphPool:
    """The graphs of a CPU; nothing is freed, so no memory is reused."""

    num_captured = 0
    is_capturing = False

    def __init__(self, device):
        self.device = device

    @contextmanager
    def capture(self):
        type(self).num_captured += 1
        type(self).is_capturing = True
        try:
            with RecordedOperations() as graph:
                yield graph
        finally:
            type(self).is_capturing = False

    def place_of(self, tensor):
        return tensor

    def wait(self, event):
        raise AssertionError("a CPU has no events")

    def current(self):
        return nullcontext()
