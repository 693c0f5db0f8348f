"""What plans say, and what of them is refused by name."""

import copy
from functools import reduce

import pytest

from tests.nnunet.models import FULLRES, KWARGS, PLANS
from unet3d.nnunet.plans import read_plan


def changed(*path, value):
    """Return the plans with one value replaced."""
    plans = copy.deepcopy(PLANS)
    *parents, name = path
    reduce(dict.get, parents, plans)[name] = value
    return plans


def test_a_plan_is_read():
    plan = read_plan(PLANS, "3d_fullres")
    assert (plan.patch_size, plan.spacing) == ((16, 32, 48), (3.0, 1.0, 0.5))
    assert plan.transpose_forward == (0, 2, 1)
    assert (plan.orientation, plan.use_mask_for_norm) == ("stored", (False, True))
    ct, other = plan.intensities
    assert (ct.mean, ct.std, ct.percentile_00_5, ct.percentile_99_5) == (40.5, 20.0, -100.0, 300.0)
    assert other is None
    network = plan.network
    assert network.has_biases and not network.is_residual
    assert (network.features, network.kernels[0]) == ((8, 16, 32), (1, 3, 3))
    assert network.strides == ((1, 1, 1), (1, 2, 2), (2, 2, 2))
    assert (network.units, network.decoder_units) == ((2, 2, 2), (2, 1))
    inheriting = read_plan(PLANS, "3d_lowres")
    assert (inheriting.spacing, inheriting.network) == ((4.0, 2.0, 1.0), network)


def test_one_number_stands_for_all_levels():
    path = ("configurations", "3d_fullres", "architecture", "arch_kwargs")
    kwargs = {**KWARGS, "n_conv_per_stage": 2, "kernel_sizes": 3, "n_conv_per_stage_decoder": 2}
    network = read_plan(changed(*path, value=kwargs), "3d_fullres").network
    assert (network.units, network.decoder_units) == ((2, 2, 2), (2, 2))
    assert network.kernels == ((3, 3, 3),) * 3


def test_plans_of_older_versions_are_read():
    old = {key: value for key, value in FULLRES.items() if key != "architecture"}
    old |= {
        "UNet_class_name": "ResidualEncoderUNet",
        "UNet_base_num_features": 32,
        "unet_max_num_features": 100,
        "n_conv_per_stage_encoder": [1, 3, 4],
        "n_conv_per_stage_decoder": [1, 1],
        "num_pool_per_axis": [1, 2, 2],
        "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    }
    network = read_plan(changed("configurations", "3d_fullres", value=old), "3d_fullres").network
    assert network.is_residual and network.has_biases
    assert (network.features, network.units) == ((32, 64, 100), (1, 3, 4))
    assert network.norm.eps == 1e-5


def of_network(key, value):
    path = ("configurations", "3d_fullres", "architecture", "arch_kwargs", key)
    return changed(*path, value=value)


def of_fullres(key, value):
    return changed("configurations", "3d_fullres", key, value=value)


@pytest.mark.parametrize(
    ("plans", "configuration", "message"),
    [
        (PLANS, "2d", "configuration 2d is 2-D"),
        (PLANS, "3d_cascade_fullres", "second stage of a cascade"),
        (PLANS, "4d", "has no configuration '4d'"),
        (PLANS, "circle", "inherits from itself"),
        ({}, "3d_fullres", "has no configurations"),
        (changed("image_reader_writer", value="EegIO"), "3d_fullres", "is 'EegIO'"),
        (changed("label_manager", value="Other"), "3d_fullres", "label_manager is 'Other'"),
        (changed("transpose_forward", value=[0, 1, 1]), "3d_fullres", "transpose_forward"),
        (of_fullres("preprocessor_name", "Mine"), "3d_fullres", "preprocessor_name is 'Mine'"),
        (of_fullres("resampling_fn_data", "torch"), "3d_fullres", "resampling_fn_data is 'torch'"),
        (of_fullres("normalization_schemes", ["Mine"]), "3d_fullres", "0 is 'Mine'; known are CTN"),
        (of_fullres("resampling_fn_data_kwargs", None), "3d_fullres", "data_kwargs is None"),
        (of_fullres("resampling_fn_data_kwargs", {"order": 2}), "3d_fullres", "order"),
        (of_fullres("use_mask_for_norm", [True]), "3d_fullres", "use_mask_for_norm is of 1"),
        (of_fullres("patch_size", [0, 32, 32]), "3d_fullres", "patch_size"),
        (of_fullres("spacing", [1.0, -1.0, 1.0]), "3d_fullres", "spacing"),
        (of_network("norm_op", "torch.nn.BatchNorm3d"), "3d_fullres", "norm_op is 'BatchNorm3d'"),
        (of_network("nonlin", "torch.nn.GELU"), "3d_fullres", "nonlin is 'GELU'"),
        (of_network("conv_op", "torch.nn.Conv2d"), "3d_fullres", "conv_op is 'Conv2d'"),
        (of_network("squeeze_excitation", True), "3d_fullres", "squeeze_excitation True"),
        (of_network("rotary\x1b[31m", 1), "3d_fullres", r"rotary\x1b[31m"),
        (of_network("strides", [[1, 1, 1], [2, 2, 2]]), "3d_fullres", "but strides is of 2"),
        (of_network("strides", [[2, 2, 2]] * 3), "3d_fullres", "begins with strides"),
        (of_network("norm_op_kwargs", {"affine": False}), "3d_fullres", "norm"),
        (of_network("features_per_stage", [8, 16, 2**20]), "3d_fullres", "features"),
    ],
)
def test_what_is_unknown_is_named(plans, configuration, message):
    with pytest.raises(ValueError) as caught:
        read_plan(plans, configuration)
    said = str(caught.value)
    assert message in said and "\n" not in said and "\x1b" not in said


def test_other_networks_are_named():
    path = ("configurations", "3d_fullres", "architecture", "network_class_name")
    for name in ("a.primus.Primus", "MedNeXt", "b.unet.ResidualUNet", None):
        with pytest.raises(ValueError, match=f"its network is a.*{str(name).rpartition('.')[2]}"):
            read_plan(changed(*path, value=name), "3d_fullres")


def test_statistics_of_a_ct_must_be_there_and_have_an_older_name():
    plans = copy.deepcopy(PLANS)
    known = plans.pop("foreground_intensity_properties_per_channel")
    plans["foreground_intensity_properties_by_modality"] = known
    assert read_plan(plans, "3d_fullres").intensities == read_plan(PLANS, "3d_fullres").intensities
    plans = changed("foreground_intensity_properties_per_channel", value={})
    with pytest.raises(ValueError, match="percentile_00_5 is missing"):
        read_plan(plans, "3d_fullres")


def test_without_a_word_slices_are_not_resampled_one_by_one():
    kwargs = {"is_seg": False, "order": 3, "order_z": 0}  # nnU-Net's function has False by default
    plan = read_plan(of_fullres("resampling_fn_data_kwargs", kwargs), "3d_fullres")
    assert plan.image_resampling.force_separate_z is False
    assert plan.logit_resampling.force_separate_z is None


def test_readers_have_their_axes():
    stored, turned = ("SimpleITKIO", "NibabelIO", "Tiff3DIO"), ("NibabelIO", "SimpleITKIO")
    for reader in (*stored, *(f"{name}WithReorient" for name in turned)):
        plan = read_plan(changed("image_reader_writer", value=reader), "3d_fullres")
        assert plan.orientation == ("stored" if reader in stored else "ras")
