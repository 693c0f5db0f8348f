"""Every setting with its meaning and limits, and errors in values explained to users.

Pydantic's own messages name its types, and list every alternative of a setting that allows several.
"""

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unet3d.config.settings import AugmentationSettings
from unet3d.config.values import Section
from unet3d.inputs.plain_data import printable, shown

_NOUNS = {
    **{"integer": "a whole number", "number": "a number", "string": "a name", "path": "a path"},
    **{"boolean": "true or false", "null": "null"},
}
MAX_SHOWN = 8
"""Longest list whose values a message shows one by one."""

_LIMITS = {
    **{"exclusiveMinimum": "above", "minimum": "of at least"},
    **{"maximum": "at most", "exclusiveMaximum": "below"},
}


class Setting(NamedTuple):
    """One setting, or a section of settings."""

    key: str
    """Dotted key, such as ``training.epochs``."""
    allowed: str
    """Allowed values, in words."""
    meaning: str
    """What it does, with its unit; names of commands stand in double backticks."""
    default: Any
    """Default value as in YAML."""
    is_section: bool = False
    is_path: bool = False


@functools.cache
def settings_of(model: type[Section], prefix: str = "") -> Mapping[str, Setting]:
    """Return every section, followed by its settings, by dotted key."""
    found: dict[str, Setting] = {}
    for name, schema in model.model_json_schema()["properties"].items():
        key, section = prefix + name, model.model_fields[name].annotation
        if isinstance(section, type) and issubclass(section, Section):
            names = ", ".join(list(section.model_fields)[:3])
            meaning, allowed = section.__doc__ or "", f"a section with settings such as {names}"
            found[key] = Setting(key, allowed, " ".join(meaning.split()), None, is_section=True)
            found |= settings_of(section, f"{key}.")
            continue
        allowed, default = in_words(schema), schema["default"]
        if model.may_be_open(name):
            allowed = f"auto, {allowed}" if " or " in allowed else _any_of([allowed, "auto"])
            default = "auto"
        is_path = any(one.get("format") == "path" for one in schema.get("anyOf", ()))
        meaning = " ".join(schema["description"].split())
        found[key] = Setting(key, allowed, meaning, default, is_path=is_path)
    return found


def phrase_of(problem: dict[str, Any], model: type[Section], tree: Any) -> str:
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
    if problem["type"] == "value_error":  # one of our validators raised it
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


def in_words(schema: Mapping[str, Any]) -> str:
    """Describe in words the values that pydantic's JSON schema of a setting allows."""
    if "anyOf" in schema:
        branches = [
            one.get("enum")
            or (["true", "false"] if one.get("type") == "boolean" else [in_words(one)])
            for one in schema["anyOf"]
        ]
        return _any_of([word for branch in branches for word in branch])
    if "enum" in schema or "const" in schema:
        return _any_of(schema.get("enum") or [schema["const"]])
    kind = schema["type"]
    if kind == "object":
        is_any = schema["additionalProperties"] is True
        return f"a mapping of names to {'values' if is_any else 'lists'}"
    if kind == "array":
        quantity = "three" if "prefixItems" in schema else "a list of"
        words = in_words(schema.get("items") or schema["prefixItems"][0])
        for noun in _NOUNS.values():  # "a whole number above 0" becomes "whole numbers above 0"
            words = words.replace(noun, f"{noun.removeprefix('a ')}s")
        return f"{quantity} {words}"
    limits = [
        f"{words} {schema[name]:,}".removesuffix(".0")
        for name, words in _LIMITS.items()
        if name in schema
    ]
    return f"{_NOUNS[schema.get('format', kind)]} {' and '.join(limits)}".rstrip()


def _any_of(words: Sequence[str]) -> str:
    *first, last = words
    has_joints = any(joint in word for joint in (" and ", " or ") for word in words)
    return f"{', '.join(first)}{', or' if has_joints else ' or'} {last}" if first else last
