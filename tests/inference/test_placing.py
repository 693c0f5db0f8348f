"""The precision of a prediction, and its mode."""

from dataclasses import replace

import pytest

from tests.networks import random_checkpoint, set_to
from tests.rank_threads import place
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.inference import placing
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks, choose_mode
from unet3d.inference.predictor import Predictor
from unet3d.parallel import precision

CHECKPOINT = random_checkpoint(patch_size=(4, 16, 16))
"""A network with windows of four planes and a stride of two."""

BATCH_NORM = replace(CHECKPOINT, topology=replace(CHECKPOINT.topology, norm="batch"))
"""The same network with batch norm, which cannot be divided into slabs."""


def test_slabs_in_one_process_are_refused():
    settings = ParallelSettings(mode="spatial", devices=("cpu", "cpu"))
    with pytest.raises(ConfigError, match="spatial over 2 devices needs a process for each"):
        Predictor(Networks.of(CHECKPOINT), settings)


@pytest.mark.parametrize(
    ("device", "trained", "asked", "computed"),
    [
        ("cpu", "float16", "auto", "float32"),
        ("cpu", "float32", "auto", "float32"),
        ("cpu", "float32", "bfloat16", "bfloat16"),
        ("cpu", "bfloat16", "auto", "bfloat16"),
        ("cpu", "auto", "auto", "bfloat16"),
        ("cpu", "auto", "float32", "float32"),
        pytest.param("cuda:0", "float16", "auto", "float16", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "float32", "auto", "float32", marks=pytest.mark.gpu),
        pytest.param("cuda:0", "auto", "auto", "bfloat16", marks=pytest.mark.gpu),
    ],
)
def test_what_is_computed_in(device, trained, asked, computed, monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(precision, "bfloat16_is_faster", lambda: True)
    changes = (f"training.precision={trained}", f"inference.precision={asked}")
    network = random_checkpoint(changes=changes)
    parallel = ParallelSettings(devices=(device,))
    placed = PlacedNetworks(Networks.of(network), parallel, Group(Ranks()))
    assert placed.precision == computed


# The mode


def mode_of(*devices, checkpoint=CHECKPOINT, window="auto", tta=False, ranks=None, **settings):
    parallel = ParallelSettings(devices=devices or None, **settings)
    networks = Networks.of(set_to(checkpoint, InferenceSettings(window=window, tta=tta)))
    chosen = choose_mode(parallel, networks, ranks or Ranks())
    assert chosen == parallel.model_copy(update={"mode": chosen.mode})
    return chosen.mode


def test_devices_of_one_kind_take_replicas_where_windows_fit():
    assert mode_of("cpu") == "none"
    assert mode_of(*["cpu"] * 4) == "data"
    assert mode_of(*["cpu"] * 4, checkpoint=BATCH_NORM) == "data"
    whole = replace(CHECKPOINT, patch_size=None)
    assert mode_of(*["cpu"] * 7, checkpoint=whole, window=(6, 6, 6)) == "data"
    assert mode_of(*["cpu"] * 7, window="whole") == "spatial"  # planes are not known yet
    assert mode_of(*["cpu"] * 7, checkpoint=whole) == "spatial"
    assert mode_of("cpu", "cpu", checkpoint=replace(BATCH_NORM, patch_size=None)) == "model"


def test_windows_too_large_for_a_device_are_cut_into_slabs_where_they_have_planes(monkeypatch):
    # For 4 channels: three maps in bfloat16; for each class the logits of two replicas in bfloat16,
    # separate and joined, and logits of one replica in float32.
    voxel_bytes = 3 * 4 * 2 + 3 * (4 * 2 + 4)
    memory = 4 * (4 * 16 * 16 * voxel_bytes)  # a quarter is for windows
    monkeypatch.setattr(placing, "device_bytes", lambda device: memory)
    assert mode_of("cpu", "cpu") == "data"
    assert mode_of("cpu", "cpu", window=(4, 16, 18)) == "spatial"
    monkeypatch.setattr(placing, "device_bytes", lambda device: memory - 4)
    assert mode_of("cpu", "cpu") == "spatial"
    assert mode_of(*["cpu"] * 4) == "spatial"
    assert mode_of(*["cpu"] * 5) == "model"
    assert mode_of(*["cpu"] * 5, window=(5, 16, 16)) == "spatial"  # padded to six planes
    assert mode_of("cpu", "cpu", checkpoint=BATCH_NORM) == "model"


def test_mirror_images_take_memory_too(monkeypatch):
    # In addition: the sum in float32, and the logits of an image, mirrored back.
    voxel_bytes = 3 * 4 * 2 + 3 * (4 * 2 + 4) + 3 * (4 + 2)
    memory = 4 * (4 * 16 * 16 * voxel_bytes)
    changes = ("patches.augmentation_details.mirror_axes=x",)
    mirrored = random_checkpoint(patch_size=(4, 16, 16), changes=changes)
    for less, mode in ((0, "data"), (4, "spatial")):
        monkeypatch.setattr(placing, "device_bytes", lambda device, less=less: memory - less)
        assert mode_of("cpu", "cpu", checkpoint=mirrored, tta=True) == mode
        assert mode_of("cpu", "cpu", checkpoint=mirrored) == "data"


@pytest.mark.parametrize("mode", ["none", "data", "model", "spatial"])
def test_a_mode_that_is_named_stays(mode):
    assert mode_of("cpu", "cpu", mode=mode) == mode


def test_several_ranks_have_a_slab_each():
    assert mode_of("cpu", "cpu", ranks=place(1, 2)) == "spatial"
    assert mode_of(ranks=place(0, 2), mode="spatial") == "spatial"
    assert mode_of(ranks=place(0, 2), mode="data") == "data"  # or each rank has its own scans
    for mode in ("none", "model"):
        with pytest.raises(ConfigError, match=f"2 ranks were started, but --parallel {mode} pred"):
            mode_of(ranks=place(0, 2), mode=mode)
