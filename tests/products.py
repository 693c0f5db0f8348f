"""Parameters for the night, and products of parameters, of which a few combinations run by day."""

from itertools import product
from typing import Any

import pytest


def by_night(*rows: Any) -> list[Any]:
    """Return parameters marked ``nightly``, each a tuple of arguments or a single other value."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else [row]), marks=pytest.mark.nightly)
        for row in rows
    ]


def each_value(**axes: Any) -> pytest.MarkDecorator:
    """Return the parameters of a test: all combinations, most of them marked ``nightly``.

    The few combinations without the mark contain every value of every axis.

    Args:
        axes: The values of each argument; their text is part of the tests' names.
    """
    sizes = [len(values) for values in axes.values()]
    by_day = {tuple(number % size for size in sizes) for number in range(max(sizes))}
    parameters = [
        pytest.param(
            *(values[index] for values, index in zip(axes.values(), row, strict=True)),
            id="-".join(_name(v[i]) for v, i in zip(axes.values(), row, strict=True)),
            marks=() if row in by_day else pytest.mark.nightly,
        )
        for row in product(*map(range, sizes))
    ]
    return pytest.mark.parametrize(tuple(axes), parameters)


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)
