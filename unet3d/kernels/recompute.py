"""Tensors that backward recomputes instead of keeping them.

A convolution reads the result of a normalisation, and needs it again for the gradient of its
weights. The normalisation keeps its input anyway, and recomputing the result from it is one pass
over memory. So one feature map per convolution is kept instead of two (the idea of in-place
activated batch norm, arXiv 1712.02616, and of Chen et al., arXiv 1604.06174).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.kernels.maps import Deferred, is_padded
from unet3d.memory.saved_tensors import Saved, handling
from unet3d.torch_private import storage_key

Recompute = Callable[[], Tensor]
"""Recomputes a tensor in the same memory layout."""

MIN_ELEMENTS = 2**21
"""Smaller tensors are kept: their memory is not worth a launch."""


class _Offer(NamedTuple):
    """A tensor that can be recomputed."""

    recompute: Recompute
    source: Tensor | None
    """The large tensor that it is recomputed from, kept for backward; None: no large tensor."""
    shape: torch.Size
    is_dense: bool
    """Whether the tensor is stored without zeros around Z (:mod:`unet3d.kernels.maps`)."""
    deferred: Deferred | None
    """The normalisation that makes the whole tensor from the source; None: another operation
    does."""


_known: ContextVar[dict[int, _Offer] | None] = ContextVar("known", default=None)


@contextmanager
def recomputed_in_backward() -> Iterator[None]:
    """Let backward recompute tensors that are offered in the context (:func:`offer`)."""
    known: dict[int, _Offer] = {}
    token = _known.set(known)
    try:
        with handling(recomputed):
            yield
    finally:
        _known.reset(token)
        known.clear()  # a surviving result must not keep its source alive


@contextmanager
def nothing_offered() -> Iterator[None]:
    """Ignore offers in the context, because its whole computation is recomputed."""
    token = _known.set(None)
    try:
        yield
    finally:
        _known.reset(token)


def recomputed(tensor: Tensor) -> Saved | None:
    """Return a placeholder for a tensor to be saved, or None if its memory was not offered."""
    offered = (_known.get() or {}).get(storage_key(tensor))
    if offered is None:
        return None
    if tensor.shape == offered.shape:
        return _Recomputed(offered.recompute, None)
    if not offered.is_dense:  # the recomputed tensor is stored without the zeros around Z
        return None
    view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return _Recomputed(offered.recompute, view)


class _Recomputed(NamedTuple):
    """Placeholder for a tensor, or a view of one, until backward unpacks it."""

    recompute: Recompute
    view: tuple[torch.Size, tuple[int, ...], int] | None

    def restore(self) -> Tensor:
        tensor = self.recompute()
        return tensor if self.view is None else tensor.as_strided(*self.view)


def offer(
    tensor: Tensor,
    recompute: Recompute,
    source: Tensor | None = None,
    deferred: Deferred | None = None,
) -> None:
    """Register how to recompute a tensor that was just computed, if a context asks for it.

    ``recompute`` returns it in the same layout except for zeros around Z
    (:mod:`unet3d.kernels.maps`). It may only hold tensors that are kept for backward anyway, and
    none but the ``source`` may be large. With a source, only large tensors are recomputed; without
    one, as in a recomputed part of the network, tensors of any size.
    """
    known = _known.get()
    if known is None or (source is not None and tensor.numel() < MIN_ELEMENTS):
        return
    key = storage_key(tensor)
    known[key] = _Offer(recompute, source, tensor.shape, not is_padded(tensor), deferred)
    # After this tensor is freed, another one may get the same key.
    weakref.finalize(tensor, known.pop, key, None)


def recomputing(tensor: Tensor) -> Recompute:
    """Return a function that recomputes a tensor in backward, or returns the kept tensor."""
    offered = _offer_of_whole(tensor)
    held = tensor.detach()
    return offered.recompute if offered is not None else lambda: held


def kept_for(tensor: Tensor) -> Tensor:
    """Return what is kept for backward in place of a tensor: its source, or the tensor itself."""
    offered = _offer_of_whole(tensor)
    return tensor if offered is None or offered.source is None else offered.source


def is_recomputed(tensor: Tensor) -> bool:
    """Return whether backward recomputes a tensor, whichever operation saves it."""
    return _offer_of_whole(tensor) is not None


def normalized_from(tensor: Tensor) -> tuple[Tensor, Deferred] | None:
    """Return source and normalisation of a tensor that backward would recompute by normalising."""
    offered = _offer_of_whole(tensor)
    if offered is None or offered.source is None or offered.deferred is None:
        return None
    return offered.source, offered.deferred


def _offer_of_whole(tensor: Tensor) -> _Offer | None:
    """Return the offer of a tensor, or None if it has none or is only a part of an offered one."""
    offered = (_known.get() or {}).get(storage_key(tensor))
    return None if offered is None or tensor.shape != offered.shape else offered
