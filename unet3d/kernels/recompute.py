"""Tensors that are made again in backward instead of being kept.

What a normalisation writes is read by the next convolution, which wants it once more for the
gradient of its weights. The normalisation keeps its own input anyway, and making its result again
from that is one pass over memory: so of two full feature maps for each convolution one is kept
(the idea of in-place activated batch norm, arXiv 1712.02616, and of Chen et al., arXiv 1604.06174).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unet3d.kernels.padding import is_padded
from unet3d.memory.saved_tensors import handling, storage_key

Recipe = Callable[[], Tensor]
"""Makes a tensor again, in the same memory layout."""

MIN_ELEMENTS = 2**21
"""Smaller tensors are kept: the launch takes longer than their memory is worth."""


@dataclass(frozen=True, kw_only=True)
class _Made:
    """How a tensor was made."""

    recipe: Recipe
    source: Tensor
    shape: torch.Size
    is_dense: bool


_known: ContextVar[dict[int, _Made] | None] = ContextVar("known", default=None)


@contextmanager
def recomputed_in_backward() -> Iterator[None]:
    """Keep recipes instead of tensors, of those made in the context by what calls :func:`offer`."""
    known: dict[int, _Made] = {}

    def handler(tensor: Tensor) -> _Remade | None:
        made = known.get(storage_key(tensor))
        if made is None:
            return None
        if tensor.shape == made.shape:
            return _Remade(recipe=made.recipe, view=None)
        if not made.is_dense:  # what is made again has no zeros around
            return None
        return _Remade(
            recipe=made.recipe, view=(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        )

    token = _known.set(known)
    try:
        with handling(handler):
            yield
    finally:
        _known.reset(token)
        known.clear()  # a result that lives on must not keep alive what it was made from


def offer(tensor: Tensor, recipe: Recipe, source: Tensor) -> None:
    """Let a tensor be made again, where a context asks for it.

    Args:
        tensor: Just made.
        recipe: Makes it again, in the same layout but for zeros around (see
            :mod:`unet3d.kernels.padding`); holds nothing that is not kept for backward anyway.
        source: The large one of what it holds.
    """
    known = _known.get()
    if known is None or tensor.numel() < MIN_ELEMENTS:
        return
    key = storage_key(tensor)
    known[key] = _Made(
        recipe=recipe, source=source, shape=tensor.shape, is_dense=not is_padded(tensor)
    )
    # Another tensor may get the same key once this one is gone.
    weakref.finalize(tensor, known.pop, key, None)


def recomputing(tensor: Tensor) -> Recipe:
    """Return what gives a tensor in backward: its recipe, where there is one, or itself.

    Args:
        tensor: What another recipe needs.
    """
    made = (_known.get() or {}).get(storage_key(tensor))
    held = tensor.detach()
    return made.recipe if made is not None else lambda: held


def kept_for(tensor: Tensor) -> Tensor:
    """Return what is kept for backward in place of a tensor: what it is made from, or itself.

    Args:
        tensor: Made in this context.
    """
    made = (_known.get() or {}).get(storage_key(tensor))
    return tensor if made is None else made.source


def forget_source(tensor: Tensor) -> None:
    """Let a tensor be made again from nothing, where only shapes matter: on fake tensors.

    Args:
        tensor: Made in this context.
    """
    known = _known.get() or {}
    made = known.get(storage_key(tensor))
    if made is not None:
        like = tensor.detach()
        known[storage_key(tensor)] = replace(
            made, recipe=lambda: torch.empty_like(like), source=like
        )


@dataclass(frozen=True, kw_only=True)
class _Remade:
    """Stands for a tensor, or a view of one, until backward asks for it."""

    recipe: Recipe
    view: tuple[torch.Size, tuple[int, ...], int] | None

    def restore(self) -> Tensor:
        tensor = self.recipe()
        return tensor if self.view is None else tensor.as_strided(*self.view)
