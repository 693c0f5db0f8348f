"""Beginning with the weights of another run: weights that are used, new layers, and errors."""

import json
import logging
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.networks import random_checkpoint
from tests.nnunet.models import TOPOLOGY, random_weights, write_model
from tests.trainings import SMALL, assert_same_weights, run, run_until_power_cut, settings
from unet3d.config import Config, load_config
from unet3d.config.configuration import commented_yaml
from unet3d.datasets.labels import Region
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.model import Topology, UNet3d
from unet3d.planning.auto_settings import suited_to
from unet3d.planning.network_plan import plan_fingerprint
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.preprocess import Fingerprint
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import save_checkpoint
from unet3d.training.initialising import begin_with, network_to_begin_with, take_weights

assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)

STEM, HEADS = "encoder.levels.0.0.", "decoder.heads."
OLD = ("liver", "tumour")
GPU = torch.device("cuda", 0)

DEEP = Topology(
    in_channels=2,
    num_classes=3,
    channels=(4, 6, 8, 8),
    strides=((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2)),
    deep_supervision=True,
)


def preparing(num_channels, *labels):
    return Preprocessing(
        spacing_mm=(1.0, 1.0, 2.5),
        channels=(ChannelNormalization(kind="z-score"),) * num_channels,
        channel_names=tuple(f"channel {index}" for index in range(num_channels)),
        label_names=("background", *labels),
        label_values=tuple(range(len(labels) + 1)),
    )


def network(seed, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return UNet3d(replace(DEEP, **changes))


def trained(**changes):
    topology = replace(DEEP, **changes)
    return replace(
        random_checkpoint(),
        topology=topology,
        preprocessing=preparing(topology.in_channels, *OLD),
        model=network(1, **changes).state_dict(),
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("init") / "deep.pt"
    save_checkpoint(trained(), path)
    return path


@pytest.mark.parametrize("encoder", ["plain", "residual"])
@pytest.mark.parametrize(
    ("changes", "labels", "new", "words"),
    [
        ({}, OLD, (), None),
        ({}, ("left", "right"), (HEADS,), "the heads (left, right instead of liver, tumour)"),
        ({"in_channels": 1}, OLD, (STEM,), "the stem (channel 0 instead of channel 0, channel 1)"),
        (
            {"in_channels": 3, "num_classes": 2},
            ("one",),
            (STEM, HEADS),
            "the stem (channel 0, channel 1, channel 2 instead of channel 0, channel 1) and the "
            "heads (one instead of liver, tumour)",
        ),
        ({"deep_supervision": False}, OLD, (), None),
    ],
    ids=str,
)
def test_all_but_stem_and_heads_is_taken(changes, labels, new, words, encoder):
    checkpoint = trained(encoder=encoder)
    model = network(2, encoder=encoder, **changes)
    random = {name: value.clone() for name, value in model.state_dict().items()}
    found = take_weights(model, preparing(model.topology.in_channels, *labels), checkpoint)
    assert found == (f"new layers: {words}" if words else "no layer is new")
    taken = {name: value for name, value in checkpoint.model.items() if not name.startswith(new)}
    assert_equal(model.state_dict(), {name: taken.get(name, random[name]) for name in random})


def test_regions_in_place_of_labels_have_heads_of_their_own():
    """Three regions, as many as the checkpoint has classes."""
    regions = [Region(name=name, values=(1, 2), written=2) for name in ("whole", "core", "rim")]
    model = network(2)
    head = model.decoder.heads[0].weight.clone()
    words = take_weights(
        model, replace(preparing(2, "a", "b", "c"), regions=tuple(regions)), trained()
    )
    assert words == "new layers: the heads (whole, core, rim instead of liver, tumour)"
    assert_equal(model.decoder.heads[0].weight, head)


def test_heads_that_the_checkpoint_lacks_are_new_and_types_of_numbers_converted():
    checkpoint = trained(deep_supervision=False)
    double = replace(checkpoint, model={name: w.double() for name, w in checkpoint.model.items()})
    model = network(2)
    new = {name: value.clone() for name, value in model.state_dict().items() if "heads.1." in name}
    words = take_weights(model, checkpoint.preprocessing, double)
    assert words == "new layers: the heads of level 1"
    assert_equal(model.state_dict(), {**checkpoint.model, **new})


# Settings


def resolved(file, *changes, path=None):
    config, _ = suited_to(load_config(path, [f"training.init={file}", *changes]), [GPU])
    return network_to_begin_with(config)[0]


def planned(file, size, spacing_mm, *changes):
    """Return the network planned for two channels and three classes."""
    config, architecture = network_to_begin_with(
        load_config(None, [f"training.init={file}", *changes])
    )
    shape = Fingerprint(spacing_mm=spacing_mm, shape=size, shapes=frozenset([size]), num_cases=9)
    given = config.with_values({"patches.size": size, "training.batch_size": 2})
    return plan_fingerprint(given, shape, 2, 3, architecture=architecture).topology


def test_defaults_that_are_written_down_ask_for_no_network(tmp_path):
    """The output of ``unet3d config`` leaves network, spacing and learning rate to the weights."""
    save_checkpoint(trained(encoder="residual", norm="group"), tmp_path / "other.pt")
    (tmp_path / "full.yaml").write_text(commented_yaml(Config()))
    found = resolved(tmp_path / "other.pt", path=tmp_path / "full.yaml")
    assert found == resolved(tmp_path / "other.pt")
    assert (found.model.encoder, found.model.norm) == ("residual", "group")
    assert found.data.spacing_mm == (1.0, 1.0, 2.5)


def test_network_and_spacing_are_those_of_the_checkpoint(file):
    config = resolved(file)
    assert config.model.channels == DEEP.channels
    assert config.data.spacing_mm == (1.0, 1.0, 2.5)
    assert config.patches.size == "auto"
    # A set value is used; settings recorded by a run fit its checkpoint.
    assert resolved(file, "data.spacing_mm=median").data.spacing_mm == "median"
    assert network_to_begin_with(load_config()) == (load_config(), None)
    again = Config.from_yaml(config.to_yaml())
    assert again == config and network_to_begin_with(again) == (config, DEEP)
    same = ("model.channels=4,6,8,8", "model.num_levels=4", "model.norm=instance")
    assert resolved(file, *same).model == config.model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.channels=4,8,16,32", "model.channels 4, 8, 16, 32, but the checkpoint has 4, 6"),
        ("model.base_channels=8", "model.base_channels 8, but the checkpoint has 4;"),
        ("model.num_levels=5", "model.num_levels 5, but the checkpoint has 4"),
        ("model.norm=batch", "model.norm batch, but the checkpoint has instance"),
    ],
)
def test_settings_of_another_network_are_refused(file, change, words):
    with pytest.raises(ConfigError, match=words):
        resolved(file, change)


