"""Handlers for the tensors that autograd saves for backward.

With nested saved-tensor hooks PyTorch calls only the innermost. Here all handlers are asked, the
innermost first, until one takes the tensor. So one may recompute a tensor instead of keeping it
while another counts what is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Saved(Protocol):
    """A stand-in for a saved tensor until backward needs it."""

    def restore(self) -> Tensor:
        """Return the tensor, with the values, shape and strides that it had."""
        ...


Handler = Callable[[Tensor], Saved | None]
"""Takes a tensor that is about to be saved, and returns a stand-in, or None to pass."""

_handlers: ContextVar[tuple[Handler, ...]] = ContextVar("handlers", default=())


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Ask a handler about each tensor saved in the context, before enclosing contexts' handlers."""
    token = _handlers.set((handler, *_handlers.get()))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _handlers.reset(token)


class Kept:
    """A saved tensor that is kept unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def restore(self) -> Tensor:
        """Return the tensor."""
        return self._tensor


def save(tensor: Tensor) -> Saved:
    """Return the stand-in for a tensor that is kept for backward outside autograd."""
    saved = _pack(tensor)
    return Kept(saved) if isinstance(saved, Tensor) else saved


def _pack(tensor: Tensor) -> Tensor | Saved:
    for handler in _handlers.get():
        saved = handler(tensor)
        if saved is not None:
            return saved
    return tensor


def _unpack(saved: Tensor | Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.restore()
