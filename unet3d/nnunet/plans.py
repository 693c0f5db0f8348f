"""What ``plans.json`` says of a model: its network, and how its images are prepared.

Only what decides a segmentation is looked at. What this package cannot do as nnU-Net does it is
refused by name. Axes of the plan become those of a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unet3d.config import Shape, Spacing
from unet3d.inputs.plain_data import at_most, printable, shown, validated
from unet3d.model import Topology
from unet3d.model.topology import MOST_LEVELS, stated_kernels
from unet3d.nnunet.axes import Axes
from unet3d.nnunet.terms import PLAIN_NETWORK, READERS, RESAMPLING, RESIDUAL_NETWORK, SCHEMES, THICK
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation

MAX_INHERITED = 16
"""Configurations that one may be made of."""

LEAST_STD = 1e-8
"""What nnU-Net divides intensities by at least."""

Number = Annotated[float, Field(ge=-1e38, le=1e38)]
Axis = Annotated[int, Field(ge=0, le=2, strict=True)]


class _Intensities(BaseModel):
    """Statistics of the labelled voxels of a CT."""

    model_config = ConfigDict(allow_inf_nan=False)

    mean: Number
    std: Annotated[float, Field(ge=0, le=1e38)]
    percentile_00_5: Number
    percentile_99_5: Number

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.percentile_00_5 > self.percentile_99_5:
            raise ValueError(
                f"has a percentile_00_5 of {self.percentile_00_5:g}, above its percentile_99_5 of "
                f"{self.percentile_99_5:g}"
            )
        return self


class _Images(BaseModel):
    """What a plan says of images and of patches, along its own axes."""

    patch_size: Shape
    spacing: Spacing
    transpose_forward: tuple[Axis, Axis, Axis]
    normalization_schemes: Annotated[tuple[str, ...], Field(min_length=1), at_most(2**14)]
    use_mask_for_norm: Annotated[tuple[bool, ...], at_most(2**14)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration of a plan, with what the plan says of all of them, by a file's axes."""

    axes: Axes
    """The order of the plan's axes."""
    patch_size: Shape
    spacing_mm: Spacing
    channels: tuple[ChannelNormalization, ...]
    interpolation: Interpolation
    orientation: Literal["stored", "ras"]
    topology: Topology


