"""Mutations of valid plain data and of bytes, for property tests of everything that reads files.

``mutated(draw, tree)`` changes one or a few places of nested dictionaries and lists, ``damaged``
some bytes. ``UNET3D_EXAMPLES=5000 pytest -m hypothesis`` tries more examples than usual. A test
fails if an example takes longer than 60 s, or if the test takes more than 2 GB (``conftest``).
"""

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("UNET3D_EXAMPLES", "50"))
"""Examples of each property test."""

HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e300, -1e300, float("nan"), float("inf"), float("-inf")),
    *("", "1", "nan", "\ud800", "\udcff", "\x00", "\x1b[2J\x1b]0;title\x07", "\u202e", "\u2028"),
    *("a\nb\r", "{}", "../../etc/passwd", "x" * 10_000, b"\x00"),
    *([], {}, (), [[]], [None], [0, 0, 0], [1, 1, 1, 1], [-1, -1, -1], [10**9, 10**9, 10**9]),
    *([1e-300, 1e300, 1.0], [1] * 100_000, {"": None}, {1: 2}, {"a": {"b": {"c": {"d": []}}}}),
]
"""Values that readers often do not expect."""


def property_test(test: Callable[..., None], share: float = 1) -> Callable[..., None]:
    """Run a property test with :data:`EXAMPLES`; the same ones every time by default.

    An example that takes longer than 60 s, even on a busy machine, is an error. If the variable
    UNET3D_EXAMPLES is set, examples are random.

    Args:
        test: The test.
        share: Factor for the number of examples, below 1 if each takes long.
    """
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        deadline=timedelta(seconds=60),
        derandomize="UNET3D_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )(test)


def mutated(tree: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of copies of a tree with one to three places changed.

    Args:
        tree: Nested dictionaries, lists and tuples; other values are leaves.
    """

    @st.composite
    def changed(draw: st.DrawFn) -> Any:
        result = _copied(tree)
        for _ in range(draw(st.integers(1, 3))):
            result = _mutate(draw, result)
        return result

    return changed()


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy of copies of bytes: cut off, with bits flipped, runs replaced or doubled.

    Args:
        content: The bytes of a valid file.
    """

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        result = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(len(result) - 1, 0)))
            length = draw(st.integers(1, 64))
            kind = draw(st.sampled_from(["cut", "flip", "fill", "write", "double", "drop"]))
            if kind == "cut":
                del result[at:]
            elif kind == "flip" and result:
                result[at] ^= 1 << draw(st.integers(0, 7))
            elif kind == "fill":
                fill = bytes([draw(st.sampled_from([0, 255, 128, 127]))])
                result[at : at + length] = fill * len(result[at : at + length])
            elif kind == "write":
                result[at : at + 8] = draw(st.binary(min_size=1, max_size=8))
            elif kind == "double":
                result[at:at] = result[at : at + length]
            else:
                del result[at : at + length]
        return bytes(result)

    return changed()


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree  # tensors and arrays are not mutated


def _mutate(draw: st.DrawFn, tree: Any) -> Any:
    """Change one place, reached by a random path through the tree."""
    is_leaf = not isinstance(tree, dict | list | tuple) or not tree
    if is_leaf or draw(st.integers(0, 9)) == 0:
        return copy.copy(draw(st.sampled_from(HOSTILE)))
    if isinstance(tree, dict):
        key = draw(st.sampled_from(list(tree)))
        kind = draw(st.sampled_from(["below"] * 5 + ["drop", "add", "rename"]))
        if kind == "below":
            return {**tree, key: _mutate(draw, tree[key])}
        if kind == "add":
            name = draw(st.sampled_from(["new", "", "\ud800", "\x1b[31m", 3, "x" * 1000]))
            return {**tree, name: draw(st.sampled_from(HOSTILE))}
        rest = {other: value for other, value in tree.items() if other != key}
        return rest if kind == "drop" else {**rest, f"{key}s"[:1000]: tree[key]}
    items = list(tree)
    at = draw(st.integers(0, len(items) - 1))
    kind = draw(st.sampled_from(["below"] * 4 + ["drop", "add", "double", "long"]))
    if kind == "below":
        items[at] = _mutate(draw, items[at])
    elif kind == "drop":
        del items[at]
    elif kind == "add":
        items.insert(at, draw(st.sampled_from(HOSTILE)))
    elif kind == "double":
        items.insert(at, items[at])
    else:
        items = (items * 1000)[:100_000] if len(items) < 1000 else items  # not repeatedly
    return type(tree)(items)
