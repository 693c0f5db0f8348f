from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from tests.mutations import HOSTILE
from unet3d.inputs.plain_data import (
    PLAIN,
    Name,
    at_most,
    is_printable,
    listed,
    printable,
    shown,
    validated,
)


class Inner(BaseModel):
    model_config = PLAIN

    size: Annotated[int, Field(ge=1, le=8, strict=True)]
    names: Annotated[list[Name], at_most(3)] = []


class Outer(BaseModel):
    model_config = PLAIN

    inner: Inner
    weight: float = 0.0


def refusal(values):
    with pytest.raises(ValueError) as caught:
        validated(Outer, values)
    return str(caught.value)


def test_valid_values_are_what_they_describe():
    assert validated(Outer, {"inner": {"size": 3, "names": ["é", "‏"]}}).inner.size == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"size": 0}}, "inner.size must be at least 1, but is 0"),
        ({"inner": {"size": 10**400}}, "inner.size must be at most 8, but is <a number of 1329 b"),
        ({"inner": {}}, "inner.size is missing"),
        (None, "the content must be a mapping, but is None"),
        ({"inner": {"size": 1}, "wight": 2}, "wight is unknown"),
        ({"inner": {"size": 1}, "weight": float("nan")}, "weight must be a finite number, but is"),
        ({"inner": {"size": 1, "names": ["a"] * 4}}, "inner.names has 4 entries, and may have 3"),
        ({"inner": {"size": 1, "names": ["\x1b"]}}, "inner.names.0 must hold no control charac"),
        ({"inner": {"size": 1}, "\x1b[2J": 2}, r"\x1b[2J is unknown"),
    ],
)
def test_a_mistake_is_one_phrase(values, message):
    assert refusal(values).startswith(message)


def test_many_mistakes_are_counted():
    said = refusal({str(number): 1 for number in range(1000)})
    assert said.endswith("; and 991 more")
    assert len(said) < 500
    assert listed(["a", "b", "a", "c", "d"], 2) == "a; b; and 2 more"


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_every_value_can_be_shown(value):
    for text in (shown(value), printable(value), shown([value] * 1000), shown({"a": {"b": value}})):
        assert is_printable(text)
        assert len(text) < 1000
    if isinstance(value, str) and is_printable(value) and len(value) <= 80:
        assert printable(value) == value
