"""What a tree of settings allows, and what is wrong with one, in words for its user.

Pydantic's own messages speak of its types, and name every branch of a setting that allows several.
"""

import difflib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from unet3d.inputs.plain_data import MAX_DESCRIBED, listed, printable, shown

_NOUNS = {int: "whole number", float: "number", str: "name", Path: "path"}
_LIMITS = {"gt": "above", "ge": "of at least", "le": "at most", "lt": "below"}


def explain(error: ValidationError, model: type[BaseModel], tree: Any) -> str:
    """Return one phrase for each setting that was refused, if they are not too many.

    Args:
        error: Of ``model.model_validate(tree)``.
        model: The settings; its nested models are their sections.
        tree: What was validated.
    """
    found = error.errors(include_url=False)
    phrases = [_describe(dict(item), model, tree) for item in found[:MAX_DESCRIBED]]
    return listed(phrases, max(0, len(found) - MAX_DESCRIBED))


def known_setting(model: type[BaseModel], location: Iterable[Any]) -> tuple[list[str], Any]:
    """Follow a location as far as it names settings.

    Args:
        model: The settings.
        location: Names of sections, of a setting, and perhaps of what lies in its value.

    Returns:
        The names that are known, and the type of the last one.
    """
    path: list[str] = []
    hint: Any = model
    for name in location:
        if not is_section(hint) or name not in hint.model_fields:
            break
        path.append(name)
        hint = _hints(hint)[name]
    return path, hint


@functools.cache
def _hints(section: type[BaseModel]) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _describe(problem: dict[str, Any], model: type[BaseModel], tree: Any) -> str:
    if problem["type"] == "value_error":  # of a validator of ours
        return str(problem["ctx"]["error"])
    path, hint = known_setting(model, problem["loc"])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        name = str(problem["loc"][-1])
        suggestion = _suggestion(name[:100], path, hint, model)
        return f"unknown setting {printable('.'.join([*path, name]))}, {suggestion}"
    for name in path:
        tree = tree[name]
    return f"{'.'.join(path)} is {shown(tree)}; give {in_words(hint)}"


def _suggestion(
    name: str, path: list[str], section: type[BaseModel], model: type[BaseModel]
) -> str:
    elsewhere = [key for key in _settings(model) if key.split(".")[-1] == name]
    close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.5)
    if elsewhere or close:
        return f"did you mean {elsewhere[0] if elsewhere else '.'.join([*path, close[0]])}?"
    return f"known: {', '.join(section.model_fields)}"


def _settings(section: type[BaseModel]) -> Iterator[str]:
    hints = _hints(section)
    for name in section.model_fields:
        if is_section(hints[name]):
            yield from (f"{name}.{key}" for key in _settings(hints[name]))
        else:
            yield name


def is_section(hint: Any) -> bool:
    """Return whether a type is that of a section, not of a setting."""
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def in_words(hint: Any, many: bool = False) -> str:
    """Say what the type of a setting allows.

    Args:
        hint: The type, with its limits.
        many: Whether it is that of the items of a list.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [
            f"{words} {_in_digits(getattr(limit, name))}"
            for annotation in arguments[1:]
            for limit in getattr(annotation, "metadata", ())
            for name, words in _LIMITS.items()
            if hasattr(limit, name)
        ]
        return " ".join([in_words(arguments[0], many), " and ".join(limits)]).rstrip()
    if origin is Literal:
        return _any_of(map(str, arguments))
    if origin in (Union, UnionType):
        return _any_of(
            word
            for branch in arguments
            for word in (get_args(branch) if get_origin(branch) is Literal else [in_words(branch)])
        )
    if origin is tuple:
        quantity = "a list of" if arguments[-1] is ... else {2: "two", 3: "three"}[len(arguments)]
        return f"{quantity} {in_words(arguments[0], many=True)}"
    if is_section(hint):
        return f"a section with settings such as {', '.join(list(hint.model_fields)[:3])}"
    if hint in (bool, NoneType):
        return "true or false" if hint is bool else "null"
    return f"{_NOUNS[hint]}s" if many else f"a {_NOUNS[hint]}"


def _in_digits(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:,.10g}"


def _any_of(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