# Training


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    run(settings(cache, "training.epochs=1"), folder)
    return folder


def fine_tuning(cache, init, *changes):
    """Return settings of a small training, without those of the network."""
    own = [change for change in SMALL if not change.startswith("model.")]
    return resolved(init, *own, f"data.cache={cache}", *changes)


def test_a_training_begins_with_the_weights(cache, finished, tmp_path, caplog):
    """The learning rate is too small to change weights; patches have another size."""
    caplog.set_level(logging.INFO)
    init = finished / "checkpoint-latest.pt"
    small = ("training.learning_rate=1e-30", "training.epochs=1", "patches.size=8,8,8")
    run(fine_tuning(cache, init, *small), tmp_path / "run")
    assert_same_weights(tmp_path / "run", finished)
    assert f"training starts from the weights of {init}; no layer is new" in caplog.messages
    assert "scores will be too high" not in caplog.text
    run(fine_tuning(cache, init, *small, "data.fold=1"), tmp_path / "other")
    (case,) = json.loads((tmp_path / "other/data.json").read_text())["validation"]
    words = f"trained on 1 validation case of this run ({case}), so scores will be too high; choose"
    assert words in caplog.text


@pytest.mark.nightly
def test_it_goes_on_without_the_file(cache, finished, tmp_path):
    init = shutil.copy(finished / "checkpoint-latest.pt", tmp_path / "init.pt")
    brief = ("training.epochs=1", "training.save_every_seconds=0")
    config = fine_tuning(cache, init, *brief)
    run(config, tmp_path / "whole")
    run_until_power_cut(config, tmp_path / "parts", num_steps=3)
    init.unlink()
    run(load_config(tmp_path / "parts" / "config.yaml"), tmp_path / "parts", resume=True)
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_every_part_of_a_network_of_another_program_is_taken(tmp_path):
    changes = {
        "kernels": ((3, 3, 1), (3, 3, 1), (3, 3, 3), (3, 3, 3)),
        "strides": ((1, 1, 1), (2, 2, 1), (2, 2, 1), (2, 2, 2)),
        "units": (1, 3, 2, 2),
        "decoder_units": (1, 2, 1),
        "upsampling_bias": True,
        "norm_eps": 1e-3,
        "negative_slope": 0.2,
    }
    checkpoint = trained(**changes)
    save_checkpoint(checkpoint, tmp_path / "model.pt")
    topology = planned(tmp_path / "model.pt", (16, 16, 16), (1.0, 1.0, 1.0))
    assert topology == checkpoint.topology
    model = UNet3d(topology)
    assert take_weights(model, checkpoint.preprocessing, checkpoint) == "no layer is new"
    assert_equal(model.state_dict(), checkpoint.model)
    with pytest.raises(ConfigError, match="a patch of 8x8x2 to one voxel, because it divi"):
        planned(tmp_path / "model.pt", (8, 8, 2), (1.0, 1.0, 1.0))


def test_a_model_of_nnunet_may_be_named_itself(tmp_path):
    path = write_model(tmp_path / "model", 0) / "fold_0/checkpoint_final.pth"
    config = resolved(path)
    assert planned(path, (32, 48, 16), (1.0, 0.5, 3.0)) == TOPOLOGY
    assert config.data.spacing_mm == (1.0, 0.5, 3.0)
    network = UNet3d(TOPOLOGY)
    begin_with(path, network, preparing(2, "organ", "lésion"), Group(Ranks()), {})
    stem = "encoder.levels.0.0.conv.weight"
    assert_equal(network.state_dict()[stem], random_weights()[stem])
