"""A cache of the results of operations on fake tensors, because a step repeats most of them.

PyTorch's own cache has keys for all kinds of tensors, such as sparse and quantized tensors. Its
lookups take more time than the rest of a fake step. This cache has dense tensors only, and leaves
others to PyTorch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unet3d.torch_private import (
    FakeTensor,
    FakeTensorMode,
    schema_of,
    storage_key,
    without_dispatch,
)

_BY_VALUE = {type(None), bool, int, float, str}
_BY_VALUE |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.empty_like.default)
"""Operations that never return memory of their argument, which may be a real parameter."""
_UNPREDICTABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of operations whose results do not follow from the arguments' shapes."""


class _Result(NamedTuple):
    """A tensor that an operation returns."""

    source: int | None
    """Index of the argument whose memory it shares; None: the memory is new."""
    num_bytes: int
    """Bytes of its memory."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


_Results = tuple[type | None, list[_Result | None]]
"""Type of the container of results, or None for a single result; then each result, None where the
operation returns None."""

_known: dict[Any, _Results | None] = {}
"""Results by operation and arguments, in the whole process; None: arguments do not determine
them."""


class FakeResults:
    """Runs operations on the tensors of one fake mode, or recalls their results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation."""
        schema, tensors = schema_of(func), list[Tensor]()
        if schema.is_mutable:
            if schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags:
                first = args[0][0] if isinstance(args[0], list) else args[0]
                if isinstance(first, FakeTensor):  # in place; a fake tensor has no values to change
                    return args[0] if schema.returns else None
            return func(*args, **kwargs)
        key = (func, self._key(func, (args, *kwargs.items()), tensors))
        known = _known.get(key)
        if known is None:
            results = func(*args, **kwargs)
            if key[-1] is not None and key not in _known:
                _known[key] = _described(func, results, tensors)
            return results
        container, several = known
        made = [one and self._make(one, tensors) for one in several]
        return made[0] if container is None else container(made)

    def _key(self, func: Any, value: Any, tensors: list[Tensor]) -> Any:
        """Return the key of an operation, and collect its tensors; None: unknown arguments."""
        kind = type(value)
        if kind in _BY_VALUE:
            return kind, value  # 1 and 1.0 are equal
        if kind is list or kind is tuple:
            parts = [self._key(func, part, tensors) for part in value]
            return None if None in parts else (kind, *parts)
        if kind is FakeTensor and value.fake_mode is self._mode and value.constant is None:
            place = value.fake_device
        elif kind is nn.Parameter and func in _COPIES:  # a real one
            place = value.device
        else:
            return None
        tensors.append(value)
        layout, offset = value.layout, value.storage_offset()
        return kind, value.shape, value.stride(), offset, value.dtype, layout, place

    def _make(self, result: _Result, tensors: Sequence[Tensor]) -> Tensor:
        with without_dispatch():
            if result.source is None:
                memory = torch.UntypedStorage(result.num_bytes, device="meta")  # type: ignore[no-untyped-call]
            else:
                memory = tensors[result.source].untyped_storage()
            made = torch.empty(0, dtype=result.dtype, device="meta")
            made.set_(memory, result.offset, result.shape, result.stride)
        return FakeTensor(self._mode, made, result.device)


def _described(func: Any, results: Any, tensors: Sequence[Tensor]) -> _Results | None:
    """Return a description that recreates the results; None: arguments do not determine them."""
    container = type(results) if isinstance(results, (tuple, list)) else None
    several = (results,) if container is None else results
    made = [one for one in several if one is not None]
    is_dense = all(
        type(one) is FakeTensor
        and one.constant is None
        and one.layout == torch.strided
        and not (one.is_conj() or one.is_neg())
        for one in made
    )
    if any(tag in func.tags for tag in _UNPREDICTABLE) or not is_dense:
        return None
    keys = [storage_key(tensor) for tensor in tensors]
    new = [storage_key(one) for one in made if storage_key(one) not in keys]
    if len(set(new)) < len(new):
        return None
    described = [
        None
        if one is None
        else _Result(
            source=keys.index(storage_key(one)) if storage_key(one) in keys else None,
            num_bytes=one.untyped_storage().nbytes(),
            shape=tuple(one.shape),
            stride=one.stride(),
            offset=one.storage_offset(),
            dtype=one.dtype,
            device=one.device,
        )
        for one in several
    ]
    return container, described
