"""Tensors that backward recomputes instead of keeping them.

The result of a normalisation is read by the next convolution, which needs it once more for the
gradient of its weights. The normalisation keeps its own input anyway, and to recompute its result
from that is one pass over memory: so of two full feature maps for each convolution one is kept
(the idea of in-place activated batch norm, arXiv 1712.02616, and of Chen et al., arXiv 1604.06174).
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
"""Computes a tensor once more, in the same memory layout."""

MIN_ELEMENTS = 2**21
"""Smaller tensors are kept: a launch takes longer than their memory is worth."""


class _Offer(NamedTuple):
    """A tensor that can be recomputed."""

    recompute: Recompute
    source: Tensor | None
    """The large tensor that it is computed from, which is kept; None: there is none."""
    shape: torch.Size
    is_dense: bool
    """Whether it has no zeros around."""
    deferred: Deferred | None
    """The normalisation that makes all of it from the source; None: something else does."""


_known: ContextVar[dict[int, _Offer] | None] = ContextVar("known", default=None)


@contextmanager
def recomputed_in_backward() -> Iterator[None]:
    """Keep no tensor that is offered in the context (:func:`offer`): backward recomputes it."""
    known: dict[int, _Offer] = {}
    token = _known.set(known)
    try:
        with handling(recomputed):
            yield
    finally:
        _known.reset(token)
        known.clear()  # a result that lives on must not keep its source alive


@contextmanager
def nothing_offered() -> Iterator[None]:
    """Offer nothing in the context, because what is computed in it is recomputed as a whole."""
    token = _known.set(None)
    try:
        yield
    finally:
        _known.reset(token)


def recomputed(tensor: Tensor) -> Saved | None:
    """Return what stands for a tensor that is about to be saved, if it or its base was offered."""
    offered = (_known.get() or {}).get(storage_key(tensor))
    if offered is None:
        return None
    if tensor.shape == offered.shape:
        return _Recomputed(offered.recompute, None)
    if not offered.is_dense:  # the recomputed tensor has no zeros around
        return None
    view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return _Recomputed(offered.recompute, view)


class _Recomputed(NamedTuple):
    """Stands for a tensor, or a view of one, until backward asks for it."""

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

    ``recompute`` returns it in the same layout except for zeros around it
    (:mod:`unet3d.kernels.maps`). It must only hold tensors that are kept for backward anyway, and
    of large ones only the ``source``. With a source, only large tensors are recomputed; without
    one, as the result of a part of the network that runs again, tensors of any size.
    """
    known = _known.get()
    if known is None or (source is not None and tensor.numel() < MIN_ELEMENTS):
        return
    key = storage_key(tensor)
    known[key] = _Offer(recompute, source, tensor.shape, not is_padded(tensor), deferred)
    # Another tensor may get the same key once this one is gone.
    weakref.finalize(tensor, known.pop, key, None)


def recomputing(tensor: Tensor) -> Recompute:
    """Return what gives a tensor in backward: recomputed where it was offered, or kept."""
    offered = _offer_of_whole(tensor)
    held = tensor.detach()
    return offered.recompute if offered is not None else lambda: held


def kept_for(tensor: Tensor) -> Tensor:
    """Return what is kept for backward in place of a tensor: its source, or the tensor itself."""
    offered = _offer_of_whole(tensor)
    return tensor if offered is None or offered.source is None else offered.source


def is_recomputed(tensor: Tensor) -> bool:
    """Return whether backward recomputes a tensor, whoever saves it."""
    return _offer_of_whole(tensor) is not None


def normalized_from(tensor: Tensor) -> tuple[Tensor, Deferred] | None:
    """Return from what, and how, a tensor is normalised that would be recomputed, if it is."""
    offered = _offer_of_whole(tensor)
    if offered is None or offered.source is None or offered.deferred is None:
        return None
    return offered.source, offered.deferred


def _offer_of_whole(tensor: Tensor) -> _Offer | None:
    """Return the offer of a tensor that is not a part of another."""
    offered = (_known.get() or {}).get(storage_key(tensor))
    return None if offered is None or tensor.shape != offered.shape else offered
