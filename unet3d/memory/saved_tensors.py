"""What becomes of each tensor that autograd saves for backward.

Of nested saved-tensor hooks PyTorch asks the innermost alone. Here all are asked, the innermost
first, until one takes the tensor; so one may make a tensor again instead of keeping it while
another counts what is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Saved(Protocol):
    """What stands for a saved tensor until backward asks for it."""

    def restore(self) -> Tensor:
        """Return the tensor, with the values, shape and strides that it had."""
        ...


Handler = Callable[[Tensor], Saved | None]
"""Takes a tensor that is about to be saved, and returns what stands for it, or None to pass."""

_handlers: ContextVar[tuple[Handler, ...]] = ContextVar("handlers", default=())


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Ask a handler about every tensor that is saved in the context.

    Args:
        handler: Is asked before those of the contexts around.
    """
    token = _handlers.set((handler, *_handlers.get()))
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _handlers.reset(token)


def storage_key(tensor: Tensor) -> int:
    """Return what tensors of one memory share while one of them lives; fakes have no address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _pack(tensor: Tensor) -> Tensor | Saved:
    for handler in _handlers.get():
        saved = handler(tensor)
        if saved is not None:
            return saved
    return tensor


def _unpack(saved: Tensor | Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.restore()
