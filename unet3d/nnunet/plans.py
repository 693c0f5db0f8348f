"""What ``plans.json`` says of a model: its network, and how its images are prepared.

Only what decides a segmentation is looked at. What this package cannot do as nnU-Net does it is
refused by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from unet3d.inputs.plain_data import at_most, printable, shown, validated
from unet3d.nnunet.terms import PLAIN_NETWORK, READERS, RESAMPLING, RESIDUAL_NETWORK, SCHEMES

MAX_INHERITED = 16
"""Configurations that one may be made of."""

Size = Annotated[int, Field(ge=1, le=2**16, strict=True)]
Length = Annotated[float, Field(gt=0, le=1e6)]
Number = Annotated[float, Field(ge=-1e38, le=1e38)]
Triple = tuple[Size, Size, Size]
Levels = Annotated[tuple[Size, ...], at_most(16)]
Axis = Annotated[int, Field(ge=0, le=2, strict=True)]


def _known_scheme(name: str) -> str:
    known = dict.fromkeys(scheme for scheme, _ in SCHEMES)
    if name not in known:
        raise ValueError(f"is {shown(name)}; known are {', '.join(known)}")
    return name


Scheme = Annotated[str, Field(strict=True), AfterValidator(_known_scheme)]

_OPEN = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True)


class Intensities(BaseModel):
    """Statistics of the labelled voxels of a channel."""

    model_config = _OPEN

    mean: Number
    std: Annotated[float, Field(ge=0, le=1e38)]
    percentile_00_5: Number
    percentile_99_5: Number


class ResamplingArguments(BaseModel):
    """How arrays are resampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    is_seg: Literal[False] = False
    order: Literal[1, 3] = 3
    order_z: Literal[0, 1] = 0
    force_separate_z: bool | None = False  # where nothing is said; None: where slices are thick


class NormArguments(BaseModel):
    """How features are normalised."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eps: Annotated[float, Field(gt=0, le=1)] = 1e-5
    affine: Literal[True]
    momentum: float = 0.1
    track_running_stats: Literal[False] = False


class ActivationArguments(BaseModel):
    """What follows a normalisation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    negative_slope: Annotated[float, Field(ge=0, le=1)] = 0.01
    inplace: bool = True


class Network(BaseModel):
    """The shape of a network; arguments that only matter in training are left out."""

    model_config = _OPEN

    is_residual: bool
    features: Levels
    strides: Annotated[tuple[Triple, ...], at_most(16)]
    kernels: Annotated[tuple[Triple, ...], at_most(16)]
    units: Levels
    """Convolutions, or residual blocks, of each level."""
    decoder_units: Levels
    """Convolutions of each level of the decoder, the lowest first."""
    has_biases: bool
    norm: NormArguments
    activation: ActivationArguments


class Plan(BaseModel):
    """One configuration of a plan, with what the plan says of all of them."""

    model_config = _OPEN

    patch_size: Triple
    spacing: tuple[Length, Length, Length]
    normalization_schemes: Annotated[tuple[Scheme, ...], Field(min_length=1), at_most(2**14)]
    use_mask_for_norm: Annotated[tuple[bool, ...], at_most(2**14)]
    image_resampling: ResamplingArguments
    logit_resampling: ResamplingArguments
    intensities: tuple[Intensities | None, ...]
    """Of each channel, where its normalisation needs them."""
    transpose_forward: tuple[Axis, Axis, Axis]
    orientation: Literal["stored", "ras"]
    network: Network


