"""What operations on fake tensors return, remembered, because a step repeats most of them.

PyTorch remembers that too, but looks it up by everything that a tensor can be, sparse or
quantized, which takes longer than all else in a step of fake tensors. Here a tensor is only dense.
Whatever else comes is left to PyTorch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.torch_private import FakeTensor, FakeTensorMode, storage_key, without_dispatch

_PLAIN = frozenset(
    (
        type(None),
        bool,
        int,
        float,
        str,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
"""Types of arguments that are compared by value."""
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default)
"""Operations whose result never has the memory of its argument, which may be a real parameter."""
_UNPREDICTABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations whose results do not follow from the arguments' shapes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor that an operation returns."""

    source: int | None
    """Number of the argument that has its memory; None: the memory is new."""
    is_source: bool
    """Whether it is that argument itself."""
    shape: tuple[int, ...]
    """Its shape."""
    stride: tuple[int, ...]
    """Its strides."""
    offset: int
    """Its first element in the memory."""
    dtype: torch.dtype
    """Its type."""
    device: torch.device
    """The device that it pretends to be on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """All that an operation returns."""

    several: tuple[_Result | None, ...]
    """Each result; None is returned as such."""
    container: type[tuple[Any, ...]] | type[list[Any]] | None
    """What holds them; None: the only one is returned by itself."""


_known: dict[tuple[Any, ...], _Results | None] = {}
"""By operation and arguments, in all of a process; None: the arguments do not tell."""


class FakeResults:
    """Runs operations on the tensors of one fake mode, or recalls what they return."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operation returns."""
        given: dict[int, Tensor] = {}
        key = self._key(func, args, kwargs, given)
        if key is None:
            return func(*args, **kwargs)
        tensors = list(given.values())
        try:
            known = _known[key]
        except KeyError:
            results = func(*args, **kwargs)
            is_same = self._key(func, args, kwargs, {}) == key  # no argument's shape was changed
            _known[key] = _described(func, results, tensors) if is_same else None
            return results
        if known is None:
            return func(*args, **kwargs)
        made = [result and self._make(result, tensors) for result in known.several]
        return made[0] if known.container is None else known.container(made)

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: dict[int, Tensor]
    ) -> tuple[Any, ...] | None:
        """Return all that results depend on, and add the tensors, each once, by their ids.

        None: more than is known here.
        """
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if self._describe(args, key, tensors):
            if not kwargs:
                return tuple(key)
            key += kwargs
            if self._describe(kwargs.values(), key, tensors):
                return tuple(key)
        return None

    def _describe(self, values: Iterable[Any], key: list[Any], tensors: dict[int, Tensor]) -> bool:
        """Add what results depend on to a key; return whether that is all."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None:
                    return False
                if id(value) in tensors:  # such as an argument that the result is written to
                    key += (kind, list(tensors).index(id(value)))
                    continue
                tensors[id(value)] = value
                key += (
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                    value.dtype,
                    value.layout,
                    value.fake_device,
                )
            elif kind in _PLAIN:
                key += (kind, value)  # 1 and 1.0 are equal
            elif kind is nn.Parameter:  # a real one, which a result may not share memory with
                if key[0] not in _COPIES:
                    return False
                tensors[id(value)] = value
                key += (kind, value.shape, value.stride(), value.dtype, value.device)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(value, key, tensors):
                    return False
            else:
                return False
        return True

    def _make(self, result: _Result, tensors: Sequence[Tensor]) -> Tensor:
        if result.source is not None and result.is_source:
            return tensors[result.source]
        with without_dispatch():
            made = torch.empty_strided(
                result.shape, result.stride, dtype=result.dtype, device="meta"
            )
            if result.source is not None:
                storage = tensors[result.source].untyped_storage()
                made.set_(storage, result.offset, result.shape, result.stride)
        return FakeTensor(self._mode, made, result.device)


def _described(func: Any, results: Any, tensors: Sequence[Tensor]) -> _Results | None:
    """Return what makes such results again; None: the arguments do not tell."""
    container = type(results) if isinstance(results, (tuple, list)) else None
    several = (results,) if container is None else results
    made = [one for one in several if one is not None]
    if any(tag in func.tags for tag in _UNPREDICTABLE) or not all(map(_is_plain, made)):
        return None
    keys = [storage_key(tensor) for tensor in tensors]
    new = [storage_key(one) for one in made if storage_key(one) not in keys]
    described: list[_Result | None] = []
    for one in several:
        if one is None:
            described.append(None)
            continue
        same = [number for number, tensor in enumerate(tensors) if tensor is one]
        sources = same or [number for number, key in enumerate(keys) if key == storage_key(one)]
        if len(sources) > 1 or new.count(storage_key(one)) > 1:
            return None
        if not sources and (one.storage_offset() or one.untyped_storage().nbytes() != _extent(one)):
            return None
        described.append(
            _Result(
                source=sources[0] if sources else None,
                is_source=bool(same),
                shape=tuple(one.shape),
                stride=one.stride(),
                offset=one.storage_offset(),
                dtype=one.dtype,
                device=one.device,
            )
        )
    return _Results(several=tuple(described), container=container)


def _is_plain(result: Any) -> bool:
    return (
        type(result) is FakeTensor
        and result.constant is None
        and result.layout == torch.strided
        and not (result.is_conj() or result.is_neg() or result.requires_grad)
    )


def _extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
