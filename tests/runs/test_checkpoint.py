import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.networks import random_checkpoint
from tests.runs.refusals import refusal, stepped
from unet3d import __version__
from unet3d.errors import CheckpointError
from unet3d.model import UNet3d
from unet3d.model.optimizer import Optimization
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.checkpoint import load_checkpoint, save_checkpoint
from unet3d.runs.tensor_file import write_tensors

PREPROCESSING = Preprocessing(
    spacing_mm=(1.0, 0.7, 2.5),
    channels=(
        ChannelNormalization(kind="ct", low=-100.0, high=300.0, mean=40.0, std=55.5),
        ChannelNormalization(kind="z-score", least_std=1e-8),
    ),
    channel_names=("CT", "PET"),
    label_names=("background", "organ", "lesion"),
    label_values=(0, 1, 5),
)


TRAINED_ELSEWHERE = {
    "units": (1, 3),
    "decoder_units": (1,),
    "upsampling_bias": True,
    "norm_eps": 1e-3,
    "negative_slope": 0.0,
}


SETTINGS = ("training.epochs=7", "training.optimizer=adamw", "parallel.devices=cpu,cpu")

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def make_checkpoint(dtype=torch.float32, device="cpu", precision="float32", **fields):
    """Return the checkpoint of a network after one step of training."""
    like = random_checkpoint(num_channels=2, label_values=(0, 1, 5), changes=SETTINGS)
    topology = replace(like.topology, **fields)
    model = UNet3d(topology).to(device, dtype)
    state = {"epoch": 3, "best_dice": 0.1 + 0.2}
    training = stepped(model, like.config.training, precision).state_dict()
    return replace(
        like,
        topology=topology,
        preprocessing=PREPROCESSING,
        patch_size=(16, 16, 8),
        model=dict(model.state_dict()),
        training={"state": state, "random": torch.get_rng_state(), **training},
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(make_checkpoint(), path)
    return path


def test_what_predictions_keep_is_kept(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint = make_checkpoint()
    save_checkpoint(replace(checkpoint, postprocessing=((1, 5), (5,))), path)
    assert load_checkpoint(path).postprocessing == ((1, 5), (5,))
    save_checkpoint(checkpoint, path)
    assert load_checkpoint(path).postprocessing == ()
    for wrong in (((0,),), ((1, 3),)):
        save_checkpoint(replace(checkpoint, postprocessing=wrong), path)
        assert f"post-processing of label {wrong[0][-1]}, which it does not have" in refusal(path)
    save_checkpoint(replace(checkpoint, postprocessing=((),)), path)
    assert "postprocessing" in refusal(path)


@pytest.mark.parametrize(
    ("dtype", "fields", "lacks"),
    [
        (torch.float32, {}, {}),
        (
            torch.float64,
            {"norm": "batch", "encoder": "residual", "deep_supervision": True},
            {"patch_size": None, "preprocessing": replace(PREPROCESSING, spacing_mm=None)},
        ),
        (torch.float32, TRAINED_ELSEWHERE, {}),
    ],
    ids=str,
)
def test_round_trip_is_bit_exact(tmp_path, dtype, fields, lacks):
    checkpoint = replace(make_checkpoint(dtype, **fields), **lacks)
    # Their autograd graph is not saved.
    parameters = {
        name: torch.nn.Parameter(value) * 1 if value.is_floating_point() else value
        for name, value in checkpoint.model.items()
    }
    save_checkpoint(replace(checkpoint, model=parameters), tmp_path / "checkpoint.pt")
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert {type(value) for value in loaded.model.values()} == {Tensor}
    assert not any(value.requires_grad for value in loaded.model.values())
    assert loaded.topology == checkpoint.topology
    assert loaded.preprocessing == checkpoint.preprocessing
    assert loaded.patch_size == checkpoint.patch_size
    assert loaded.config == checkpoint.config
    assert_same(loaded.model, checkpoint.model)
    assert_same(loaded.training, checkpoint.training)
    model = loaded.build_model()
    assert_same(dict(model.state_dict()), checkpoint.model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    assert_same(loaded.model, checkpoint.model)
    with open(tmp_path / "checkpoint.pt", "r+b") as file:  # nor is memory shared with the file
        file.truncate(0)
    assert_same(loaded.model, checkpoint.model)
    assert_same(loaded.training, checkpoint.training)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_tensors_that_share_memory_are_written_each_by_itself(tmp_path):
    path, checkpoint = tmp_path / "checkpoint.pt", make_checkpoint()
    one = torch.arange(3e6)
    kept = {"a": one, "b": one, "c": one[1:], "d": torch.ones(10**7)[:2]}
    save_checkpoint(replace(checkpoint, training={"state": kept}), path)
    assert 36e6 < path.stat().st_size < 37e6
    assert_same(load_checkpoint(path).training["state"], kept)


@pytest.mark.parametrize(
    ("device", "precision"),
    [("cpu", "float32"), pytest.param("cuda", "float16", marks=pytest.mark.gpu)],
)
def test_the_file_is_safe_to_load_and_free_of_devices(tmp_path, device, precision):
    checkpoint = make_checkpoint(device=device, precision=precision)
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(checkpoint, path)
    assert torch.load(path, weights_only=True)["unet3d"] == __version__
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        assert b"cuda" not in archive.read(name)
    loaded = load_checkpoint(path)
    for name, value in loaded.model.items():
        assert torch.equal(value, checkpoint.model[name].cpu())
    on_cpu = loaded.build_model()
    again = Optimization(on_cpu, checkpoint.config.training, precision)
    again.load_state_dict(loaded.training)
    assert len(again.optimizer.state_dict()["state"]) == len(list(on_cpu.parameters()))


def test_files_of_others(tmp_path):
    path = tmp_path / "file.pt"
    foreign = (b"", b"hello", b"\x1f\x8b" + bytes(100), bytes(10_000), pickle.dumps({"a": 1}))
    for content in foreign:
        path.write_bytes(content)
        assert "is not a checkpoint that can be used" in refusal(path), content[:9]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "is not a checkpoint that can be used" in refusal(path)
    tensor = torch.zeros(3)
    for value in (tensor, [1, 2], {"w": tensor}, {"format": tensor}, 3, OrderedDict(a=1)):
        torch.save(value, path)
        assert "is not a checkpoint of unet3d; train one with unet3d train" in refusal(path), value


def test_an_error_of_the_disk_is_not_hidden_behind_one_of_pytorch():
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb", 0) as file:
        write_tensors({"w": torch.zeros(1_000_000)}, file)


def test_what_is_no_file_and_what_cannot_be_written_are_said(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write .*: No such file or directory"):
        save_checkpoint(make_checkpoint(), tmp_path / "missing" / "checkpoint.pt")
    os.mkfifo(tmp_path / "fifo.pt")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    for name, words in (
        ("missing.pt", "No such file or directory"),
        ("", "Is a directory"),
        ("fifo.pt", "it is not a regular file"),
        ("loop.pt", "symbolic links"),
    ):
        assert words in refusal(tmp_path / name)


def test_another_version_or_format_is_named(saved):
    content = torch.load(saved, weights_only=True)
    torch.save({**content, "topology": {}}, saved)
    assert "is not a checkpoint that can be used: topology.in_channels is missing; " in refusal(
        saved
    )
    torch.save({**content, "format": 2, "unet3d": "9.9"}, saved)
    message = refusal(saved)
    assert "its format is 2, and this version reads 1" in message
