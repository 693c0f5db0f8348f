import json
import re
from functools import reduce

import pytest
import yaml
from click.testing import CliRunner

from unet3d.cli.app import commands
from unet3d.config import Config, load_config
from unet3d.config.configuration import commented_yaml, in_yaml
from unet3d.config.explain import settings_of

AWKWARD = [
    "data.dataset=/my #1 set/a: b, c",
    "data.cache=null",
    "data.spacing_mm=1,1.5,3",
    "memory.recompute=off",
    "model.channels=8,16,32",
    "parallel.mode=model",
    "parallel.devices=0,cpu,cuda:1",
    "training.weight_decay=1e-7",
]


def printed(*arguments: str) -> str:
    """Return the output of ``unet3d config``."""
    result = CliRunner().invoke(commands, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_what_the_command_prints_is_a_configuration_of_the_defaults(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(printed())
    assert load_config(path) == Config()
    found, expected = yaml.safe_load(path.read_text()), Config().model_dump(mode="json")
    keys = [setting.key for setting in settings_of(Config).values() if not setting.is_section]
    for key in keys:
        *sections, name = key.split(".")
        section = reduce(dict.get, sections, expected)
        section[name] = "auto" if Config().is_open(key) else section[name]
        assert load_config(path).is_open(key) == Config().is_open(key)
    assert sum(map(Config().is_open, keys)) >= 8
    assert json.dumps(found) == json.dumps(expected)  # also in the same order


def test_values_of_a_file_and_of_options_come_back(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("training:\n  epochs: 7\n")
    sets = [word for change in AWKWARD for word in ("--set", change)]
    text = printed("--config", str(path), *sets)
    path.write_text(text)
    config = load_config(path)
    assert config == load_config(None, ["training.epochs=7", *AWKWARD])
    allowed = "a whole number above 0 and at most 1,000,000, or auto"
    assert f"# Allowed: {allowed}. Default: auto.\n  epochs: 7\n" in text
    # For epochs and all awkward settings but the cache, whose value is the default's. A line may
    # break before "Default:".
    assert len(re.findall(r"\bDefault: |\bDefault:$", text, re.M)) == 1 + len(AWKWARD) - 1


def test_no_setting_lacks_a_meaning_or_a_type_in_words():
    everything = settings_of(Config).values()
    assert len(everything) > 50
    for setting in everything:
        assert re.fullmatch(r"[A-Za-z0-9].*\.", setting.meaning), setting.key
        assert setting.allowed, setting.key


def test_every_line_of_a_value_follows_its_meaning():
    lines = commented_yaml(Config()).splitlines()
    assert max(map(len, lines)) <= 100
    by_name = {setting.key.split(".")[-1]: setting for setting in settings_of(Config).values()}
    above = ""
    for line in lines:
        name = re.match(r"\s*(\w+):", line)
        if name:
            assert by_name[name[1]].is_section or " Allowed: " in above, line
        above = "" if name else f"{above} {line.strip('# ')}"
    assert "`" not in "\n".join(lines)


@pytest.mark.parametrize("value", [None, True, "off", "null", "1f1b", "", 3e-5, 4, [1.0, 2.5], []])
def test_a_value_is_one_line_of_yaml(value):
    text = in_yaml(value)
    assert "\n" not in text
    assert yaml.safe_load(text) == value