def read_plan(plans: Mapping[str, Any], configuration: str, num_classes: int) -> Plan:
    """Return what a plan says of one of its configurations, such as ``3d_fullres``.

    Classes are the channels of the network's logits. Raises ValueError, in one line, where the plan
    cannot be understood, or needs something that this package does not do.
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
    schemes, masks = found.get("normalization_schemes"), found.get("use_mask_for_norm")
    if masks is None and isinstance(schemes, list | tuple):
        masks = [False] * len(schemes)
    said = validated(
        _Images,
        {
            "patch_size": size,
            "spacing": found.get("spacing"),
            "transpose_forward": plans.get("transpose_forward", (0, 1, 2)),
            "normalization_schemes": schemes,
            "use_mask_for_norm": masks,
        },
    )
    if sorted(said.transpose_forward) != [0, 1, 2]:
        raise ValueError(
            f"transpose_forward is {shown(said.transpose_forward)}; it needs each axis"
        )
    axes, channels = Axes.of(said.transpose_forward), _channels(plans, said)
    counts = {"in_channels": len(channels), "num_classes": num_classes}
    topology = validated(Topology, {**counts, **_network(found, axes)})
    size = axes.from_network(said.patch_size)
    for axis, voxels, step in zip("XYZ", size, topology.total_stride, strict=True):
        if voxels % step:
            raise ValueError(
                f"its patch has {voxels} voxels along {axis}, which its strides of {step} do not "
                "divide"
            )
    return Plan(
        axes=axes,
        patch_size=size,
        spacing_mm=axes.from_network(said.spacing),
        channels=channels,
        interpolation=_interpolation(found),
        orientation=READERS[reader],
        topology=replace(topology, kernels=stated_kernels(topology.kernels)),
    )


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


def _channels(plans: Mapping[str, Any], said: _Images) -> tuple[ChannelNormalization, ...]:
    schemes, masks = said.normalization_schemes, said.use_mask_for_norm
    if len(masks) != len(schemes):
        raise ValueError(
            f"use_mask_for_norm is of {len(masks)} channels, but normalization_schemes of "
            f"{len(schemes)}"
        )
    key = "foreground_intensity_properties_per_channel"
    statistics = plans.get(key, plans.get("foreground_intensity_properties_by_modality"))
    statistics = statistics if isinstance(statistics, dict) else {}
    channels = []
    for channel, (scheme, is_masked) in enumerate(zip(schemes, masks, strict=True)):
        kind = SCHEMES.get((scheme, is_masked)) or SCHEMES.get((scheme, False))
        if kind is None:
            known = ", ".join(dict.fromkeys(name for name, _ in SCHEMES))
            raise ValueError(
                f"normalization_schemes.{channel} is {shown(scheme)}; known are {known}"
            )
        if kind != "ct":
            channels.append(ChannelNormalization(kind=kind, least_std=LEAST_STD))
            continue
        ct = validated(_Intensities, statistics.get(str(channel), {}))
        channels.append(
            ChannelNormalization(
                kind=kind,
                low=ct.percentile_00_5,
                high=ct.percentile_99_5,
                mean=ct.mean,
                std=max(ct.std, LEAST_STD),
            )
        )
    return tuple(channels)


_ANY = None
"""Values of an argument that changes nothing in a prediction, or is read elsewhere."""

_NEEDED = {"conv_op": "Conv3d", "norm_op": "InstanceNorm3d", "nonlin": "LeakyReLU"}
_RESAMPLING = {"is_seg": (False,), "order": _ANY, "order_z": _ANY, "force_separate_z": _ANY}
_NORM = {"affine": (True,), "track_running_stats": (False,), "momentum": _ANY, "eps": _ANY}
_ACTIVATION = {"inplace": _ANY, "negative_slope": _ANY}
_NETWORK: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("n_stages", "features_per_stage", "kernel_sizes", "strides"), _ANY),
    **dict.fromkeys(("n_conv_per_stage", "n_blocks_per_stage", "n_conv_per_stage_decoder"), _ANY),
    **dict.fromkeys(("conv_bias", "norm_op_kwargs", "nonlin_kwargs", "dropout_op"), _ANY),
    **dict.fromkeys(("dropout_op_kwargs", "deep_supervision", "stochastic_depth_p"), _ANY),
    "squeeze_excitation_reduction_ratio": _ANY,
    **{key: (value,) for key, value in _NEEDED.items()},
    "nonlin_first": (False, None),
    "pool": ("conv",),
    "pool_type": ("conv",),
    "block": ("BasicBlockD", None),
    "bottleneck_channels": (None,),
    "squeeze_excitation": (False, None),
    "disable_default_stem": (False, None),
    "stem_channels": (None,),
}
"""Arguments of nnU-Net's functions, and the values of them that this package can do."""


def _arguments(
    what: str,
    given: Any,
    known: Mapping[str, tuple[Any, ...] | None],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Return arguments with defaults, and refuse what is not known."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {shown(given)}; it needs names and values")
    arguments = {**defaults, **given}
    for key, value in arguments.items():
        values = known.get(key, ())
        if values is not _ANY and _last(value) not in values:
            instead = f"; only {values[0]} is known" if values else ", which is not known"
            raise ValueError(f"{printable(key)} is {shown(_last(value))} in {what}{instead} here")
    return arguments


def _interpolation(found: Mapping[str, Any]) -> Interpolation:
    usual = {"order": 3, "order_z": 0, "force_separate_z": False}
    images, logits = (
        _arguments(name, found.get(name), _RESAMPLING, usual)
        for name in ("resampling_fn_data_kwargs", "resampling_fn_probabilities_kwargs")
    )
    if logits["order"] != 1:
        raise ValueError(
            f"logits are resampled with order {shown(logits['order'])}; only 1 is known here"
        )
    thick = images["force_separate_z"]
    if thick != logits["force_separate_z"]:
        raise ValueError("force_separate_z differs between images and logits")
    if not isinstance(thick, bool | None):
        raise ValueError(f"force_separate_z is {shown(thick)}; it needs true, false or null")
    return validated(
        Interpolation,
        {
            "order": images["order"],
            "thick": THICK[thick],
            "across_slices": images["order_z"],
            "logits_across_slices": logits["order_z"],
            "clips": True,
        },
    )


