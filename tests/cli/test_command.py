"""Help in groups, and options that are settings."""

import pytest

from tests.command_line import refusal, run
from unet3d.cli.app import commands
from unet3d.config import Config
from unet3d.config.explain import settings_of

SHOWN = {name: command for name, command in commands.commands.items() if not command.hidden}


def help_of(capsys, *arguments):
    assert run(*arguments, "--help") == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_commands_stand_in_the_order_of_work_with_whole_summaries(capsys):
    lines = help_of(capsys).partition("Commands:\n")[2].splitlines()
    names = [line.split()[0] for line in lines]
    order = ["check", "plan", "train", "predict", "evaluate", "report", "convert", "config"]
    assert names == order
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def test_help_of_each_command_has_groups_and_two_examples(capsys):
    for name, command in SHOWN.items():
        text = help_of(capsys, name)
        titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
        assert titles[-1] == "Common:", name
        assert ("Output:" in titles) == (name != "config")
        assert ("Devices:" in titles) == (name in ("plan", "train", "predict"))
        assert text.partition("Examples:\n")[2].count(f"    unet3d {name} ") == 2, name
        for option in command.params:
            short = {"--output": "-o", "--checkpoint": "-c"}
            for long in set(option.opts) & set(short):
                assert short[long] in option.opts, (name, long)


def test_options_of_settings_name_settings():
    named = {key for command in SHOWN.values() for key in command.of_settings.values()}
    assert len(named) > 12 and named <= settings_of(Config).keys()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "--epochs", "0"), "--epochs is 0; give a whole number above 0"),
        (("train", "--fold", "all"), "--fold is 'all'; give a whole number"),
        (("train", "--parallel", "tensor"), "--parallel is 'tensor'; give auto, none, data"),
        (("train", "--set", "training.epochs=0"), "training.epochs is 0"),
        (("plan", "--shape", "8,8"), "--shape is 8,8; give auto, whole, or three"),
        (("predict", "a.nii", "--overlap", "nan"), "--overlap is 'nan'"),
    ],
)
def test_a_value_that_is_refused_is_named_as_it_was_typed(arguments, line, capsys, tmp_path):
    assert refusal(capsys, *arguments).startswith(f"Error: {line}")
