"""Logits against nnU-Net's own networks, where they are installed."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unet3d.inputs.plain_data import validated
from unet3d.model import Topology, UNet3d

architectures = pytest.importorskip("dynamic_network_architectures.architectures.unet")

TOLERANCE = 1e-10
ONE, HALF, FLAT, CUBE = (1, 1, 1), (2, 2, 2), (1, 3, 3), (3, 3, 3)

NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    # fields of the topology that have no default here, and the size of the image
    "two levels": (
        {"channels": (4, 8), "strides": (ONE, HALF), "units": (2, 2), "decoder_units": (2,)},
        (6, 8, 4),
    ),
    "as planned": (
        {
            "channels": (4, 8, 8),
            "strides": (ONE, HALF, HALF),
            "units": (2, 2, 2),
            "decoder_units": (2, 2),
        },
        (8, 12, 8),
    ),
    "unequal units": (
        {
            "channels": (4, 6, 8, 10),
            "strides": (ONE, HALF, (1, 2, 2), HALF),
            "units": (1, 3, 2, 4),
            "decoder_units": (3, 1, 2),
            "norm_eps": 1e-3,
            "negative_slope": 0.2,
        },
        (8, 16, 16),
    ),
    "thick slices": (
        {
            "channels": (4, 6, 8),
            "strides": (ONE, (1, 2, 2), HALF),
            "kernels": (FLAT, FLAT, CUBE),
            "units": (2, 1, 2),
            "decoder_units": (1, 2),
        },
        (2, 12, 8),
    ),
    "other strides": (
        {
            "channels": (4, 6, 6, 8),
            "strides": (ONE, (3, 1, 2), (1, 3, 1), ONE),
            "kernels": (CUBE, CUBE, (1, 3, 1), CUBE),
            "units": (1, 2, 2, 1),
            "decoder_units": (1, 2, 1),
            "negative_slope": 0.0,
        },
        (6, 6, 4),
    ),
    "seven levels": (
        {
            "channels": (2, 4, 4, 6, 6, 8, 8),
            "strides": (ONE, HALF, HALF, (1, 2, 2), (1, 1, 2), (1, 1, 2), (1, 1, 2)),
            "units": (1, 2, 1, 3, 1, 2, 1),
            "decoder_units": (1, 2, 1, 3, 1, 2),
        },
        (8, 8, 64),
    ),
}


def nnunet_network(topology: Topology, has_bias: bool) -> nn.Module:
    """Return nnU-Net's network with random parameters."""
    levels, is_plain = topology.num_levels, topology.encoder == "plain"
    kind = architectures.PlainConvUNet if is_plain else architectures.ResidualEncoderUNet
    units = {"n_conv_per_stage" if is_plain else "n_blocks_per_stage": list(topology.units)}
    torch.manual_seed(1)
    network = kind(
        input_channels=topology.in_channels,
        n_stages=levels,
        features_per_stage=list(topology.channels),
        conv_op=nn.Conv3d,
        kernel_sizes=[list(topology.kernel(level)) for level in range(levels)],
        strides=[list(stride) for stride in topology.strides],
        **units,
        num_classes=topology.num_classes,
        n_conv_per_stage_decoder=list(reversed(topology.decoder_units)),
        conv_bias=has_bias,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": topology.norm_eps, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"negative_slope": topology.negative_slope, "inplace": True},
        deep_supervision=topology.deep_supervision,
    ).double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
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
    for level, count in enumerate(topology.units):
        for number in range(count):
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
    for level, count in enumerate(topology.decoder_units):
        source, to = f"decoder.stages.{last - level}.convs", f"decoder.levels.{level}"
        for number in range(count):
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


@pytest.mark.parametrize("deep_supervision", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("encoder", ["plain", "residual"])
@pytest.mark.parametrize("network", NETWORKS)
def test_logits_are_those_of_nnunet(
    network: str, encoder: str, has_bias: bool, deep_supervision: bool
) -> None:
    fields, size = NETWORKS[network]
    given = {
        "in_channels": 2,
        "num_classes": 3,
        "encoder": encoder,
        "upsampling_bias": has_bias,
        "deep_supervision": deep_supervision,
    }
    topology = validated(Topology, given | fields)
    theirs = nnunet_network(topology, has_bias)
    ours = UNet3d(topology).double()
    ours.load_state_dict(own_weights(theirs.state_dict(), topology))
    image = torch.randn(2, 2, *size, dtype=torch.float64) + 1
    with torch.no_grad():
        expected, actual = theirs(image), ours(image)
    expected = expected if isinstance(expected, list) else [expected]
    actual = actual if isinstance(actual, tuple) else (actual,)
    # nnU-Net has a head at the last level but one too, whose loss counts nothing.
    assert len(actual) == (max(len(expected) - 1, 1) if deep_supervision else 1)
    for own, wanted in zip(actual, expected, strict=False):
        assert (own - wanted).norm() <= TOLERANCE * wanted.norm()
