"""Parameters of a network by nnU-Net's and by unet3d's names, and the order of their axes.

The networks compute the same but for the order of sums:

* nnU-Net joins upsampled features and skip before a convolution; here each has its own half of it.
* A bias before an instance normalisation has no effect, and is not kept. The bias of the upsampling
  has an effect, because the next convolution pads with zeros.
* nnU-Net has a head at every level of the decoder; here the lowest level, which nnU-Net's loss
  leaves out, has none.
* In nnU-Net a parameter has several names, and a file contains it under each.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unet3d.inputs.plain_data import printable
from unet3d.model import Topology, UNet3d
from unet3d.runs.checkpoint import compare_tensors

_WRAPPED = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to names."""

_REPEATED = (
    (re.compile(r"^decoder\.encoder\."), "encoder."),
    (re.compile(r"\.all_modules\.0\."), ".conv."),
    (re.compile(r"\.all_modules\.[0-9]\."), ".norm."),  # there may be a dropout between them
)
"""Patterns in the other names of a parameter, each with its replacement in the main name."""


Order = tuple[int, int, int]
"""For each axis of a file, the matching axis of nnU-Net's network.

nnU-Net's networks take the axes of a file as (Z, Y, X), transposed as the plan says; ours take
(X, Y, Z).
"""


def order_of(transpose_forward: Sequence[int]) -> Order:
    """Return the order of a plan, which names an axis of (Z, Y, X) for each of its own axes."""
    x, y, z = (list(transpose_forward).index(2 - axis) for axis in range(3))
    return (x, y, z)


def reordered(values: Sequence[Any], order: Order) -> tuple[Any, Any, Any]:
    """Return values for the axes of nnU-Net's network, reordered to the axes of a file."""
    x, y, z = (values[axis] for axis in order)
    return (x, y, z)


def inverse_of(order: Order) -> Order:
    """Return, for each axis of the network, the matching axis of a file."""
    return (order.index(0), order.index(1), order.index(2))


def _kernel(weight: Tensor, order: Order) -> Tensor:
    """Return a kernel, shape (O, I, ...), with its spatial axes permuted by an order."""
    return weight.permute(0, 1, *(2 + axis for axis in order)) if weight.ndim == 5 else weight


def from_nnunet(
    weights: Mapping[str, Tensor], topology: Topology, order: Order
) -> dict[str, Tensor]:
    """Convert the result of :func:`of_plan`, also on the meta device, to our parameters."""
    ours: dict[str, list[str]] = {}
    for own, theirs in _pairs(topology):
        ours.setdefault(theirs, []).append(own)
    model: dict[str, Tensor] = {}
    for theirs, names in ours.items():
        weight = _kernel(weights[theirs], order)
        halves = weight.chunk(2, dim=1) if len(names) == 2 else (weight,)
        for name, half in zip(names, halves, strict=True):
            model[name] = half.float().contiguous()
    return model


def of_plan(
    weights: Mapping[str, Tensor], topology: Topology, order: Order, trainer: str
) -> dict[str, Tensor]:
    """Return the parameters of the plan's network from a file, by their main names.

    Raises ValueError, which names the trainer, if names or shapes do not fit the plan's network;
    also if two names of a parameter have different values.
    """
    own: dict[str, Tensor] = {}
    for name, weight in weights.items():
        first = own.setdefault(_own_name(name), weight)
        is_same = (first.shape, first.dtype) == (weight.shape, weight.dtype)
        if not is_same or not (weight.is_meta or first is weight or torch.equal(first, weight)):
            raise ValueError(f"{printable(_own_name(name))} has two values")
    with torch.device("meta"):
        wanted = to_nnunet(UNet3d(topology).state_dict(), topology, order)
    without_effect = {f"{name[:-6]}bias" for name in wanted if name.endswith(".conv.weight")}
    own = {name: own[name] for name in own if name in wanted or name not in without_effect}
    try:
        compare_tensors(own, wanted, _shape)
    except ValueError as error:
        raise ValueError(
            f"its weights (trainer {trainer}) do not match its plan: {error}"
        ) from error
    return own


def to_nnunet(model: Mapping[str, Tensor], topology: Topology, order: Order) -> dict[str, Tensor]:
    """Convert our parameters to nnU-Net's, each by one name, with its order of axes."""
    weights: dict[str, Tensor] = {}
    for own, theirs in _pairs(topology):
        weight = _kernel(model[own].float(), inverse_of(order))
        if theirs in weights:  # the half for upsampled features
            weight = torch.cat([weights[theirs], weight], dim=1)
        weights[theirs] = weight.contiguous()
    for level in range(topology.num_levels - 1):
        name = f"decoder.seg_layers.{topology.num_levels - 2 - level}"
        if f"{name}.weight" not in weights:  # a head that only training needs
            head = model["decoder.heads.0.weight"]
            shape = (topology.num_classes, topology.channels[level], 1, 1, 1)
            weights[f"{name}.weight"] = head.new_zeros(shape).float()
            weights[f"{name}.bias"] = head.new_zeros(topology.num_classes).float()
    return weights


