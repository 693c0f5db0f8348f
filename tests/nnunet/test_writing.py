"""Our networks as models of nnU-Net: the files that are written, and networks that cannot be."""

import errno
import json
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.networks import random_checkpoint
from tests.nnunet.models import TOPOLOGY, assert_equal, random_weights
from unet3d.atomic import HOST, REPLACED
from unet3d.datasets.labels import Region
from unet3d.errors import CheckpointError, ResultExistsError
from unet3d.model import UNet3d
from unet3d.nnunet.loading import load_network
from unet3d.nnunet.writing import write_model
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing

CT = ChannelNormalization(kind="ct", low=-100.0, high=300.0, mean=40.0, std=55.5)
GROUPS = replace(TOPOLOGY, norm="group", upsampling_bias=False)


def trained(**changes):
    """Return a checkpoint that nnU-Net can run, except for these changes of its preparation."""
    values = {
        "spacing_mm": (1.0, 0.5, 3.0),
        "channels": (CT, ChannelNormalization(kind="z-score-inside")),
        "channel_names": ("CT", "MRI"),
        "label_names": ("background", "organ", "lésion"),
        "label_values": (0, 1, 2),
        "crops_to_nonzero": True,
    }
    return replace(
        random_checkpoint(
            changes=("patches.augmentation_details.mirror_axes=[y,z]", "inference.overlap=0.5")
        ),
        topology=TOPOLOGY,
        patch_size=(32, 48, 16),
        preprocessing=Preprocessing(**{**values, **changes}),
        model=random_weights(),
    )


