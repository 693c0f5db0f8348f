"""What a checkpoint may hold: its fields with their ranges, and its tensors against its network.

A field that is added to a checkpoint is added to :class:`Content`, with a default where older
files lack it.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from unet3d.config import MAX_PATCH_VOXELS, Shape
from unet3d.datasets.classes import LabelValue
from unet3d.inputs.plain_data import PLAIN, Name, at_most, listed, printable, validated
from unet3d.model import Topology, UNet3d
from unet3d.preparation.transform import Preprocessing
from unet3d.runs.case_split import CaseSplit

FORMAT = 1
"""Raised whenever a checkpoint is laid out differently."""

MAX_TENSORS = 20_000
"""Of a network, or of its optimizer; the largest network has ten thousand."""


Values = Annotated[tuple[LabelValue, ...], Field(min_length=1), at_most(2**16)]


class Content(BaseModel):
    """Everything in a checkpoint."""

    model_config = ConfigDict(**PLAIN, frozen=True, arbitrary_types_allowed=True)

    format: int
    unet3d: Name
    topology: Topology
    preprocessing: Preprocessing
    patch_size: Shape | None
    config: Annotated[str, Field(max_length=2**20, strict=True)]
    split: CaseSplit | None = None
    postprocessing: Annotated[tuple[Values, ...], at_most(2**16)] = ()
    """Of the voxels with such values together, predictions keep the largest component."""
    model: Annotated[dict[Name, Tensor], at_most(MAX_TENSORS)]
    training: Annotated[dict[Name, Any], at_most(8)]
    """What a training continues with, and checks then; empty where there is nothing to continue."""

    @field_validator("patch_size")
    @classmethod
    def _has_few_voxels(cls, size: Shape | None) -> Shape | None:
        if size is not None and math.prod(size) > MAX_PATCH_VOXELS:
            raise ValueError(f"has {math.prod(size):,} voxels, and may have {MAX_PATCH_VOXELS:,}")
        return size


def read_content(content: Mapping[str, Any]) -> Content:
    """Return the fields of a checkpoint, each in its range; tensors may be on the meta device.

    Raises ValueError, in one line, where fields are missing, unknown, or out of range.
    """
    plain = validated(Content, content)
    classes, labels = plain.topology.num_classes, plain.preprocessing.num_outputs
    channels, images = plain.topology.in_channels, len(plain.preprocessing.channels)
    if classes != labels or channels != images:
        raise ValueError(
            f"its network has {channels} channels and {classes} classes, but it prepares {images} "
            f"channels and {labels} {'regions' if plain.preprocessing.regions else 'labels'}"
        )
    known = set(plain.preprocessing.label_values[1:])
    unknown = [value for rule in plain.postprocessing for value in rule if value not in known]
    if unknown:
        raise ValueError(f"its post-processing is of label {unknown[0]}, which is none of its own")
    return plain


def described_network(topology: Topology, model: Mapping[str, Tensor]) -> UNet3d:
    """Return the network on the meta device, if it has the stored parameters and buffers.

    Raises ValueError, in one line, where names, shapes or types differ.
    """
    with torch.device("meta"):
        network = UNet3d(topology)
    if any(value.dtype == torch.float64 for value in model.values()):
        network.double()
    wanted = network.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in model]
    problems += [f"{printable(name)} is unknown" for name in model if name not in wanted]
    for name, value in wanted.items():
        if name in model and _kind(model[name]) != _kind(value):
            problems.append(f"{name} is {_kind(model[name])} instead of {_kind(value)}")
    if problems:
        raise ValueError(listed(problems, 3))
    return network


def refuse_non_finite(value: Any, what: str) -> None:
    """Refuse tensors with NaN or infinite numbers, nested, which a message calls ``what``."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not torch.stack(torch.aminmax(value)).isfinite().all():
            raise ValueError(f"{what} holds numbers that are not finite: the training had diverged")
    elif isinstance(value, dict):
        for key, item in value.items():
            refuse_non_finite(item, f"{what} {printable(key)}")


def _kind(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "one number"
    return f"{shape} in {str(tensor.dtype).removeprefix('torch.')}"
