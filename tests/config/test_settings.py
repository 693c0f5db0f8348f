from operator import attrgetter
from pathlib import Path

import pytest

from unet3d.config import AugmentationSettings, Config, load_config
from unet3d.config.explain import settings_of
from unet3d.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "text", "value"),
    [
        ("parallel.devices", "0", ("0",)),
        ("parallel.devices", "0,1", ("0", "1")),
        ("parallel.devices", " cpu , cuda:0", ("cpu", "cuda:0")),
        ("data.spacing_mm", "1,1.5,3", (1.0, 1.5, 3.0)),
        ("patches.size", "[32, 48, 64]", (32, 48, 64)),
        ("parallel.cuts", "3", (3,)),
        ("parallel.cuts", "time", "time"),
        ("memory.recompute", "off", "off"),
        ("training.weight_decay", "1e-7", 1e-7),
    ],
)
def test_values_as_people_write_them(setting, text, value):
    config = load_config(None, [f"{setting}={text}", "parallel.mode=model"])
    assert attrgetter(setting)(config) == value


@pytest.mark.parametrize("folder", ["/data/a,b", "/data/my #1 set", "/data/x: y", "[odd]", "7"])
def test_a_path_is_taken_as_it_stands(folder):
    assert load_config(None, [f"data.dataset={folder}"]).data.dataset == Path(folder).absolute()
    assert load_config(None, [f"data.dataset={folder}", "data.dataset="]).data.dataset is None
    assert load_config(None, [f"data.cache={folder}", "data.cache=null"]).data.cache is None


def test_a_relative_path_is_kept_absolute(tmp_path, monkeypatch):
    """So a run can be continued from another folder, with the same data and the same cache."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "my" / "settings.yaml"
    file.parent.mkdir()
    file.write_text("data: {cache: prepared}\n")
    config = load_config(file, ["data.dataset=ds", "training.init=../a.pt"])
    written = config.to_yaml()
    monkeypatch.chdir("/")
    again = Config.from_yaml(written)
    assert again.data.dataset == tmp_path / "ds"
    assert again.data.cache == tmp_path / "prepared"
    assert again.training.init == tmp_path / "../a.pt"


def test_a_batch_has_a_patch_for_each_micro_batch():
    open_batch = load_config(None, ["training.micro_batches=8"]).training
    assert open_batch.batch_size == "auto"
    with pytest.raises(ValueError, match="has not been planned yet"):
        _ = open_batch.num_patches
    assert load_config(None, ["training.batch_size=4"]).training.num_patches == 4
    with pytest.raises(ConfigError, match="micro_batches is 8 but a batch has 4 patches"):
        load_config(None, ["training.micro_batches=8", "training.batch_size=4"])


def test_there_are_fifty_settings_beside_those_about_files():
    names = [key for key, setting in settings_of(Config).items() if not setting.is_section]
    assert sum(not name.startswith("data.reading.") for name in names) == 50


def test_one_word_says_how_patches_are_changed_and_details_may_differ():
    plain, light, full = (
        load_config(None, [f"patches.augmentation={how}"]).patches.random_changes
        for how in ("none", "light", "nnunet")
    )
    assert full == AugmentationSettings() == Config().patches.random_changes
    assert not plain.enabled and plain.known_mirror_axes == ()
    assert (light.rotation_probability, light.blur_probability) == (0, 0)
    assert (light.gamma_probability, light.known_mirror_axes) == (0.3, ("y", "z"))
    changes = ("patches.augmentation=light", "patches.augmentation_details.blur_probability=0.5")
    config = load_config(None, changes)
    assert config.patches.random_changes == light.model_copy(update={"blur_probability": 0.5})
    assert Config.from_yaml(config.to_yaml()).patches == config.patches
    for text, axes in (("y", ("y",)), ("x,y", ("x", "y"))):
        config = load_config(None, [f"patches.augmentation_details.mirror_axes={text}"])
        assert config.patches.random_changes.mirror_axes == axes
