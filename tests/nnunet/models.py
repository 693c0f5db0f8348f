"""A model of nnU-Net, in its own files, with random weights."""

import copy
import json
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from unet3d.model import Topology, UNet3d
from unet3d.nnunet.weights import inverse_of, order_of, reordered, to_nnunet, with_all_names

KWARGS = {
    "n_stages": 3,
    "features_per_stage": [8, 16, 32],
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
    "n_conv_per_stage": [2, 2, 2],
    "n_conv_per_stage_decoder": [2, 1],
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "dropout_op": None,
    "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}
ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": KWARGS,
    "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
}
SLICES = {"is_seg": False, "order_z": 0, "force_separate_z": None}
FULLRES = {
    "preprocessor_name": "DefaultPreprocessor",
    "patch_size": [16, 32, 48],
    "spacing": [3.0, 1.0, 0.5],
    "normalization_schemes": ["CTNormalization", "ZScoreNormalization"],
    "use_mask_for_norm": [False, True],
    "resampling_fn_data": "resample_data_or_seg_to_shape",
    "resampling_fn_data_kwargs": {"order": 3, **SLICES},
    "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
    "resampling_fn_probabilities_kwargs": {"order": 1, **SLICES},
    "architecture": ARCHITECTURE,
    "batch_dice": True,
}
PLANS = {
    "dataset_name": "Dataset001_Phantoms",
    "transpose_forward": [0, 2, 1],
    "transpose_backward": [0, 2, 1],
    "image_reader_writer": "SimpleITKIO",
    "label_manager": "LabelManager",
    "foreground_intensity_properties_per_channel": {
        "0": {
            **{"mean": 40.5, "std": 20.0, "median": 41.0, "min": -900.0, "max": 2000.0},
            **{"percentile_00_5": -100.0, "percentile_99_5": 300.0},
        }
    },
    "configurations": {
        "2d": {"patch_size": [32, 48], "spacing": [1.0, 0.5]},
        "3d_fullres": FULLRES,
        "3d_lowres": {"inherits_from": "3d_fullres", "spacing": [4.0, 2.0, 1.0]},
        "3d_cascade_fullres": {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"},
        "circle": {"inherits_from": "circle"},
    },
}

DATASET = {
    "channel_names": {"0": "CT", "1": "MRI"},
    "labels": {"background": 0, "organ": 1, "lésion": 2},
    "numTraining": 3,
    "file_ending": ".nii.gz",
}

TRANSPOSE_FORWARD = (0, 2, 1)

TOPOLOGY = Topology(
    in_channels=2,
    num_classes=3,
    channels=(8, 16, 32),
    strides=((1, 1, 1), (2, 2, 1), (2, 2, 2)),
    kernels=((3, 3, 1), (3, 3, 3), (3, 3, 3)),
    units=(2, 2, 2),
    decoder_units=(1, 2),
    deep_supervision=True,
    upsampling_bias=True,
)
"""The network of the plans, along the axes X, Y, Z of a file."""


def random_weights(seed=0):
    """Return random parameters for our version of the network."""
    torch.manual_seed(seed)
    network = UNet3d(TOPOLOGY)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.state_dict()


def assert_equal(found, expected):
    """Check that weights have the same names and values."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def content_of(seed=0, fold=0):
    """Return the content of nnU-Net's checkpoint after some epochs on a GPU."""
    axes = order_of(TRANSPOSE_FORWARD)
    weights = with_all_names(to_nnunet(random_weights(seed), TOPOLOGY, axes), has_biases=True)
    return {
        "network_weights": weights,
        "optimizer_state": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
        "grad_scaler_state": {"scale": 65536.0, "_growth_tracker": 3},
        "logging": {
            "mean_fg_dice": [np.float64(0.5), np.float32(0.25)],
            "dice_per_class_or_region": [[np.float32(0.5), np.float32(0.0)]],
            "epoch_end_timestamps": [1.5, 2.5],
        },
        "_best_ema": np.float64(0.375),
        "current_epoch": 3,
        "init_args": {
            "plans": copy.deepcopy(PLANS),
            "configuration": "3d_fullres",
            "fold": fold,
            "dataset_json": copy.deepcopy(DATASET),
            "device": torch.device("cuda", 0),
        },
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 2),
    }


def write_model(folder, *folds):
    """Write the folder of a model; each fold has its own weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps(PLANS))
    (folder / "dataset.json").write_text(json.dumps(DATASET))
    for seed, fold in enumerate(folds):
        (folder / f"fold_{fold}").mkdir()
        torch.save(content_of(seed, fold), folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder


def archive_of(folder, path, prefix="Dataset001_Phantoms/"):
    """Write an archive as nnU-Net's export writes it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{prefix}{file.relative_to(folder.parent)}")
    return path


def their_network(topology, axes):
    """Return nnU-Net's own network for a topology, with the axes in another order."""
    architectures = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    back = inverse_of(axes)
    is_residual = topology.encoder == "residual"
    levels = range(topology.num_levels)
    kind = architectures.ResidualEncoderUNet if is_residual else architectures.PlainConvUNet
    return kind(
        topology.in_channels,
        topology.num_levels,
        topology.channels,
        nn.Conv3d,
        [reordered(topology.kernel(level), back) for level in levels],
        [reordered(stride, back) for stride in topology.strides],
        [topology.num_units(level) for level in levels],
        topology.num_classes,
        [topology.num_decoder_units(level) for level in reversed(levels[:-1])],
        conv_bias=topology.upsampling_bias,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": topology.norm_eps, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"negative_slope": topology.negative_slope},
    )
