from pathlib import Path

import pytest

from unet3d.config import Config, load_config
from unet3d.config.settings import Section
from unet3d.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "devices"),
    [("0", ("0",)), ("0,1", ("0", "1")), ("[0, 1]", ("0", "1")), (" cpu , cuda:0", None)],
)
def test_devices_as_people_write_them(value, devices):
    config = load_config(None, [f"parallel.devices={value}"])
    assert config.parallel.devices == (devices or ("cpu", "cuda:0"))


@pytest.mark.parametrize("value", ["y", "[y]"])
def test_one_axis_needs_no_list(value):
    config = load_config(None, [f"patches.augmentation.mirror_axes={value}"])
    assert config.patches.augmentation.mirror_axes == ("y",)


@pytest.mark.parametrize("folder", ["/data/a,b", "/data/my #1 set", "/data/x: y", "[odd]", "7"])
def test_a_path_is_taken_as_it_stands(folder):
    assert load_config(None, [f"data.dataset={folder}"]).data.dataset == Path(folder)
    assert load_config(None, [f"data.dataset={folder}", "data.dataset="]).data.dataset is None
    assert load_config(None, [f"data.cache={folder}", "data.cache=null"]).data.cache is None


def test_every_setting_can_say_what_it_allows():
    """No type of a setting is beyond the words of the messages."""

    class Nothing:
        pass

    def leaves(section, prefix=""):
        keys = []
        for name in type(section).model_fields:
            below = getattr(section, name)
            is_section = isinstance(below, Section)
            keys += leaves(below, f"{prefix}{name}.") if is_section else [prefix + name]
        return keys

    keys = leaves(Config())
    assert len(keys) > 40
    for key in keys:
        with pytest.raises(ConfigError, match=rf"settings: {key} is .*; give \w+"):
            Config().with_values({key: Nothing()})


def test_a_batch_has_a_patch_for_each_micro_batch():
    open_batch = load_config(None, ["training.micro_batches=8"]).training
    assert open_batch.batch_size == "auto"
    with pytest.raises(ValueError, match="has not been planned yet"):
        _ = open_batch.num_patches
    assert load_config(None, ["training.batch_size=4"]).training.num_patches == 4
    with pytest.raises(ConfigError, match="micro_batches is 8 but a batch has 4 patches"):
        load_config(None, ["training.micro_batches=8", "training.batch_size=4"])


@pytest.mark.parametrize("written", ["norm", "level", "off"])
def test_recompute_is_taken_as_it_is_written(written, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"memory:\n  recompute: {written}\n")
    for config in (load_config(file, []), load_config(None, [f"memory.recompute={written}"])):
        assert config.memory.recompute == written
        assert Config.from_yaml(config.to_yaml()).memory.recompute == written


def test_strides_lead_through_the_levels_that_are_named():
    strides = "model.strides=[[1,2,2],[2,2,2]]"
    assert load_config(None, [strides]).model.strides == ((1, 2, 2), (2, 2, 2))
    assert load_config(None, [strides, "model.num_levels=3"]).model.num_levels == 3
    for change, number in (("model.num_levels=4", 4), ("model.channels=4,8", 2)):
        with pytest.raises(ConfigError, match=f"has 2 entries, for 3 levels, but .* has {number}"):
            load_config(None, [strides, change])
