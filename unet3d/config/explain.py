"""Every setting with its meaning and limits, and what is wrong with a value, in words for its user.

Pydantic's own messages speak of its types, and name every branch of a setting that allows several.
"""

import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from unet3d.config.settings import AugmentationSettings
from unet3d.config.values import AUTO
from unet3d.inputs.plain_data import printable, shown

_NOUNS = {int: "a whole number", float: "a number", str: "a name", Path: "a path"}
MAX_SHOWN = 8
"""Values of a list that a message shows one by one."""

_LIMITS = {"gt": "above", "ge": "of at least", "le": "at most", "lt": "below"}


class Setting(NamedTuple):
    """One setting, or a section of settings."""

    key: str
    """Dotted, such as ``training.epochs``."""
    hint: Any
    """Its type, with its limits."""
    meaning: str
    """What it does, with its unit; names of commands stand in double backticks."""
    default: Any
    """As YAML holds it."""

    @property
    def is_section(self) -> bool:
        """Whether it holds settings."""
        return _is_section(self.hint)

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        return in_words(self.hint)


@functools.cache
def settings_of(model: type[BaseModel], prefix: str = "") -> Mapping[str, Setting]:
    """Return every section, followed by its settings, by dotted key."""
    found: dict[str, Setting] = {}
    hints = get_type_hints(model, include_extras=True)
    for name, field in model.model_fields.items():
        key, hint = prefix + name, hints[name]
        meaning = hint.__doc__ if _is_section(hint) else field.description
        default = "auto" if AUTO in field.metadata else to_jsonable_python(field.default)
        found[key] = Setting(key, hint, " ".join((meaning or "").split()), default)
        if _is_section(hint):
            found |= settings_of(hint, f"{key}.")
    return found


def phrase_of(problem: dict[str, Any], model: type[BaseModel], tree: Any) -> str:
    """Return a phrase for a problem that pydantic has found in a tree of settings."""
    details = settings_of(AugmentationSettings, "patches.augmentation_details.")
    settings = {**settings_of(model), **details}
    location = list(map(str, problem["loc"]))
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        name = ".".join(location)
        return f"unknown setting {printable(name)}, {_suggestion(location, settings)}"
    key = ""
    for name in location:
        if f"{key}{name}" not in settings:
            break
        key, tree = f"{key}{name}.", tree[name]
    key = key.removesuffix(".")
    if problem["type"] == "value_error":  # of a validator of ours
        is_of_section = not key or settings[key].is_section
        return f"{'' if is_of_section else f'{key} '}{problem['ctx']['error']}"
    return f"{key} is {_as_typed(tree)}; give {settings[key].allowed}"


def _as_typed(value: Any) -> str:
    """Return a value for a message: a short list as an option takes it, with commas."""
    is_short = isinstance(value, list | tuple) and 0 < len(value) <= MAX_SHOWN
    if is_short and all(type(one) in (int, float, str) for one in value):
        return ",".join(printable(one) for one in value)
    return shown(value)


def _suggestion(location: list[str], settings: Mapping[str, Setting]) -> str:
    *sections, unknown = location
    names = [key.split(".") for key in settings]
    known = [name for *above, name in names if above == sections]
    similar = [name for name in names if name[-1] == unknown]
    close = difflib.get_close_matches(unknown[:100], known, n=1, cutoff=0.5)
    similar += [[*sections, name] for name in close]
    return f"did you mean {'.'.join(similar[0])}?" if similar else f"known: {', '.join(known)}"


def in_words(hint: Any) -> str:
    """Say what the type of a setting allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [
            f"{words} {_in_digits(getattr(limit, name))}"
            for annotation in arguments[1:]
            for limit in getattr(annotation, "metadata", ())
            for name, words in _LIMITS.items()
            if hasattr(limit, name)
        ]
        words = f"{in_words(arguments[0])} {' and '.join(limits)}".rstrip()
        if AUTO in arguments:
            words = f"auto, {words}" if " or " in words else f"{words} or auto"
        return words
    if origin is Literal:
        return _any_of(map(str, arguments))
    if origin in (Union, UnionType):
        return _any_of(
            word
            for branch in arguments
            for word in (get_args(branch) if get_origin(branch) is Literal else [in_words(branch)])
        )
    if origin is dict:
        return f"a mapping of names to {'values' if arguments[1] is Any else 'lists'}"
    if origin is tuple:
        quantity = "a list of" if arguments[-1] is ... else "three"
        return f"{quantity} {_plural(in_words(arguments[0]))}"
    if _is_section(hint):
        return f"a section with settings such as {', '.join(list(hint.model_fields)[:3])}"
    return {**_NOUNS, bool: "true or false", NoneType: "null"}[hint]


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _plural(words: str) -> str:
    """Return ``whole numbers above 0`` of ``a whole number above 0``; other words as they are."""
    for noun in _NOUNS.values():
        words = words.replace(noun, f"{noun.removeprefix('a ')}s")
    return words


def _in_digits(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.10g}"


def _any_of(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
