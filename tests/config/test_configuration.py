import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import yaml

from unet3d.config import Config, load_config, parsed_value
from unet3d.errors import ConfigError


def refusal(*overrides: str, path: Path | None = None) -> str:
    """Return the message of a refusal, and check that it is one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_values_of_python_are_settings():
    values = {
        "data.dataset": Path("/somewhere, else #1"),
        "data.cache": None,
        "data.spacing_mm": (1.0, 1.5, 3e-7),
        "patches.size": np.array([32, 48, 64]),
        "patches.augmentation": "none",
        "model.channels": [8, 16, 32],
        "memory.recompute": "off",
        "training.epochs": np.int64(3),
        "training.weight_decay": np.float32(0.5),
        "training.learning_rate": 1e-7,
        "parallel": {"mode": "model", "devices": "0,cpu"},
        "inference.window": "whole",
    }
    config = load_config(None, {key: parsed_value(key, value) for key, value in values.items()})
    assert (config.parallel.mode, config.parallel.devices) == ("model", ("0", "cpu"))
    del values["parallel"]
    for key, value in values.items():
        taken = tuple(value) if isinstance(value, list | np.ndarray) else value
        assert attrgetter(key)(config) == taken, key
    assert Config.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("text", ["", "# nothing\n", "training:\n", "memory:\n"])
def test_an_empty_file_or_section_means_the_defaults(tmp_path, text):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert load_config(path) == Config()
    assert load_config(path, ["training.epochs=3"]).training.epochs == 3


def test_with_values_replaces_some_and_checks_all():
    config = load_config(None, ["training.epochs=3"])
    changed = config.with_values({"patches.size": (16, 16, 8), "model.num_levels": 2})
    assert changed.patches.size == (16, 16, 8)
    assert changed.training.epochs == 3
    assert config.patches.size == "auto"
    with pytest.raises(ConfigError, match="training.epoch, did you mean training.epochs"):
        config.with_values({"training.epoch": 3})
    with pytest.raises(ConfigError, match=r"model.num_levels is 1; give a whole number"):
        config.with_values({"model.num_levels": 1})
    with pytest.raises(ConfigError, match=r"patches.size is {'x': 1}; give auto"):
        config.with_values({"patches.size.x": 1})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("patches.size=1,2", "patches.size is 1,2; give auto, whole, or three whole numbers abo"),
        ("data.labels={}", "data.labels is {}; give a mapping of names to lists, a list of whole"),
        ("training.epochs=0", "training.epochs is 0; give a whole number above 0"),
        ("training.epochs=yes", "training.epochs is True; give a whole number above 0"),
        ("training.weight_decay=-1", "weight_decay is -1; give a number of at least 0 and at most"),
        ("training.learning_rate=.nan", "training.learning_rate is nan; give a number above 0"),
        ("model.norm=layer", "model.norm is 'layer'; give instance, group or batch"),
        ("model.channels=[32]", "model.channels names 1 level; give 2 to 8"),
        ("model.deep_supervision=maybe", "is 'maybe'; give true or false"),
        (
            "patches.augmentation_details.mirror_axes=x,w",
            "augmentation_details.mirror_axes is x,w; give auto, or a list of x, y or z",
        ),
        (
            "patches.augmentation_details.gamma_probability=2",
            "augmentation_details.gamma_probability is 2; give a number of at least 0 and at most",
        ),
        (
            "patches.augmentation_details.gama_probability=0",
            "did you mean patches.augmentation_details.gamma_probability?",
        ),
        ("patches.augmentation_details=3", "is 3; give a mapping of names to values"),
        ("parallel.devices=1.5", "parallel.devices is 1.5; give a list of names or null"),
        ("patches.epochs=3", "unknown setting patches.epochs, did you mean training.epochs?"),
        ("trainig.epochs=3", "unknown setting trainig, did you mean training?"),
        ("zzz=3", "unknown setting zzz, known: data, patches, model, training, parallel"),
        ("training.epochs", "--set training.epochs: write section.key=value"),
        ("model.channels=8,[16", "--set model.channels: the value '8,[16' is not valid YAML"),
    ],
)
def test_one_message_for_a_wrong_setting(override, message):
    said = refusal(override)
    assert message in said
    assert ";" not in said.replace("; give", "").replace("; use", "")


@pytest.mark.parametrize(
    ("mode", "settings", "reason"),
    [
        ("none", ["parallel.replicas=2"], " is 2 but parallel.mode none makes no use of it; leave"),
        ("data", ["parallel.replicas=2"], "or use --parallel auto or model or spatial"),
        ("auto", ["parallel.data_parallel=true"], "mode auto makes .* or use --parallel data$"),
        ("data", ["parallel.cuts=time"], " is 'time' but parallel.mode data makes no use"),
        ("spatial", ["parallel.cuts=4,7"], r" is \(4, 7\) but parallel.mode spatial makes"),
        ("spatial", ["model.norm=batch"], " is batch but parallel.mode spatial with training"),
        (
            "data",
            ["training.micro_batches=2", "parallel.data_parallel=true"],
            "data_parallel takes no micro-batches, but training.micro_batches is 2",
        ),
        (
            "auto",
            ["training.micro_batches=2", "model.norm=batch"],
            "with training.micro_batches 2 never has the whole batch together",
        ),
        (
            "auto",
            ["memory.recompute=level", "memory.offload=skips"],
            "memory.offload=skips with memory.recompute=level",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_each_other_are_refused(mode, settings, reason):
    said = refusal(f"parallel.mode={mode}", *settings)
    assert re.search(reason, said) and settings[-1].partition("=")[0] in said


def test_settings_that_suit_each_other_are_taken():
    load_config(None, ["memory.offload=skips"])
    load_config(None, ["parallel.mode=model", "parallel.replicas=2", "parallel.cuts=time"])
    load_config(None, ["parallel.mode=spatial", "parallel.replicas=2", "training.micro_batches=2"])
    load_config(None, ["parallel.replicas=2", "model.norm=batch"])  # auto: the devices decide
    for text, value in (("true", True), ("1", "1"), ("cuda:1", "cuda:1")):
        threads = ["parallel.mode=data", f"parallel.data_parallel={text}"]
        assert load_config(None, threads).parallel.data_parallel == value


def test_all_errors_are_told_at_once(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("training: {epochs: -1, optimiser: sgd}\nmodel: {norm: layer}\n")
    message = refusal("patches.size=x", path=path)
    assert message.startswith(f"{path}: ")
    for part in (
        "training.epochs is -1",
        "unknown setting training.optimiser, did you mean training.optimizer?",
        "model.norm is 'layer'",
        "patches.size is 'x'",
    ):
        assert message.count(part) == 1


def test_what_is_wrong_with_an_option_is_not_blamed_on_the_file(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("training: {epochs: 3, batch_size: 2}\n")
    for override, reason in (
        ("training.epochs=-1", "training.epochs is -1; give"),
        ("training.epoch=1", "unknown setting training.epoch, did you mean"),
        ("training.micro_batches=4", "training.micro_batches is 4 but a batch has 2 patches"),
    ):
        assert refusal(override, path=path).startswith(reason)
    path.write_text("training: [1]\n")
    assert refusal("training.seed=3", path=path) == "training is [1], not a section"
    path.write_text("training: {epochs: -1}\n")
    assert refusal("training.seed=3", path=path).startswith(f"{path}: training.epochs is -1")
    assert load_config(path, ["training.epochs=4"]).training.epochs == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold sections and settings, not a list"),
        ("training: [unclosed", "is not valid YAML"),
        ("training: {epochs: 2024-99-99}", "is not valid YAML: month must be in 1..12"),
        ("training: 3", "training is 3; give a section with settings such as epochs"),
        ("training: {1: 2}", "unknown setting training.1, known: epochs"),
        ("7: 8", "unknown setting 7, known: data"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert message in refusal(path=path)
    with pytest.raises(ConfigError):
        Config.from_yaml(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*missing.yaml: No such file"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"binary.yaml: not a text file"):
        load_config(tmp_path / "binary.yaml")


def test_the_written_yaml_is_plain_and_complete():
    tree = yaml.safe_load(Config().to_yaml())
    assert tree["data"]["phantom_shape"] == [64, 64, 64]
    assert {name: set(section) for name, section in tree.items()} == {
        name: set(type(section).model_fields) for name, section in dict(Config()).items()
    }
    assert tree["parallel"]["devices"] is None


def test_settings_need_no_torch():
    code = "import sys, unet3d.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