def read_plan(plans: Mapping[str, Any], configuration: str) -> Plan:
    """Return what a plan says of one of its configurations.

    Args:
        plans: The content of ``plans.json``.
        configuration: Its name, such as ``3d_fullres``.

    Raises:
        ValueError: It cannot be understood, or needs something that this package does not do; one
            line that names it.
    """
    found = _configuration(plans, configuration)
    size = found.get("patch_size")
    if isinstance(size, list | tuple) and len(size) == 2:
        raise ValueError(f"configuration {printable(configuration)} is 2-D; use one that is 3-D")
    if found.get("previous_stage"):
        raise ValueError(
            f"configuration {printable(configuration)} is the second stage of a cascade, which "
            "reads the segmentation of the first; use 3d_fullres or 3d_lowres"
        )
    for key, wanted in (
        ("preprocessor_name", "DefaultPreprocessor"),
        ("resampling_fn_data", RESAMPLING),
        ("resampling_fn_probabilities", RESAMPLING),
    ):
        _refuse_other(key, found.get(key, wanted), wanted)
    _refuse_other("label_manager", plans.get("label_manager", "LabelManager"), "LabelManager")
    reader = plans.get("image_reader_writer", "SimpleITKIO")
    if not isinstance(reader, str) or reader not in READERS:
        raise ValueError(
            f"image_reader_writer is {shown(reader)}; images can be read as {', '.join(READERS)} do"
        )
    schemes = found.get("normalization_schemes")
    if not isinstance(schemes, list | tuple):
        schemes = []
    masks = found.get("use_mask_for_norm")
    plan = validated(
        Plan,
        {
            "patch_size": found.get("patch_size"),
            "spacing": found.get("spacing"),
            "normalization_schemes": schemes,
            "use_mask_for_norm": [False] * len(schemes) if masks is None else masks,
            "image_resampling": _arguments(found, "resampling_fn_data_kwargs"),
            "logit_resampling": _arguments(found, "resampling_fn_probabilities_kwargs"),
            "intensities": _intensities(plans, schemes),
            "transpose_forward": plans.get("transpose_forward", (0, 1, 2)),
            "orientation": READERS[reader],
            "network": _network(found),
        },
    )
    if sorted(plan.transpose_forward) != [0, 1, 2]:
        raise ValueError(
            f"transpose_forward is {shown(plan.transpose_forward)}; it needs each axis"
        )
    if len(plan.use_mask_for_norm) != len(plan.normalization_schemes):
        raise ValueError(
            f"use_mask_for_norm is of {len(plan.use_mask_for_norm)} channels, but "
            f"normalization_schemes of {len(plan.normalization_schemes)}"
        )
    _levels_agree(plan.network)
    return plan