def with_all_names(weights: Mapping[str, Tensor], *, has_biases: bool) -> dict[str, Tensor]:
    """Return parameters by every name that nnU-Net looks for.

    With ``has_biases`` convolutions before a normalisation get biases of 0.
    """
    named = dict(weights)
    for name, weight in weights.items():
        if has_biases and name.endswith(".conv.weight") and ".skip." not in name:
            named[f"{name[:-6]}bias"] = torch.zeros(len(weight))
    for name, weight in list(named.items()):
        for part, place in ((".conv.", ".all_modules.0."), (".norm.", ".all_modules.1.")):
            unit, found, last = name.rpartition(part)
            if found:
                named[f"{unit}{place}{last}"] = weight
    named |= {
        f"decoder.{name}": weight
        for name, weight in list(named.items())
        if name.startswith("encoder.")
    }
    return named


def _own_name(name: str) -> str:
    while name.startswith(_WRAPPED):
        name = name.partition(".")[2]
    for repeated, own in _REPEATED:
        name = repeated.sub(own, name)
    return name


def _shape(tensor: Tensor) -> str:
    """Return a tensor's shape to compare, with its type if that is not cast to float32."""
    shape = "x".join(map(str, tensor.shape))
    return shape if tensor.is_floating_point() else f"{shape} in {tensor.dtype}"


def _pairs(topology: Topology) -> Iterator[tuple[str, str]]:
    """Yield each parameter's name in unet3d and its name in nnU-Net.

    Two parameters of unet3d have the same name in nnU-Net if each has a share of the input channels
    of nnU-Net's parameter; the share for upsampled features comes first.
    """
    yield from _encoder(topology)
    last = topology.num_levels - 2
    for level in range(topology.num_levels - 1):
        ours, stage = f"decoder.levels.{level}", last - level
        theirs = f"decoder.stages.{stage}.convs"
        yield f"{ours}.units.0.conv.weight", f"{theirs}.0.conv.weight"
        yield f"{ours}.skip.weight", f"{theirs}.0.conv.weight"
        yield from _affine(f"{ours}.units.0.norm", f"{theirs}.0.norm")
        for index in range(1, topology.num_decoder_units(level)):
            yield from _unit(f"{ours}.units.{index}", f"{theirs}.{index}")
        up = f"decoder.transpconvs.{stage}"
        yield f"{ours}.up.weight", f"{up}.weight"
        if topology.upsampling_bias:
            yield f"{ours}.up.bias", f"{up}.bias"
    for level in range(topology.num_heads):
        yield from _affine(f"decoder.heads.{level}", f"decoder.seg_layers.{last - level}")


def _encoder(topology: Topology) -> Iterator[tuple[str, str]]:
    in_channels = topology.channels[0]
    if topology.encoder == "residual":
        yield from _unit("encoder.levels.0.0", "encoder.stem.convs.0")
    for level, (channels, stride) in enumerate(
        zip(topology.channels, topology.strides, strict=True)
    ):
        ours = f"encoder.levels.{level}"
        for index in range(topology.num_units(level)):
            if topology.encoder == "plain":
                yield from _unit(f"{ours}.{index}", f"encoder.stages.{level}.0.convs.{index}")
                continue
            block = f"encoder.stages.{level}.blocks.{index}"
            unit = f"{ours}.{index + (level == 0)}"  # behind the stem
            yield from _unit(f"{unit}.first", f"{block}.conv1")
            yield from _unit(unit, f"{block}.conv2")
            if index == 0 and in_channels != channels:
                skip = f"{block}.skip.{int(max(stride) > 1)}"  # behind the pooling
                yield f"{unit}.shortcut.1.0.weight", f"{skip}.conv.weight"
                yield from _affine(f"{unit}.shortcut.1.1", f"{skip}.norm")
        in_channels = channels


def _unit(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    yield f"{ours}.conv.weight", f"{theirs}.conv.weight"
    yield from _affine(f"{ours}.norm", f"{theirs}.norm")


def _affine(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    for kind in ("weight", "bias"):
        yield f"{ours}.{kind}", f"{theirs}.{kind}"