def _network(found: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return fields of a topology, which are still to be validated."""
    architecture = found.get("architecture")
    if architecture is None:
        architecture = _old_architecture(found)
    given = architecture.get("arch_kwargs") if isinstance(architecture, dict) else None
    if not isinstance(given, dict):
        raise ValueError("architecture is not one of nnU-Net's")
    name = _last(architecture.get("network_class_name"))
    if name not in (PLAIN_NETWORK, RESIDUAL_NETWORK):
        raise ValueError(
            f"its network is a {shown(name)}; known are {PLAIN_NETWORK} and {RESIDUAL_NETWORK}"
        )
    features = _per_level(given.get("features_per_stage"), given.get("n_stages"))
    levels = len(features)
    if given.get("stem_channels") in features[:1]:
        given = {**given, "stem_channels": None}
    kwargs = _arguments("its network", given, _NETWORK, dict.fromkeys(_NEEDED))
    norm = kwargs.get("norm_op_kwargs") or {}
    norm = _arguments("norm_op_kwargs", norm, _NORM, {"affine": False, "eps": 1e-5})
    activation = kwargs.get("nonlin_kwargs") or {}
    activation = _arguments("nonlin_kwargs", activation, _ACTIVATION, {"negative_slope": 0.01})
    units = kwargs.get("n_conv_per_stage" if name == PLAIN_NETWORK else "n_blocks_per_stage")
    return {
        "encoder": "plain" if name == PLAIN_NETWORK else "residual",
        "channels": features,
        "strides": _triples("strides", kwargs.get("strides"), levels, axes),
        "kernels": _triples("kernel_sizes", kwargs.get("kernel_sizes"), levels, axes),
        "units": _per_level(units, levels),
        "decoder_units": _per_level(kwargs.get("n_conv_per_stage_decoder"), levels - 1)[::-1],
        "upsampling_bias": bool(kwargs.get("conv_bias", False)),
        "norm": "instance",
        "norm_eps": norm["eps"],
        "negative_slope": activation["negative_slope"],
        "deep_supervision": True,
    }


def _old_architecture(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network of plans of nnU-Net before 2.4 in the words of later ones."""
    units = found.get("n_conv_per_stage_encoder")
    base, most = found.get("UNet_base_num_features"), found.get("unet_max_num_features")
    if not isinstance(units, list) or type(base) is not int or type(most) is not int:
        raise ValueError("plans.json describes no network")
    return {
        "network_class_name": found.get("UNet_class_name"),
        "arch_kwargs": {
            **_NEEDED,
            "features_per_stage": [min(base * 2**level, most) for level in range(len(units[:32]))],
            "strides": found.get("pool_op_kernel_sizes"),
            "kernel_sizes": found.get("conv_kernel_sizes"),
            "n_conv_per_stage": units,
            "n_blocks_per_stage": units,
            "n_conv_per_stage_decoder": found.get("n_conv_per_stage_decoder"),
            "conv_bias": True,
            "norm_op_kwargs": {"affine": True},
        },
    }


def _last(name: object) -> object:
    """Return a class's name without the modules that it is in."""
    return name.rpartition(".")[2] if isinstance(name, str) else name


def _per_level(value: Any, levels: Any) -> Sequence[Any]:
    """Return what is said once for all levels, or for each of them."""
    if isinstance(value, list | tuple):
        return value
    if type(levels) is not int or not 0 < levels <= MOST_LEVELS:
        raise ValueError(f"its network has no number of levels from 1 to {MOST_LEVELS}")
    return [value] * levels


def _triples(what: str, value: Any, levels: int, axes: Axes) -> list[Any]:
    """Return a number for each axis of a file, at each level."""
    triples = []
    for one in _per_level(value, levels):
        triple = [one] * 3 if type(one) is int else one
        if not isinstance(triple, list | tuple) or len(triple) != 3:
            raise ValueError(f"its network has {what} of {shown(one)}; they need three numbers")
        triples.append(axes.from_network(triple))
    return triples
