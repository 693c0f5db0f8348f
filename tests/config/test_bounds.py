"""Configurations that ask for too much, or hold values without a meaning."""

import math
import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.mutations import HOSTILE, damaged, mutated, property_test
from unet3d.config import Config, load_config
from unet3d.config.configuration import commented_yaml, parse_yaml
from unet3d.config.explain import settings_of
from unet3d.errors import ConfigError
from unet3d.inputs.plain_data import is_printable

TREE = Config().model_dump(mode="json")
KEYS = [setting.key for setting in settings_of(Config).values() if not setting.is_section]


def numbers(value: Any) -> list[float]:
    """Return every number in a value."""
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in numbers(item)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [value] if is_number else []


def accept(make: Any) -> Config | None:
    """Return the configuration, or None if it is refused, in one short printable line."""
    try:
        config: Config | None = make()
    except ConfigError as error:
        assert is_printable(str(error)), repr(str(error))
        assert len(str(error)) < 2500, str(error)
        config = None
    return config


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_setting_refuses_or_bounds_hostile_values(share):
    """By day every fifth value, a different fifth for each setting; at night all of them."""
    for number, (key, value) in enumerate(product(KEYS, HOSTILE)):
        if number % share:
            continue
        config = accept(partial(Config().with_values, {key: value}))
        if config is not None:
            for one in numbers(config.model_dump(mode="json")):
                assert math.isfinite(one), (key, value)
                assert abs(one) < 1e31, (key, value)
            assert Config.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.seed=18446744073709551616", "training.seed is 18446744073709551616; give a wh"),
        ("training.learning_rate=1e300", "is '1e300'; give a number above 0 and at most 1e+30"),
        ("training.learning_rate=yes", "training.learning_rate is True; give a number above 0"),
        ("data.spacing_mm=1,1,yes", "data.spacing_mm is [1, 1, True]; give auto, median, nat"),
        ("patches.size=65536,65536,65536", "281,474,976,710,656 voxels; give at most 8,589,934,5"),
        ("parallel.devices=[]", "parallel.devices is []; give a list of names or null"),
        ('parallel.devices=["\\e[2J"]', r"parallel.devices is \x1b[2J; give a list of names"),
        ("training.epochs=0x" + "f" * 5000, "training.epochs is <a number of 20000 bits>; give"),
        ("training.epochs=" + "9" * 5000, "is not valid YAML"),
        ("training.epochs=" + "[" * 100_000, "values are nested too deeply"),
        ("training.epochs=" + "1," * 4_000, "training.epochs is [1, 1, 1, 1, 1, 1, 1, 1, ...]; gi"),
        ("\x1b[2J=1", r"unknown setting \x1b[2J, known: data, patches"),
        ("a" * 10**6 + "=1", "unknown setting aaaa"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_value_out_of_range(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    said = str(caught.value)
    assert message in said
    assert is_printable(said)
    assert len(said) < 500


LAUGHS = "a: &a [x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "line 2: anchors (&) and aliases (*) are not allowed"),
        ("training:\n  epochs: *other\n", "line 2: anchors (&) and aliases (*) are not allowed"),
        ("training:\n  epochs: 3\n  epochs: 4\n", "line 3: 'epochs' is named twice"),
        ("training: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: " + "{b: " * 2000 + "}" * 2000, "values are nested too deeply"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: \x1b[2J", "special characters are not allowed"),
        ("? [1, 2]\n: 3\n", "unhashable key"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_yaml_that_is_more_than_settings(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert is_printable(str(caught.value))
    with pytest.raises(ConfigError, match="stored settings is not valid YAML"):
        Config.from_yaml(text)


def test_a_file_that_is_none_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo: it is not a regular file"):
        load_config(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        load_config(Path("/dev/zero"))
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ConfigError, match="larger than the 262,144 bytes"):
        load_config(tmp_path / "large.yaml")


def test_many_mistakes_make_a_short_message():
    tree = {f"mistake {number}": number for number in range(5000)}
    with pytest.raises(ConfigError, match="and 4990 more") as caught:
        Config.from_plain(tree)
    assert len(str(caught.value)) < 1000


@property_test
@given(mutated(TREE))
def test_mutations_of_the_values(tree):
    if isinstance(tree, dict):
        config = accept(lambda: Config.from_plain(tree))
        if config is not None:
            assert Config.from_yaml(config.to_yaml()) == config


@property_test
@given(damaged(yaml.safe_dump(TREE, sort_keys=False).encode()))
def test_mutations_of_the_text(content):
    accept(lambda: Config.from_yaml(content.decode(errors="surrogateescape")))


@partial(property_test, share=0.25)
@given(st.sampled_from(KEYS), st.text() | st.from_regex(r"[-+0-9eE.,_:\[\]{}&*!\"\\ xn]+"))
def test_overrides(key, value):
    config = accept(lambda: load_config(None, [f"{key}={value}"]))
    if config is not None:
        tree = parse_yaml(commented_yaml(config))
        again = Config.from_plain(tree)
        assert again == config
        assert all(again.is_open(key) == config.is_open(key) for key in KEYS)
