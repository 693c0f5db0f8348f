"""What plans mean, and which plans are refused, with the name of the entry."""

import copy
from functools import reduce

import pytest

from tests.nnunet.models import FULLRES, PLANS, SLICES, TOPOLOGY
from unet3d.nnunet.plans import read_plan


def changed(*path, value):
    """Return the plans with one value replaced."""
    plans = copy.deepcopy(PLANS)
    *parents, name = path
    reduce(dict.get, parents, plans)[name] = value
    return plans


def plan_of(plans=PLANS, configuration="3d_fullres"):
    return read_plan(plans, configuration, 3)


def test_a_configuration_inherits_from_another():
    """Other entries of plans are tested in ``test_reading``."""
    plan = plan_of(configuration="3d_lowres")
    assert (plan.spacing_mm, plan.topology) == ((2.0, 1.0, 4.0), TOPOLOGY)


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
    topology = plan_of(changed("configurations", "3d_fullres", value=old)).topology
    assert topology.encoder == "residual" and topology.upsampling_bias
    assert (topology.channels, topology.units) == ((32, 64, 100), (1, 3, 4))
    assert (topology.strides[1], topology.kernels[0]) == ((2, 2, 1), (3, 3, 1))
    assert (topology.norm_eps, topology.negative_slope) == (1e-5, 0.01)


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
        (changed("image_reader_writer", value="EegIO"), "3d_fullres", "but is 'EegIO'"),
        (changed("transpose_forward", value=[0, 1, 1]), "3d_fullres", "transpose_forward"),
        (of_fullres("resampling_fn_data", "torch"), "3d_fullres", "resampling_fn_data must be"),
        (
            of_fullres("normalization_schemes", ["Mine"] * 2),
            "3d_fullres",
            "0 is 'Mine'; known are CTN",
        ),
        (
            of_fullres("resampling_fn_data_kwargs", {**SLICES, "order": 2}),
            "3d_fullres",
            "order must",
        ),
        (of_fullres("use_mask_for_norm", [True]), "3d_fullres", "use_mask_for_norm has 1"),
        (of_fullres("spacing", [1.0, -1.0, 1.0]), "3d_fullres", "spacing"),
        (of_network("norm_op", "torch.nn.BatchNorm3d"), "3d_fullres", "norm_op must be 'InstanceN"),
        (of_network("nonlin", "torch.nn.GELU"), "3d_fullres", "ReLU', but is 'GELU'"),
        (of_network("squeeze_excitation", True), "3d_fullres", "squeeze_excitation is unknown"),
        (of_network("rotary\x1b[31m", 1), "3d_fullres", r"rotary\x1b[31m is unknown"),
        (of_network("strides", [[1, 1, 1], [2, 2, 2]]), "3d_fullres", "3 levels but 2 strides"),
        (of_network("strides", [[2, 2, 2]] * 3), "3d_fullres", "the first must be (1, 1, 1)"),
        (of_network("norm_op_kwargs", {"affine": False}), "3d_fullres", "affine must be True, but"),
        (of_network("nonlin_kwargs", {"slope": 1}), "3d_fullres", "kwargs.slope is unknown"),
    ],
)
def test_what_is_unknown_is_named(plans, configuration, message):
    with pytest.raises(ValueError) as caught:
        plan_of(plans, configuration)
    said = str(caught.value)
    assert message in said and "\n" not in said and "\x1b" not in said


def test_other_networks_are_named():
    path = ("configurations", "3d_fullres", "architecture", "network_class_name")
    for name in ("a.primus.Primus", "MedNeXt", "b.unet.ResidualUNet", None):
        with pytest.raises(
            ValueError, match=f"network_class_name must .*{str(name).rpartition('.')[2]}"
        ):
            plan_of(changed(*path, value=name))


def test_statistics_of_a_ct_must_be_there_and_have_an_older_name():
    plans = copy.deepcopy(PLANS)
    known = plans.pop("foreground_intensity_properties_per_channel")
    plans["foreground_intensity_properties_by_modality"] = known
    assert plan_of(plans).channels == plan_of().channels
    plans = changed("foreground_intensity_properties_per_channel", value={})
    with pytest.raises(ValueError, match="percentile_00_5 is missing"):
        plan_of(plans)


def test_percentiles_of_a_ct_are_in_order():
    path = ("foreground_intensity_properties_per_channel", "0", "percentile_00_5")
    with pytest.raises(ValueError, match="of 301, above its percentile_99_5 of 300"):
        plan_of(changed(*path, value=301.0))
    assert plan_of(changed(*path, value=300.0)).channels[0].low == 300


def test_without_a_word_slices_are_not_resampled_one_by_one():
    plans = copy.deepcopy(PLANS)
    for what, order in (("data", 3), ("probabilities", 1)):
        kwargs = {"is_seg": False, "order": order, "order_z": 0}
        plans["configurations"]["3d_fullres"][f"resampling_fn_{what}_kwargs"] = kwargs
    # The default of nnU-Net's function is False.
    assert (plan_of(plans).interpolation.thick, plan_of().interpolation.thick) == ("never", "auto")
    with pytest.raises(ValueError, match="force_separate_z differs between images and logits"):
        plan_of(of_fullres("resampling_fn_data_kwargs", kwargs))


def test_readers_have_their_axes():
    stored, turned = ("SimpleITKIO", "NibabelIO", "Tiff3DIO"), ("NibabelIO", "SimpleITKIO")
    for reader in (*stored, *(f"{name}WithReorient" for name in turned)):
        plan = plan_of(changed("image_reader_writer", value=reader))
        assert plan.orientation == ("stored" if reader in stored else "ras")