def _configuration(plans: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with what it inherits."""
    configurations = plans.get("configurations")
    if not isinstance(configurations, dict):
        raise ValueError("plans.json has no configurations")
    found: dict[str, Any] = {}
    wanted: Any = name
    for _ in range(MAX_INHERITED):
        one = configurations.get(wanted) if isinstance(wanted, str) else None
        if not isinstance(one, dict):
            raise ValueError(f"plans.json has no configuration {shown(wanted)}")
        found = {**one, **found}
        wanted = one.get("inherits_from")
        if wanted is None:
            return found
    raise ValueError(f"configuration {printable(name)} inherits from itself")


def _refuse_other(key: str, found: object, wanted: str) -> None:
    if found != wanted:
        raise ValueError(f"{key} is {shown(found)}; only {wanted} is known here")


def _arguments(found: Mapping[str, Any], key: str) -> Any:
    if not isinstance(found.get(key), dict):
        raise ValueError(f"{key} is {shown(found.get(key))}; it needs names and values")
    return found[key]


def _intensities(plans: Mapping[str, Any], schemes: Sequence[Any]) -> list[Any]:
    """Return the statistics of channels of CTs."""
    key = "foreground_intensity_properties_per_channel"
    known = plans.get(key, plans.get("foreground_intensity_properties_by_modality"))
    known = known if isinstance(known, dict) else {}
    return [
        known.get(str(channel), {}) if scheme == "CTNormalization" else None
        for channel, scheme in enumerate(schemes)
    ]


_IGNORED = {
    *("conv_op", "norm_op", "nonlin", "dropout_op", "dropout_op_kwargs", "n_stages"),
    *("deep_supervision", "stochastic_depth_p", "squeeze_excitation_reduction_ratio"),
    *("features_per_stage", "kernel_sizes", "strides", "n_conv_per_stage", "n_blocks_per_stage"),
    *("n_conv_per_stage_decoder", "conv_bias", "norm_op_kwargs", "nonlin_kwargs"),
}
"""Arguments that are read elsewhere, or that change nothing in a prediction."""

_USUAL: Mapping[str, tuple[Any, ...]] = {
    "nonlin_first": (False, None),
    "pool": ("conv",),
    "pool_type": ("conv",),
    "block": ("BasicBlockD", None),
    "bottleneck_channels": (None,),
    "squeeze_excitation": (False, None),
    "disable_default_stem": (False, None),
    "stem_channels": (None,),
}
"""Other arguments, and the values of them that this package can do."""


def _network(found: Mapping[str, Any]) -> dict[str, Any]:
    architecture = found.get("architecture")
    if architecture is None:
        return _old_network(found)
    if not isinstance(architecture, dict) or not isinstance(architecture.get("arch_kwargs"), dict):
        raise ValueError("architecture is not one of nnU-Net's")
    kwargs = architecture["arch_kwargs"]
    is_residual = _is_residual(architecture.get("network_class_name"))
    for key, wanted in (
        ("conv_op", "Conv3d"),
        ("norm_op", "InstanceNorm3d"),
        ("nonlin", "LeakyReLU"),
    ):
        _refuse_other(key, _last(kwargs.get(key)), wanted)
    features = _per_level(kwargs.get("features_per_stage"), kwargs.get("n_stages"))
    for key, value in kwargs.items():
        usual = _USUAL.get(key)
        is_usual = usual is not None and _last(value) in usual
        if key in _IGNORED or is_usual or (key == "stem_channels" and value == features[0]):
            continue
        raise ValueError(
            f"its network has {printable(key)} {shown(value)}, which is not known here"
        )
    levels = len(features)
    units = kwargs.get("n_blocks_per_stage" if is_residual else "n_conv_per_stage")
    return {
        "is_residual": is_residual,
        "features": features,
        "strides": [_triple(one) for one in _per_level(kwargs.get("strides"), levels)],
        "kernels": [_triple(one) for one in _per_level(kwargs.get("kernel_sizes"), levels)],
        "units": _per_level(units, levels),
        "decoder_units": _per_level(kwargs.get("n_conv_per_stage_decoder"), levels - 1),
        "has_biases": bool(kwargs.get("conv_bias", False)),
        "norm": kwargs.get("norm_op_kwargs") or {"affine": False},
        "activation": kwargs.get("nonlin_kwargs") or {},
    }


def _old_network(found: Mapping[str, Any]) -> dict[str, Any]:
    """Read the network of plans of nnU-Net before 2.4."""
    units = found.get("n_conv_per_stage_encoder")
    levels = len(units) if isinstance(units, list) else 0
    base, most = found.get("UNet_base_num_features"), found.get("unet_max_num_features")
    if not 0 < levels <= 16 or type(base) is not int or type(most) is not int:
        raise ValueError("plans.json describes no network")
    return {
        "is_residual": _is_residual(found.get("UNet_class_name")),
        "features": [min(base * 2**level, most) for level in range(levels)],
        "strides": found.get("pool_op_kernel_sizes"),
        "kernels": found.get("conv_kernel_sizes"),
        "units": units,
        "decoder_units": found.get("n_conv_per_stage_decoder"),
        "has_biases": True,
        "norm": {"eps": 1e-5, "affine": True},
        "activation": {},
    }


def _is_residual(name: object) -> bool:
    last = _last(name)
    if last not in (PLAIN_NETWORK, RESIDUAL_NETWORK):
        raise ValueError(
            f"its network is a {shown(last)}; known are {PLAIN_NETWORK} and {RESIDUAL_NETWORK}"
        )
    return bool(last == RESIDUAL_NETWORK)


def _last(name: object) -> object:
    """Return a class's name without the modules that it is in."""
    return name.rpartition(".")[2] if isinstance(name, str) else name


def _per_level(value: Any, levels: Any) -> list[Any]:
    """Return what is said once for all levels, or for each of them."""
    if isinstance(value, list | tuple):
        return list(value)
    if type(levels) is not int or not 0 < levels <= 16:
        raise ValueError("its network has no number of levels from 1 to 16")
    return [value] * levels


def _triple(value: Any) -> Any:
    return [value] * 3 if type(value) is int else value


def _levels_agree(network: Network) -> None:
    """Refuse a network whose levels do not belong together."""
    counts = {
        "strides": len(network.strides),
        "kernel_sizes": len(network.kernels),
        "n_conv_per_stage": len(network.units),
        "n_conv_per_stage_decoder": len(network.decoder_units) + 1,
    }
    levels = len(network.features)
    for key, count in counts.items():
        if count != levels or levels < 2:
            raise ValueError(f"its network has {levels} levels, but {key} is of {count}")
    if math.prod(network.strides[0]) != 1:
        raise ValueError(
            f"its network begins with strides {shown(network.strides[0])}; known are networks that "
            "begin at full resolution"
        )
