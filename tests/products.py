"""Products of parameters: every pair of values by day, every combination at night."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Any) -> pytest.MarkDecorator:
    """Return the parameters of a test: all combinations, most of them marked ``nightly``.

    The few combinations without the mark contain every pair of values of two axes. They are chosen
    greedily as in Cohen et al., "The AETG system" (IEEE TSE 1997), but without a random choice.

    Args:
        axes: The values of each argument; their text is part of the tests' names.
    """
    rows = list(product(*(range(len(values)) for values in axes.values())))
    by_day = set(_covering(rows))
    parameters = [
        pytest.param(
            *(values[index] for values, index in zip(axes.values(), row, strict=True)),
            id="-".join(_name(v[i]) for v, i in zip(axes.values(), row, strict=True)),
            marks=() if row in by_day else pytest.mark.nightly,
        )
        for row in rows
    ]
    return pytest.mark.parametrize(tuple(axes), parameters)


def _covering(rows: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield rows until every pair of values of two axes has occurred."""
    num_places = min(2, len(rows[0]))
    pairs = {row: set(combinations(enumerate(row), num_places)) for row in rows}
    left = set().union(*pairs.values())
    while left:
        best = max(rows, key=lambda row: len(left & pairs[row]))
        left -= pairs[best]
        yield best


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)
