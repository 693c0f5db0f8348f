"""Products of parameters: every value or pair of values by day, every combination at night."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest


def by_night(*rows: Any) -> list[Any]:
    """Return parameters marked ``nightly``, each a tuple of arguments or a single other value."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else [row]), marks=pytest.mark.nightly)
        for row in rows
    ]


def pairwise(**axes: Any) -> pytest.MarkDecorator:
    """Return the parameters of a test: all combinations, most of them marked ``nightly``.

    The few combinations without the mark contain every pair of values of two axes. They are chosen
    greedily as in Cohen et al., "The AETG system" (IEEE TSE 1997), but without a random choice.

    Args:
        axes: The values of each argument; their text is part of the tests' names.
    """
    return _parametrized(axes, 2)


def each_value(**axes: Any) -> pytest.MarkDecorator:
    """Like :func:`pairwise`, for tests that take long: by day every value of an axis."""
    return _parametrized(axes, 1)


def _parametrized(axes: dict[str, Any], num_places: int) -> pytest.MarkDecorator:
    rows = list(product(*(range(len(values)) for values in axes.values())))
    by_day = set(_covering(rows, min(num_places, len(axes))))
    parameters = [
        pytest.param(
            *(values[index] for values, index in zip(axes.values(), row, strict=True)),
            id="-".join(_name(v[i]) for v, i in zip(axes.values(), row, strict=True)),
            marks=() if row in by_day else pytest.mark.nightly,
        )
        for row in rows
    ]
    return pytest.mark.parametrize(tuple(axes), parameters)


def _covering(rows: list[tuple[int, ...]], num_places: int) -> Iterator[tuple[int, ...]]:
    """Yield rows until all values that this number of axes can have together have occurred."""
    pairs = {row: set(combinations(enumerate(row), num_places)) for row in rows}
    left = set().union(*pairs.values())
    while left:
        best = max(rows, key=lambda row: len(left & pairs[row]))
        left -= pairs[best]
        yield best


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)
