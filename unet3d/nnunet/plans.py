"""What ``plans.json`` says of a model: its network, and how its images are prepared.

Only what decides a segmentation is looked at. What this package cannot do as nnU-Net does it is
refused by name. Axes of the plan become those of a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unet3d.config import Shape, Spacing
from unet3d.inputs.plain_data import at_most, printable, shown, validated
from unet3d.model import Topology
from unet3d.model.topology import MOST_LEVELS, stated_kernels
from unet3d.nnunet.axes import Axes
from unet3d.nnunet.terms import NETWORKS, READERS, SCHEMES, THICK, Network, Reader, Resampling
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.resample import Interpolation

LEAST_STD = 1e-8
"""What nnU-Net divides intensities by at least."""

Level = TypeVar("Level")

Number = Annotated[float, Field(ge=-1e38, le=1e38)]
Axis = Annotated[int, Field(ge=0, le=2, strict=True)]
PerLevel = Annotated[tuple[Level, ...], Field(min_length=1), at_most(MOST_LEVELS)]


def _last(name: object) -> object:
    """Return a class's name without the modules that it is in."""
    return name.rpartition(".")[2] if isinstance(name, str) else name


def _triple(value: object) -> object:
    return (value,) * 3 if type(value) is int else value


Triple = Annotated[tuple[int, int, int], BeforeValidator(_triple)]


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


class _Arguments(BaseModel):
    """Arguments of nnU-Net's functions, with the values that this package can do; Any: ignored."""

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
    track_running_stats: Literal[False] = False
    momentum: Any = None
    eps: float = 1e-5


class _Activation(_Arguments):
    inplace: Any = None
    negative_slope: float = 0.01


class _Network(_Arguments):
    n_stages: Any = None
    features_per_stage: PerLevel[int]
    kernel_sizes: PerLevel[Triple]
    strides: PerLevel[Triple]
    n_conv_per_stage: PerLevel[int] | None = None
    n_blocks_per_stage: PerLevel[int] | None = None
    n_conv_per_stage_decoder: PerLevel[int]
    conv_bias: bool = False
    conv_op: Literal["Conv3d"]
    norm_op: Literal["InstanceNorm3d"]
    norm_op_kwargs: _Norm
    nonlin: Literal["LeakyReLU"]
    nonlin_kwargs: _Activation | None = None
    nonlin_first: Literal[False, None] = None
    pool: Literal["conv"] = "conv"
    pool_type: Literal["conv"] = "conv"
    block: Literal["BasicBlockD", None] = None
    bottleneck_channels: None = None
    squeeze_excitation: Literal[False, None] = None
    disable_default_stem: Literal[False, None] = None
    stem_channels: Any = None
    squeeze_excitation_reduction_ratio: Any = None
    dropout_op: Any = None
    dropout_op_kwargs: Any = None
    deep_supervision: Any = None
    stochastic_depth_p: Any = None

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, given: Any) -> Any:
        """Shorten names of classes, and repeat what is said once for all levels."""
        if not isinstance(given, dict):
            return given
        found, levels = {key: _last(value) for key, value in given.items()}, given.get("n_stages")
        if type(levels) is int and 0 < levels <= MOST_LEVELS:
            for key in ("kernel_sizes", "strides", *(key for key in found if "_per_stage" in key)):
                if type(found.get(key)) is int:
                    found[key] = [found[key]] * (levels - key.endswith("decoder"))
        return found

    @model_validator(mode="after")
    def _has_the_usual_stem(self) -> Self:
        if self.stem_channels not in (None, self.features_per_stage[0]):
            raise ValueError(
                f"has stem_channels {shown(self.stem_channels)}, unlike its first level"
            )
        return self


class _Architecture(BaseModel):
    network_class_name: Annotated[Network, BeforeValidator(_last)]
    arch_kwargs: _Network


class _Said(BaseModel):
    """What a plan says of all configurations and of one, along its own axes."""

    patch_size: Shape
    spacing: Spacing
    transpose_forward: tuple[Axis, Axis, Axis] = (0, 1, 2)
    image_reader_writer: Reader = "SimpleITKIO"
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
    resampling_fn_data: Resampling = "resample_data_or_seg_to_shape"
    resampling_fn_data_kwargs: _Resampling
    resampling_fn_probabilities: Resampling = "resample_data_or_seg_to_shape"
    resampling_fn_probabilities_kwargs: _LogitResampling
    architecture: _Architecture


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
    if found.get("architecture") is None:
        found["architecture"] = _old_architecture(found)
    said = validated(_Said, {**plans, **found})
    if sorted(said.transpose_forward) != [0, 1, 2]:
        raise ValueError(
            f"transpose_forward is {shown(said.transpose_forward)}; it needs each axis"
        )
    axes, channels = Axes.of(said.transpose_forward), _channels(said)
    topology = _topology(said.architecture, axes, len(channels), num_classes)
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
        interpolation=_interpolation(said),
        orientation=READERS[said.image_reader_writer],
        topology=topology,
    )


def _configuration(plans: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with what it inherits."""
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
            f"use_mask_for_norm is of {len(masks)} channels, but normalization_schemes of "
            f"{len(schemes)}"
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
    architecture: _Architecture, axes: Axes, in_channels: int, num_classes: int
) -> Topology:
    encoder, network = NETWORKS[architecture.network_class_name], architecture.arch_kwargs
    units = network.n_conv_per_stage if encoder == "plain" else network.n_blocks_per_stage
    topology = validated(
        Topology,
        {
            "in_channels": in_channels,
            "num_classes": num_classes,
            "encoder": encoder,
            "channels": network.features_per_stage,
            "strides": [axes.from_network(stride) for stride in network.strides],
            "kernels": [axes.from_network(kernel) for kernel in network.kernel_sizes],
            "units": units,
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
    """Return the network of plans of nnU-Net before 2.4 in the words of later ones."""
    units = found.get("n_conv_per_stage_encoder")
    base, most = found.get("UNet_base_num_features"), found.get("unet_max_num_features")
    if not isinstance(units, list) or type(base) is not int or type(most) is not int:
        raise ValueError("plans.json describes no network")
    return {
        "network_class_name": found.get("UNet_class_name"),
        "arch_kwargs": {
            "n_stages": len(units),
            "features_per_stage": [min(base * 2**level, most) for level in range(len(units[:32]))],
            "strides": found.get("pool_op_kernel_sizes"),
            "kernel_sizes": found.get("conv_kernel_sizes"),
            "n_conv_per_stage": units,
            "n_blocks_per_stage": units,
            "n_conv_per_stage_decoder": found.get("n_conv_per_stage_decoder"),
            "conv_bias": True,
            "conv_op": "Conv3d",
            "norm_op": "InstanceNorm3d",
            "norm_op_kwargs": {"affine": True},
            "nonlin": "LeakyReLU",
        },
    }
