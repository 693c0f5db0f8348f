"""The network and preparation that ``plans.json`` of a model describes.

Only entries that affect segmentations are read. Options that unet3d cannot reproduce are refused by
name. The plan's axes are converted to the order of a file's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field

from unet3d.config import Shape, Spacing
from unet3d.errors import counted
from unet3d.inputs.plain_data import at_most, printable, shown, validated
from unet3d.model import Topology
from unet3d.model.topology import MOST_LEVELS, stated_kernels
from unet3d.nnunet.weights import Order, order_of, reordered
from unet3d.preparation.normalization import ChannelNormalization, Kind
from unet3d.preparation.resample import Interpolation

LEAST_STD = 1e-8
"""Smallest standard deviation by which nnU-Net divides intensities."""

SCHEMES: Mapping[tuple[str, bool], Kind] = {
    ("CTNormalization", False): "ct",
    ("ZScoreNormalization", False): "z-score",
    ("ZScoreNormalization", True): "z-score-inside",
    ("NoNormalization", False): "none",
    ("RescaleTo01Normalization", False): "rescale",
    ("RGBTo01Normalization", False): "rgb",
}
"""The normalisation for each scheme of nnU-Net, by its name and whether it uses a mask. Schemes
without a masked variant ignore the mask, as in nnU-Net."""

THICK: Mapping[bool | None, Literal["auto", "always", "never"]] = {
    None: "auto",
    True: "always",
    False: "never",
}
"""When slices are resampled one by one, for each value of ``force_separate_z``."""

Level = TypeVar("Level")


# A class's name without the modules that it is in.
_LAST = BeforeValidator(lambda name: name.rpartition(".")[2] if isinstance(name, str) else name)

Number = Annotated[float, Field(ge=-1e38, le=1e38, allow_inf_nan=False)]
Axis = Annotated[int, Field(ge=0, le=2, strict=True)]
PerLevel = Annotated[tuple[Level, ...], Field(min_length=1), at_most(MOST_LEVELS)]
Triple = tuple[int, int, int]


class _Intensities(BaseModel):
    """Statistics of the labelled voxels of a CT."""

    mean: Number
    std: Annotated[Number, Field(ge=0)]
    percentile_00_5: Number
    percentile_99_5: Number


class _Arguments(BaseModel):
    """Arguments of nnU-Net's functions, limited to supported values; Any: ignored."""

    model_config = ConfigDict(extra="forbid")


class _Resampling(_Arguments):
    is_seg: Literal[False] = False
    order: Literal[1, 3] = 3
    order_z: Literal[0, 1] = 0
    force_separate_z: Annotated[bool, Field(strict=True)] | None = False


class _LogitResampling(_Resampling):
    order: Literal[1]


class _Norm(_Arguments):
    affine: Literal[True]
    eps: float = 1e-5


class _Activation(_Arguments):
    inplace: Any = None
    negative_slope: float = 0.01


class _Network(_Arguments):
    n_stages: Any = None
    features_per_stage: PerLevel[int]
    kernel_sizes: PerLevel[Triple]
    strides: PerLevel[Triple]
    n_conv_per_stage: PerLevel[int] = Field(
        validation_alias=AliasChoices("n_conv_per_stage", "n_blocks_per_stage")
    )
    n_conv_per_stage_decoder: PerLevel[int]
    conv_bias: bool = False
    conv_op: Annotated[Literal["Conv3d"], _LAST]
    norm_op: Annotated[Literal["InstanceNorm3d"], _LAST]
    norm_op_kwargs: _Norm
    nonlin: Annotated[Literal["LeakyReLU"], _LAST]
    nonlin_kwargs: _Activation | None = None
    dropout_op: Any = None
    dropout_op_kwargs: Any = None
    deep_supervision: Any = None


class _Architecture(BaseModel):
    network_class_name: Annotated[Literal["PlainConvUNet", "ResidualEncoderUNet"], _LAST]
    arch_kwargs: _Network


class _Said(BaseModel):
    """One configuration in ``plans.json``, with the common values; axes are the plan's."""

    patch_size: Shape
    spacing: Spacing
    transpose_forward: tuple[Axis, Axis, Axis] = (0, 1, 2)
    image_reader_writer: Literal[
        "SimpleITKIO", "NibabelIO", "Tiff3DIO", "NibabelIOWithReorient", "SimpleITKIOWithReorient"
    ] = "SimpleITKIO"
    label_manager: Literal["LabelManager"] = "LabelManager"
    preprocessor_name: Literal["DefaultPreprocessor"] = "DefaultPreprocessor"
    normalization_schemes: Annotated[tuple[str, ...], Field(min_length=1), at_most(2**14)]
    use_mask_for_norm: Annotated[tuple[bool, ...], at_most(2**14)] | None = None
    statistics: dict[str, Any] = Field(
        default={},
        validation_alias=AliasChoices(
            "foreground_intensity_properties_per_channel",
            "foreground_intensity_properties_by_modality",
        ),
    )
    resampling_fn_data: Literal["resample_data_or_seg_to_shape"] = "resample_data_or_seg_to_shape"
    resampling_fn_data_kwargs: _Resampling
    resampling_fn_probabilities: Literal["resample_data_or_seg_to_shape"] = (
        "resample_data_or_seg_to_shape"
    )
    resampling_fn_probabilities_kwargs: _LogitResampling
    architecture: _Architecture


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration of a plan, with the values common to all; axes are those of a file."""

    order: Order
    """Order of the plan's axes."""
    patch_size: Shape
    spacing_mm: Spacing
    channels: tuple[ChannelNormalization, ...]
    interpolation: Interpolation
    orientation: Literal["stored", "ras"]
    topology: Topology


