"""Logits against nnU-Net's own networks, where they are installed."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.model.shapes import SHAPES, image_of, topology_of, without_plain_numbers
from tests.products import pairwise
from unet3d.model import Topology, UNet3d

architectures = pytest.importorskip("dynamic_network_architectures.architectures.unet")

TOLERANCE = 1e-10


def nnunet_network(topology: Topology, has_bias: bool) -> nn.Module:
    """Return nnU-Net's network with random parameters."""
    levels, is_plain = range(topology.num_levels), topology.encoder == "plain"
    kind = architectures.PlainConvUNet if is_plain else architectures.ResidualEncoderUNet
    units = {
        "n_conv_per_stage" if is_plain else "n_blocks_per_stage": [
            topology.num_units(level) for level in levels
        ]
    }
    torch.manual_seed(1)
    network = kind(
        input_channels=topology.in_channels,
        n_stages=topology.num_levels,
        features_per_stage=list(topology.channels),
        conv_op=nn.Conv3d,
        kernel_sizes=[list(topology.kernel(level)) for level in levels],
        strides=[list(stride) for stride in topology.strides],
        **units,
        num_classes=topology.num_classes,
        n_conv_per_stage_decoder=[topology.num_decoder_units(n) for n in reversed(levels[:-1])],
        conv_bias=has_bias,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": topology.norm_eps, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"negative_slope": topology.negative_slope, "inplace": True},
        deep_supervision=topology.deep_supervision,
    ).double()
    without_plain_numbers(network)
    return network


def own_weights(theirs: Mapping[str, Tensor], topology: Topology) -> dict[str, Tensor]:
    """Return nnU-Net's parameters by our names, without biases that a normalisation removes."""
    own: dict[str, Tensor] = {}

    def take(to: str, source: str, conv: str = ".conv.weight") -> None:
        own[f"{to}{conv}"] = theirs[f"{source}.conv.weight"]
        for name in ("weight", "bias"):
            own[f"{to}.norm.{name}"] = theirs[f"{source}.norm.{name}"]

    is_residual = topology.encoder == "residual"
    if is_residual:
        take("encoder.levels.0.0", "encoder.stem.convs.0")
    for level in range(topology.num_levels):
        for number in range(topology.num_units(level)):
            to = f"encoder.levels.{level}.{number + (is_residual and level == 0)}"
            if not is_residual:
                take(to, f"encoder.stages.{level}.0.convs.{number}")
                continue
            source = f"encoder.stages.{level}.blocks.{number}"
            take(f"{to}.first", f"{source}.conv1")
            take(to, f"{source}.conv2")
            projections = [
                name.removesuffix(".conv.weight")
                for name in theirs
                if name.startswith(f"{source}.skip.") and name.endswith(".conv.weight")
            ]
            for projection in projections:
                own[f"{to}.shortcut.1.0.weight"] = theirs[f"{projection}.conv.weight"]
                for name in ("weight", "bias"):
                    own[f"{to}.shortcut.1.1.{name}"] = theirs[f"{projection}.norm.{name}"]
    last = topology.num_levels - 2
    for level in range(last + 1):
        source, to = f"decoder.stages.{last - level}.convs", f"decoder.levels.{level}"
        for number in range(topology.num_decoder_units(level)):
            take(f"{to}.units.{number}", f"{source}.{number}")
        both, channels = theirs[f"{source}.0.conv.weight"], topology.channels[level]
        own[f"{to}.units.0.conv.weight"] = both[:, :channels]
        own[f"{to}.skip.weight"] = both[:, channels:]
        up = f"decoder.transpconvs.{last - level}"
        own[f"{to}.up.weight"] = theirs[f"{up}.weight"]
        if topology.upsampling_bias:
            own[f"{to}.up.bias"] = theirs[f"{up}.bias"]
        for name in ("weight", "bias"):
            if topology.deep_supervision and level < max(last, 1) or level == 0:
                head = f"decoder.seg_layers.{last - level}.{name}"
                own[f"decoder.heads.{level}.{name}"] = theirs[head]
    return own


@pairwise(
    shape=[name for name, (fields, _) in SHAPES.items() if "norm" not in fields],
    encoder=["plain", "residual"],
    has_bias=[False, True],
    deep_supervision=[False, True],
)
def test_logits_are_those_of_nnunet(
    shape: str, encoder: str, has_bias: bool, deep_supervision: bool
) -> None:
    fields, size = SHAPES[shape]
    given = {"upsampling_bias": has_bias, "deep_supervision": deep_supervision}
    topology = topology_of(**{**fields, **given, "encoder": encoder})
    theirs = nnunet_network(topology, has_bias)
    ours = UNet3d(topology).double()
    ours.load_state_dict(own_weights(theirs.state_dict(), topology))
    image = image_of(size)
    with torch.no_grad():
        expected, actual = theirs(image), ours(image)
    expected = expected if isinstance(expected, list) else [expected]
    actual = actual if isinstance(actual, tuple) else (actual,)
    # nnU-Net has a head at the last level but one too, whose loss counts nothing.
    assert len(actual) == (max(len(expected) - 1, 1) if deep_supervision else 1)
    for own, wanted in zip(actual, expected, strict=False):
        assert (own - wanted).norm() <= TOLERANCE * wanted.norm()
