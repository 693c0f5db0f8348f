"""Untrusted plain data: validated by a model, and shown safely in messages.

A model is a pydantic model or a dataclass whose fields carry their ranges. A wrong value of a file
becomes one short line without control characters, whatever the file holds.
"""

import functools
import hashlib
import json
import math
import reprlib
import unicodedata
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

Model = TypeVar("Model")

PLAIN = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Refuses unknown fields and non-finite numbers; for a dataclass or a pydantic model."""

TOLERANCE = 1e-5
"""Largest relative difference between statistics of the same images on different machines."""

MAX_PROBLEMS = 10
"""Most errors of one file that a message names."""

_UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
_TURNS_TEXT = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_WORDS = {
    "missing": "is missing",
    "missing_keyword_only": "is missing",
    "missing_argument": "is missing",
    "extra_forbidden": "is unknown",
    "unexpected_keyword_argument": "is unknown",
    "invalid_key": "is unknown",
    "dataclass_type": "must be a mapping",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
}


def is_printable(text: str) -> bool:
    """Return whether text has no control characters and no lone surrogates."""
    return not any(
        unicodedata.category(letter) in _UNPRINTABLE or letter in _TURNS_TEXT for letter in text
    )


def printable(text: object, max_length: int = 80) -> str:
    """Return text for a message: in one line, of limited length, without escape sequences."""
    whole = text if isinstance(text, str) else shown(text)
    letters = (
        letter if is_printable(letter) else letter.encode("unicode_escape").decode()
        for letter in whole[:max_length]
    )
    return "".join(letters) + ("..." if len(whole) > max_length else "")


class _Limited(reprlib.Repr):
    """Representations of limited length; omitted parts take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 3, 60
        self.maxlist = self.maxtuple = self.maxdict = 8

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<a number of {x.bit_length()} bits>"

    def repr_instance(self, x: object, level: int) -> str:
        text = repr(x) if isinstance(x, float | bool | type(None)) else f"<{type(x).__name__}>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."


shown: Callable[[object], str] = _Limited().repr
"""Return a value for a message: a Python literal of limited length."""


def is_close(first: Any, second: Any) -> bool:
    """Return whether nested plain values are equal, floating-point numbers approximately."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_close(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_close, first, second))
    return bool(first == second)


def listed(problems: Iterable[str], most: int = MAX_PROBLEMS) -> str:
    """Return the first few of some phrases, each once, and how many more there are."""
    phrases = list(dict.fromkeys(problems))
    more = f"; and {len(phrases) - most} more" if len(phrases) > most else ""
    return "; ".join(phrases[:most]) + more


def validated(model: type[Model], values: Any) -> Model:
    """Return plain values as an instance of a pydantic model, or of a dataclass with ranges.

    A ValueError names the wrong fields in one line.
    """
    try:
        content: Model = _adapter(model).validate_python(values)
    except ValidationError as error:
        raise ValueError(explained(error)) from error
    return content


def explained(error: ValidationError, phrase: Callable[[dict[str, Any]], str] | None = None) -> str:
    """Return a validation error in one line; ``phrase`` turns one of its problems into words."""
    return listed(map(phrase or _phrase, map(dict, error.errors(include_url=False))))


def _phrase(problem: dict[str, Any]) -> str:
    """Return the error of one field, from pydantic's message without its jargon."""
    kind, parts = problem["type"], [part for part in problem["loc"] if part != "[key]"]
    place = ".".join(printable(part, 40) for part in parts) or "the content"
    if kind == "value_error":  # one of our validators raised it
        return f"{place} {problem['ctx']['error']}"
    words = _WORDS.get(kind) or problem["msg"].replace("Input should be", "must be")
    words = words.replace("greater than or equal to", "at least")
    words = words.replace("less than or equal to", "at most")
    value = "" if words.startswith("is ") else f", but is {shown(problem['input'])}"
    return f"{place} {words}{value}"


def at_most(count: int) -> BeforeValidator:
    """Return a limit on the length of a collection, checked before its items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and len(value) > count:
            raise ValueError(f"has {len(value):,} entries, and may have {count:,}")
        return value

    return BeforeValidator(check)


def _printable_only(text: str) -> str:
    if not is_printable(text):
        raise ValueError("must hold no control characters")
    return text


Name = Annotated[str, Field(max_length=200, strict=True), AfterValidator(_printable_only)]
"""Text that people read."""

_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def key_of(parts: Any, version: int = 1) -> str:
    """Return a digest that identifies plain values, such as hashes of files and settings.

    Callers raise ``version`` when the same values come to stand for different content.
    """
    return hashlib.sha256(json.dumps([version, parts], sort_keys=True).encode()).hexdigest()
