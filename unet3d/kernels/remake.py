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
from dataclasses import dataclass

from torch import Tensor

from unet3d.saved_tensors import handling, storage_key

Recipe = Callable[[], Tensor]
"""Makes a tensor again, in the same memory layout."""

MIN_ELEMENTS = 2**21
"""Smaller tensors are kept: the launch takes longer than their memory is worth."""

_recipes: ContextVar[dict[int, Recipe] | None] = ContextVar("recipes", default=None)


@contextmanager
def remade_in_backward() -> Iterator[None]:
    """Keep recipes instead of tensors, of those made in the context by what calls :func:`offer`."""
    recipes: dict[int, Recipe] = {}

    def handler(tensor: Tensor) -> _Remade | None:
        recipe = recipes.get(storage_key(tensor))
        if recipe is None:
            return None
        return _Remade(recipe, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    token = _recipes.set(recipes)
    try:
        with handling(handler):
            yield
    finally:
        _recipes.reset(token)


def offer(tensor: Tensor, recipe: Recipe) -> None:
    """Let a tensor be made again, where a context asks for it.

    Args:
        tensor: Just made.
        recipe: Holds nothing that is not kept for backward anyway.
    """
    recipes = _recipes.get()
    if recipes is None or tensor.numel() < MIN_ELEMENTS:
        return
    key = storage_key(tensor)
    recipes[key] = recipe
    # Another tensor may get the same key once this one is gone.
    weakref.finalize(tensor, recipes.pop, key)


def source(tensor: Tensor) -> Recipe:
    """Return what gives a tensor in backward: its recipe, where there is one, or itself.

    Args:
        tensor: What another recipe needs.
    """
    recipes = _recipes.get()
    held = tensor.detach()
    return (recipes or {}).get(storage_key(tensor)) or (lambda: held)


@dataclass(frozen=True)
class _Remade:
    """Stands for a tensor, or a view of one, until backward asks for it."""

    recipe: Recipe
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        return self.recipe().as_strided(self.shape, self.stride, self.offset)
