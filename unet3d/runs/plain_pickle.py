"""Pickles of ``torch.save`` as plain values and descriptions of tensors; nothing is called.

:mod:`pickletools` reads the steps of a pickle, of which only those are carried out that plain
values and tensors need. Names of functions are compared, never looked up. Scalars of NumPy become
numbers of Python, and devices text: other programs write them.
"""

import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable

MAX_STEPS = 1_000_000
"""Of the pickle, and of the values that it makes; a network of a hundred layers has 30,000."""
MAX_DEPTH = 32
MAX_NUMBER_AS_KEY = 2**32
MAX_ARGUMENTS = 8
"""Of a call; what torch.save calls has at most seven. A pickle can make one call with the same
arguments a million times, so none may have much to look at or to copy."""
MAX_NUMBER_BYTES = 8
MAX_DEVICE_NAME = 20

DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_DICTIONARY = "collections OrderedDict"
_DEVICE = "torch device"
_BYTES = "_codecs encode"
"""Protocol 2 of pickle writes bytes as text, whose letters are their values."""
_DTYPE = "numpy dtype"
_SCALARS = ("numpy._core.multiarray scalar", "numpy.core.multiarray scalar")
_KINDS_OF_SCALARS = "bfiu"
"""Truth values and numbers, in NumPy's letters."""


class _Name(str):
    """Name of a function or class, which is never looked up."""


class Storage(tuple[str, torch.dtype, int]):
    """Key, type and length of the numbers of a tensor, which are not read yet."""


class _DType(str):
    """Type of a scalar of NumPy, such as f8."""


def plain_values(
    content: bytes, describe: Callable[..., Tensor], max_steps: int = MAX_STEPS
) -> Any:
    """Carry out a pickle's steps on plain values.

    Args:
        content: The pickle.
        describe: Makes a tensor, from its storage, offset, shape and strides.
        max_steps: The most steps, and the most values.

    Raises:
        pickle.UnpicklingError: A step needs more than plain values and tensors; its text, which may
            be long, says what.
        ValueError, LookupError, TypeError: The steps make no sense.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop(count: int) -> list[Any]:
        taken = stack[len(stack) - count :]
        if len(taken) < count:
            raise ValueError("its pickle takes more values than there are")
        del stack[len(stack) - count :]
        return taken

    def above_mark() -> list[Any]:
        return pop(len(stack) - marks.pop())

    for number, (step, argument, _) in enumerate(pickletools.genops(content)):
        if number > max_steps:
            raise ValueError(f"its pickle has more than {max_steps:,} steps")
        name = step.name
        if name in _ARGUMENT_IS_VALUE:
            stack.append(argument)
        elif name in _NEW:
            stack.append(_NEW[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[_as_int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[_as_int(argument)])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name in _TUPLES:
            stack.append(tuple(pop(_TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            items = pop(1) if name == "APPEND" else above_mark()
            _last(stack, list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = pop(2) if name == "SETITEM" else above_mark()
            _put(_last(stack, dict), items)
        elif name == "GLOBAL":
            stack.append(_Name(argument))
        elif name == "BINPERSID":
            stack.append(_storage(*pop(1)))
        elif name == "REDUCE":
            function, arguments = pop(2)
            stack.append(_made(function, arguments, describe))
        elif name == "BUILD":  # attributes of a state_dict, which hold nothing that we read
            pop(1)
        elif name == "STOP":
            break
        elif name != "PROTO":
            raise pickle.UnpicklingError(f"the step {name}")
    if len(stack) != 1:
        raise ValueError(f"its pickle makes {len(stack):,} values instead of one")
    return _checked(stack[0], max_steps)


_ARGUMENT_IS_VALUE = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_NEW: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _as_int(argument: Any) -> int:
    return int(argument)


def _last(stack: list[Any], kind: type[Any]) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError("its pickle puts values into what takes none")
    return stack[-1]


def _put(target: dict[Any, Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Numbers that differ by multiples of 2^61 - 1 have one hash, and a dictionary of them takes
        # hours; those of parameters are small.
        if type(key) is not str and (type(key) is not int or not 0 <= key < MAX_NUMBER_AS_KEY):
            raise ValueError("its pickle has keys that are neither text nor small numbers")
        target[key] = value


def _storage(description: Any) -> Storage:
    """Return what torch.save says of a tensor's numbers: kind, type, key, device, length."""
    kind, dtype, key, _, length = description
    if kind != "storage" or type(dtype) is not _Name or not isinstance(key, str):
        raise ValueError("its pickle refers to something that is no tensor")
    if dtype not in DTYPES:
        raise ValueError(f"it holds numbers of the type {printable(dtype)}")
    if type(length) is not int:
        raise ValueError("a tensor has no usable length")
    return Storage((key, DTYPES[dtype], length))


def _made(function: Any, arguments: Any, describe: Callable[..., Tensor]) -> Any:
    """Return what a function would make, if it is one of those that torch.save calls."""
    if function == _DICTIONARY and type(function) is _Name and arguments == ():
        return {}
    is_call = type(function) is _Name and type(arguments) is tuple
    if not is_call or len(arguments) > MAX_ARGUMENTS:
        raise pickle.UnpicklingError(_words(function))
    if function == _REBUILD:
        storage, offset, shape, strides, *_ = arguments
        if type(storage) is Storage and type(shape) is tuple and type(strides) is tuple:
            return describe(storage, offset, shape, strides)
        raise ValueError("its pickle makes a tensor of something else")
    made = _plain(function, arguments)
    if made is None:
        raise pickle.UnpicklingError(_words(function))
    return made


def _words(value: Any) -> str:
    """Return what is refused: a function, as Python writes its name, or the kind of a value."""
    return value.replace(" ", ".") if type(value) is _Name else f"a value of {type(value).__name__}"


def _plain(function: str, arguments: tuple[Any, ...]) -> Any:
    """Return the plain value that a function would make of plain values; None: it is another."""
    kinds = [type(argument) for argument in arguments]
    if function == _DEVICE and kinds in ([str], [str, int]):
        return _device(*arguments)
    if function == _BYTES and kinds == [str, str] and arguments[1] == "latin1":
        return arguments[0].encode("latin1") if len(arguments[0]) <= MAX_NUMBER_BYTES else None
    if function == _DTYPE and kinds[:1] == [str] and _is_scalar(arguments[0]):
        return _DType(arguments[0])
    if function in _SCALARS and kinds == [_DType, bytes]:
        dtype = np.dtype(arguments[0])
        if len(arguments[1]) != dtype.itemsize:
            raise ValueError("a number of NumPy has another size than its type")
        return np.frombuffer(arguments[1], dtype)[0].item()
    return None


def _device(kind: str, number: int | None = None) -> str | None:
    if len(kind) > MAX_DEVICE_NAME or (number is not None and not 0 <= number < 2**16):
        return None
    return kind if number is None else f"{kind}:{number}"


def _is_scalar(name: str) -> bool:
    """Return whether a name such as f8 is of a type of numbers."""
    return name[:1] in _KINDS_OF_SCALARS and name[1:] in ("1", "2", "4", "8")


def _checked(value: Any, max_values: int) -> Any:
    """Return values if they are few and flat: a list may hold another one many times, or itself."""
    num_values = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal num_values
        num_values += 1
        if num_values > max_values or depth > MAX_DEPTH:
            raise ValueError(f"its values are more than {max_values:,}, or too deep")
        if type(value) in (_Name, Storage, _DType):
            raise pickle.UnpicklingError(_words(value))
        if isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                visit(item, depth + 1)

    visit(value, 0)
    return value