def test_plans_say_what_the_network_needs(tmp_path):
    write_model({0: trained()}, tmp_path / "model")
    plans = json.loads((tmp_path / "model/plans.json").read_text())
    assert plans["image_reader_writer"] == "NibabelIOWithReorient"
    configuration = plans["configurations"]["3d_fullres"]
    # In the order of nnU-Net's arrays: Z, Y, X.
    assert configuration["patch_size"] == [16, 48, 32]
    assert configuration["spacing"] == [3.0, 0.5, 1.0]
    assert configuration["normalization_schemes"] == ["CTNormalization", "ZScoreNormalization"]
    assert configuration["use_mask_for_norm"] == [False, True]
    of_image = configuration["resampling_fn_data_kwargs"]
    assert (of_image["order"], of_image["order_z"]) == (3, 1)
    known = plans["foreground_intensity_properties_per_channel"]["0"]
    assert (known["percentile_00_5"], known["mean"], known["std"]) == (-100.0, 40.0, 55.5)
    kwargs = configuration["architecture"]["arch_kwargs"]
    assert kwargs["kernel_sizes"][0] == [1, 3, 3]
    assert kwargs["strides"][1] == [1, 2, 2]
    assert kwargs["n_conv_per_stage_decoder"] == [2, 1]
    dataset = json.loads((tmp_path / "model/dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, "organ": 1, "lésion": 2}
    assert dataset["channel_names"] == {"0": "CT", "1": "MRI"}


def test_it_is_read_again(tmp_path):
    checkpoint = trained(ignore_value=3)
    write_model({0: checkpoint, 1: checkpoint}, tmp_path / "model")
    read = load_network(tmp_path / "model/fold_1/checkpoint_final.pth")
    for name in ("topology", "patch_size", "mirror_axes"):
        assert getattr(read, name) == getattr(checkpoint, name)
    wanted = checkpoint.preprocessing
    # nnU-Net clips resampled images to the original range, and has a smallest deviation.
    clips = replace(wanted.interpolation, clips=True)
    channels = (CT, replace(wanted.channels[1], least_std=1e-8))
    assert read.preprocessing == replace(wanted, interpolation=clips, channels=channels)
    assert_equal(read.model, checkpoint.model)


def of_regions(*values):
    """Return a network with regions."""
    regions = [Region(name=f"of {one}", values=one, written=n + 1) for n, one in enumerate(values)]
    topology = replace(TOPOLOGY, num_classes=2)
    weights = UNet3d(topology).state_dict()
    return replace(trained(regions=tuple(regions)), topology=topology, model=weights)


def test_regions_keep_their_order(tmp_path):
    checkpoint = of_regions((1, 2), (2,))
    write_model({0: checkpoint}, tmp_path / "model")
    dataset = json.loads((tmp_path / "model/dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, "of (1, 2)": [1, 2], "of (2,)": [2]}
    assert dataset["regions_class_order"] == [1, 2]
    read = load_network(tmp_path / "model/fold_0/checkpoint_final.pth")
    assert read.preprocessing.regions == checkpoint.preprocessing.regions


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (replace(trained(), patch_size=None), "this network was trained on whole volumes"),
        (trained(spacing_mm=None), "each image keeps its own spacing"),
        (trained(crops_to_nonzero=False), "it crops images to nonzero voxels"),
        (trained(label_values=(0, 1, 5)), "without a gap, but here they are 0, 1, 5"),
        (trained(ignore_value=7), "the highest label, 2, but here it is 7"),
        (replace(trained(), topology=GROUPS), "this network has group"),
    ],
)
def test_what_nnunet_cannot_do_is_refused(tmp_path, checkpoint, message):
    with pytest.raises(CheckpointError) as caught:
        write_model({0: checkpoint}, tmp_path / "model")
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_folds_with_and_without_a_least_deviation_are_of_one_training(tmp_path):
    known = ChannelNormalization(kind="z-score-inside", least_std=1e-8)
    write_model({0: trained(), 1: trained(channels=(CT, known))}, tmp_path / "model")
    other = trained(channels=(CT, ChannelNormalization(kind="z-score")))
    with pytest.raises(CheckpointError, match="network 1 differs from the first; name folds of"):
        write_model({0: trained(), 1: other}, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine").touch()
    with pytest.raises(ResultExistsError, match="exists, but is not the folder of a model"):
        write_model({0: trained()}, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine"]


def test_a_model_that_a_killed_process_was_replacing_is_there_again(tmp_path):
    aside = tmp_path / f"{REPLACED}{HOST}{'0' * 24}"
    write_model({3: trained()}, aside / "model")
    with pytest.raises(ResultExistsError, match="model exists; add --overwrite to replace it"):
        write_model({0: trained()}, tmp_path / "model")
    assert (tmp_path / "model/fold_3/checkpoint_final.pth").is_file() and not aside.exists()


def test_a_model_that_cannot_be_replaced_is_kept(tmp_path, monkeypatch):
    write_model({0: trained()}, tmp_path / "model")
    with pytest.raises(CheckpointError, match="each image keeps its own spacing"):
        write_model({3: trained(spacing_mm=None)}, tmp_path / "model", overwrite=True)

    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="cannot write .*: No space left on device; choose"):
        write_model({3: trained()}, tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model/fold_0/checkpoint_final.pth").is_file()


def test_preparations_are_read_again(tmp_path):
    kinds = ("z-score", "z-score-inside", "rescale", "rgb", "none")
    others = [ChannelNormalization(kind=kind, least_std=1e-8) for kind in kinds]
    for thick, orientation, across, reader in (
        ("auto", "ras", 1, "NibabelIOWithReorient"),
        ("always", "stored", 0, "SimpleITKIO"),
        ("never", "stored", 1, "SimpleITKIO"),
    ):
        how = Interpolation(thick=thick, clips=True, across_slices=across)
        for other in others:
            checkpoint = trained(orientation=orientation, channels=(CT, other), interpolation=how)
            write_model({0: checkpoint}, tmp_path / "model", overwrite=True)
            plans = json.loads((tmp_path / "model/plans.json").read_text())
            assert plans["image_reader_writer"] == reader
            read = load_network(tmp_path / "model/fold_0/checkpoint_final.pth", "description")
            assert read.preprocessing == checkpoint.preprocessing
