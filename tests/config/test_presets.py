"""Presets: each is a set of settings; the order of presets and changes matters."""

from operator import attrgetter

import torch

from tests.command_line import run
from unet3d.cli.train import train
from unet3d.config import load_config
from unet3d.config.configuration import PRESETS, preset_changes
from unet3d.planning.auto_settings import suited_to


def test_each_is_named_by_help_and_differs_from_the_defaults():
    (option,) = [option for option in train.params if option.name == "presets"]
    for name in PRESETS:
        assert f" {name} " in option.help
    for name in PRESETS:
        config = load_config(None, preset_changes([name]))
        assert config == load_config().with_values(PRESETS[name]) != load_config()


def test_full_is_the_same_training_on_a_cpu_and_quick_as_long():
    for name, keys in (("full", ("model", "training", "patches")), ("quick", ())):
        config = load_config(None, preset_changes([name]))
        on_cpu, on_gpu = (
            suited_to(config, [torch.device(device)])[0] for device in ("cpu", "cuda:0")
        )
        for key in (*keys, "training.epochs", "training.steps_per_epoch"):
            assert attrgetter(key)(on_cpu) == attrgetter(key)(on_gpu), key


def test_a_later_one_wins_and_what_is_set_wins_over_all(capsys):
    changes = preset_changes(["quick", "full"])
    assert load_config(None, changes).training.epochs == 1000
    assert load_config(None, {**changes, "training.epochs": 3}).training.epochs == 3
    assert run("config", "--preset", "quick") == 0
    assert "  epochs: 50\n" in capsys.readouterr().out
    assert run("config", "--preset", "quick", "--set", "training.epochs=7") == 0
    assert "  epochs: 7\n" in capsys.readouterr().out
    assert run("config", "--preset", "slow") == 1
