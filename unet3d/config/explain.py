"""What a tree of settings allows, and what is wrong with one, in words for its user.

Pydantic's own messages speak of its types, and name every branch of a setting that allows several.
"""

import difflib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from unet3d.config.values import AUTO, OF_SETTING
from unet3d.inputs.plain_data import printable, shown

_NOUNS = {int: "a whole number", float: "a number", str: "a name", Path: "a path"}
_LIMITS = {"gt": "above", "ge": "of at least", "le": "at most", "lt": "below"}


@functools.cache
def hints_of(section: type[BaseModel]) -> dict[str, Any]:
    """Return the type of each setting of a section, with its limits."""
    return get_type_hints(section, include_extras=True)


def is_section(hint: Any) -> bool:
    """Return whether a type is that of a section, not of a setting."""
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def known_setting(model: type[BaseModel], location: Iterable[Any]) -> tuple[list[str], Any]:
    """Follow a location as far as it names settings; return these names and the last one's type."""
    path: list[str] = []
    hint: Any = model
    for name in location:
        if not is_section(hint) or name not in hint.model_fields:
            break
        path.append(name)
        hint = hints_of(hint)[name]
    return path, hint


def phrase_of(problem: dict[str, Any], model: type[BaseModel], tree: Any) -> str:
    """Return a phrase for a problem that pydantic has found in a tree of settings."""
    if problem["type"] == "value_error":  # of a validator of ours
        return str(problem["ctx"]["error"])
    path, hint = known_setting(model, problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        name = str(problem["loc"][-1])
        suggestion = _suggestion(name[:100], path, hint, model)
        return f"unknown setting {printable('.'.join([*path, name]))}, {suggestion}"
    if problem["type"] == OF_SETTING:
        return f"{'.'.join(path)} {problem['msg']}"
    for name in path:
        tree = tree[name]
    return f"{'.'.join(path)} is {shown(tree)}; give {in_words(hint)}"


def _suggestion(
    name: str, path: list[str], section: type[BaseModel], model: type[BaseModel]
) -> str:
    close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.5)
    similar = [key for key, _, last in settings_of(model) if last == name]
    similar += [".".join([*path, key]) for key in close]
    return f"did you mean {similar[0]}?" if similar else f"known: {', '.join(section.model_fields)}"


def settings_of(
    section: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield every section and setting in a section: dotted key, the section it is in, its name."""
    for name in section.model_fields:
        yield prefix + name, section, name
        hint = hints_of(section)[name]
        if is_section(hint):
            yield from settings_of(hint, f"{prefix}{name}.")


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
        return "a mapping of names to lists"
    if origin is tuple:
        quantity = "a list of" if arguments[-1] is ... else {2: "two", 3: "three"}[len(arguments)]
        return f"{quantity} {_plural(in_words(arguments[0]))}"
    if is_section(hint):
        return f"a section with settings such as {', '.join(list(hint.model_fields)[:3])}"
    if hint in (bool, NoneType):
        return "true or false" if hint is bool else "null"
    return _NOUNS[hint]


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