def read_plan(plans: Mapping[str, Any], configuration: str, num_classes: int) -> Plan:
    """Return one of a plan's configurations, such as ``3d_fullres``.

    ``num_classes`` counts the channels of the network's logits. Raises ValueError, in one line, if
    the plan is invalid or needs an unsupported option.
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
    if found.get("architecture") is None:
        found["architecture"] = _old_architecture(found)
    said = validated(_Said, {**plans, **found})
    if sorted(said.transpose_forward) != [0, 1, 2]:
        raise ValueError(
            f"transpose_forward is {shown(said.transpose_forward)}; it must name each axis once"
        )
    order, channels = order_of(said.transpose_forward), _channels(said)
    return Plan(
        order=order,
        patch_size=reordered(said.patch_size, order),
        spacing_mm=reordered(said.spacing, order),
        channels=channels,
        interpolation=_interpolation(said),
        orientation="ras" if said.image_reader_writer.endswith("WithReorient") else "stored",
        topology=_topology(said.architecture, order, len(channels), num_classes),
    )


def _configuration(plans: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration, including the entries that it inherits."""
    configurations = plans.get("configurations")
    if not isinstance(configurations, dict):
        raise ValueError("plans.json has no configurations")
    found: dict[str, Any] = {}
    wanted: Any = name
    for _ in range(len(configurations) + 1):
        one = configurations.get(wanted) if isinstance(wanted, str) else None
        if not isinstance(one, dict):
            raise ValueError(f"plans.json has no configuration {shown(wanted)}")
        found = {**one, **found}
        wanted = one.get("inherits_from")
        if wanted is None:
            return found
    raise ValueError(f"configuration {printable(name)} inherits from itself")


def _channels(said: _Said) -> tuple[ChannelNormalization, ...]:
    schemes = said.normalization_schemes
    masks = said.use_mask_for_norm or (False,) * len(schemes)
    if len(masks) != len(schemes):
        raise ValueError(
            f"use_mask_for_norm has {counted(len(masks), 'channel')}, but normalization_schemes "
            f"has {len(schemes)}"
        )
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
        ct = validated(_Intensities, said.statistics.get(str(channel), {}))
        low, high = ct.percentile_00_5, ct.percentile_99_5
        if low > high:
            raise ValueError(
                f"channel {channel} has a percentile_00_5 of {low:g}, above its percentile_99_5 "
                f"of {high:g}"
            )
        std = max(ct.std, LEAST_STD)
        channels.append(ChannelNormalization(kind=kind, low=low, high=high, mean=ct.mean, std=std))
    return tuple(channels)


def _interpolation(said: _Said) -> Interpolation:
    images, logits = said.resampling_fn_data_kwargs, said.resampling_fn_probabilities_kwargs
    if images.force_separate_z != logits.force_separate_z:
        raise ValueError("force_separate_z differs between images and logits")
    return Interpolation(
        order=images.order,
        thick=THICK[images.force_separate_z],
        across_slices=images.order_z,
        logits_across_slices=logits.order_z,
        clips=True,
    )


def _topology(
    architecture: _Architecture, order: Order, in_channels: int, num_classes: int
) -> Topology:
    is_plain, network = architecture.network_class_name == "PlainConvUNet", architecture.arch_kwargs
    topology = validated(
        Topology,
        {
            "in_channels": in_channels,
            "num_classes": num_classes,
            "encoder": "plain" if is_plain else "residual",
            "channels": network.features_per_stage,
            "strides": [reordered(stride, order) for stride in network.strides],
            "kernels": [reordered(kernel, order) for kernel in network.kernel_sizes],
            "units": network.n_conv_per_stage,
            "decoder_units": network.n_conv_per_stage_decoder[::-1],
            "upsampling_bias": network.conv_bias,
            "norm": "instance",
            "norm_eps": network.norm_op_kwargs.eps,
            "negative_slope": (network.nonlin_kwargs or _Activation()).negative_slope,
            "deep_supervision": True,
        },
    )
    return replace(topology, kernels=stated_kernels(topology.kernels))


def _old_architecture(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the network in plans of nnU-Net before 2.4, in the format of later plans."""
    units = found.get("n_conv_per_stage_encoder")
    base, most = found.get("UNet_base_num_features"), found.get("unet_max_num_features")
    if not isinstance(units, list) or type(base) is not int or type(most) is not int:
        raise ValueError("plans.json describes no network")
    return {
        "network_class_name": found.get("UNet_class_name"),
        "arch_kwargs": {
            "features_per_stage": [min(base * 2**level, most) for level in range(len(units[:32]))],
            "strides": found.get("pool_op_kernel_sizes"),
            "kernel_sizes": found.get("conv_kernel_sizes"),
            "n_conv_per_stage": units,
            "n_conv_per_stage_decoder": found.get("n_conv_per_stage_decoder"),
            "conv_bias": True,
            "conv_op": "Conv3d",
            "norm_op": "InstanceNorm3d",
            "norm_op_kwargs": {"affine": True},
            "nonlin": "LeakyReLU",
        },
    }
