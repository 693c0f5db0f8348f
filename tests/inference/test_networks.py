"""Which networks fit together, and when their files are read."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.networks import random_checkpoint, write_checkpoint
from tests.nnunet.models import write_model
from tests.rank_threads import in_threads
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import CheckpointError
from unet3d.inference import networks
from unet3d.inference.networks import Networks
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation
from unet3d.runs.checkpoint import load_checkpoint

ALONE = Group(Ranks())
CT = ChannelNormalization(kind="ct", low=-100.0, high=300.0, mean=40.0, std=70.0)


def of_preparation(**changes):
    checkpoint = random_checkpoint(spacing_mm=(1.0, 1.0, 2.0))
    preprocessing = replace(checkpoint.preprocessing, channels=(CT,))
    return replace(checkpoint, preprocessing=replace(preprocessing, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spacing_mm": (1.0, 1.0, 2.5)}, r"its spacing_mm is \[1.0, 1.0, 2.5\] instead of \["),
        ({"orientation": "stored"}, "its orientation is 'stored' instead of 'ras'"),
        ({"channel_names": ("MR",)}, r"its channel_names is \['MR'\] instead of \['channel 0'\]"),
        ({"channels": (replace(CT, mean=41.0),)}, "its channels is .*41.0"),
        ({"label_names": ("background", "b")}, r"its label_names is \['background', 'b'\] instead"),
    ],
    ids=str,
)
def test_networks_that_prepare_images_in_another_way_are_refused(changes, words):
    with pytest.raises(
        CheckpointError,
        match=f"^network 3 cannot be averaged with network 1: {words}.*, or predict with each",
    ):
        Networks.of(of_preparation(), of_preparation(), of_preparation(**changes))


def test_a_network_is_averaged_with_models_of_nnunet_once_it_is_one():
    with pytest.raises(CheckpointError, match="as nnU-Net does; turn .* convert --to nnunet$"):
        Networks.of(of_preparation(), of_preparation(interpolation=Interpolation(clips=True)))


def test_networks_that_are_averaged_in_another_way_are_refused():
    other = of_preparation()
    other = replace(other, config=other.config.with_values({"inference.averaging": "logits"}))
    Networks.of(other, other)
    with pytest.raises(
        CheckpointError,
        match="^network 2 cannot be averaged with network 1: its inference.averaging is logits "
        "instead of probabilities; name networks of one kind$",
    ):
        Networks.of(of_preparation(), other)


def test_other_windows_and_levels_and_the_last_digit_do_not_matter():
    channel = replace(CT, mean=40.0 * (1 + 1e-7), least_std=1e-8)
    nearly = of_preparation(channels=(channel,), ignore_value=9)
    topology = replace(nearly.topology, channels=(4, 16))
    Networks.of(of_preparation(), replace(nearly, topology=topology, patch_size=(8, 8, 8)))


def test_files_are_read_in_a_thread_while_the_first_is_in_use(tmp_path, monkeypatch):
    paths = [write_checkpoint(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    read = []
    go_on = threading.Event()

    def load(path, part="network"):
        read.append((path.stem, part))
        of_this = threading.current_thread()  # other threads would delay the end of the process
        assert of_this.daemon or of_this is threading.main_thread()
        if threading.current_thread() is not threading.main_thread() and path.stem != "a":
            assert go_on.wait(20)
        return load_checkpoint(path, part)

    monkeypatch.setattr(networks, "load_network", load)
    found = Networks.read(paths, ALONE)
    assert read == [(name, "description") for name in "abc"]
    assert all(weight.is_meta for one in found.described for weight in one.model.values())
    first = found[0]  # the other networks are still being read
    go_on.set()
    for name, of_file in zip("abc", [first, found[1], found[-1]], strict=True):
        expected = load_checkpoint(tmp_path / f"{name}.pt").model
        for key, weight in of_file.model.items():
            assert torch.equal(weight, expected[key])
    assert found[2] is found[2]  # it is read once
    assert sorted(read[3:]) == [(name, "network") for name in "abc"]


def test_a_file_that_cannot_be_read_is_named_when_its_turn_comes(tmp_path):
    paths = [write_checkpoint(tmp_path / name) for name in ("a.pt", "b.pt")]
    content = bytearray(paths[1].read_bytes())
    value = load_checkpoint(paths[1]).model["encoder.levels.0.0.conv.weight"].numpy().tobytes()
    content[content.index(value)] ^= 1  # one bit of a weight
    paths[1].write_bytes(content)
    found = Networks.read(paths, ALONE)
    found[0].build_model()
    with pytest.raises(CheckpointError, match="b.pt is not a checkpoint that can be used"):
        found[1]
    replaced = Networks.read(paths[:1], ALONE)
    write_checkpoint(paths[0], patch_size=(8, 8, 8))
    with pytest.raises(CheckpointError, match="a.pt was replaced while it was in use; give the"):
        replaced[0]


@pytest.mark.parametrize("per_machine", [2, 1])
def test_ranks_read_the_files_of_the_first_one_which_sends_them_to_other_machines(
    tmp_path, monkeypatch, per_machine
):
    path, sent = write_checkpoint(tmp_path / "a.pt"), []

    def send(one, group):
        sent.append(group.ranks.rank)
        return load_checkpoint(one)

    monkeypatch.setattr(networks, "network_from_first", send)

    def read(group):
        return Networks.read([path] if group.is_first else [], group)

    expected = load_checkpoint(path).model
    for found in in_threads(2, read, per_machine):
        assert found.names == (str(path),)
        for key, weight in found[0].model.items():
            assert torch.equal(weight, expected[key])
    assert sorted(sent) == ([] if per_machine == 2 else [0, 1])


def test_ranks_do_not_compute_with_other_weights_than_the_first_one(tmp_path):
    path = write_checkpoint(tmp_path / "a.pt")
    content = path.read_bytes()

    def read(group):
        found = Networks.read([path], group)
        if group.is_first:
            found[0]
        group.exchange(None)
        if group.is_first:
            replacement = tmp_path / "b.pt"
            replacement.write_bytes(content)
            replacement.replace(path)
        group.exchange(None)
        if group.is_first:
            return found[0]
        with pytest.raises(CheckpointError, match="a.pt was replaced while it was in use; give"):
            found[0]
        return None

    in_threads(2, read)


def test_a_model_of_nnunet_whose_other_files_are_replaced_is_refused(tmp_path):
    model = write_model(tmp_path / "model", 0)
    found = Networks.read([model / "fold_0" / "checkpoint_final.pth"], ALONE)
    described = model / "dataset.json"
    described.write_text(described.read_text().replace('"organ"', '"kidney"'))
    with pytest.raises(CheckpointError, match="checkpoint_final.pth was replaced while it was"):
        found[0]
