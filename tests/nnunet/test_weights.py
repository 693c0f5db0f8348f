"""Weights under our and nnU-Net's names, against nnU-Net's own networks if they are installed."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.nnunet.models import TOPOLOGY, assert_equal, their_network
from unet3d.model import Topology, UNet3d
from unet3d.nnunet.weights import from_nnunet, of_plan, order_of, to_nnunet, with_all_names

PLAIN = replace(TOPOLOGY, units=(1, 2, 3), norm_eps=1e-3, negative_slope=0.2)
RESIDUAL = Topology(
    in_channels=1,
    num_classes=2,
    channels=(4, 8, 8, 8),
    strides=((1, 1, 1), (2, 2, 2), (2, 2, 1), (1, 2, 2)),
    encoder="residual",
    units=(1, 3, 2, 2),
    decoder_units=(1, 1, 1),
    deep_supervision=True,
    upsampling_bias=True,
)
CUBES = Topology(in_channels=1, num_classes=2, channels=(4, 8), strides=((1, 1, 1), (2, 2, 2)))
TOPOLOGIES = {"plain": PLAIN, "residual": RESIDUAL, "two levels": CUBES}
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 0, 2)]


def random_network(topology):
    """Return a network in which no parameter has its initial value."""
    torch.manual_seed(0)
    network = UNet3d(topology)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


@pytest.mark.parametrize("transpose_forward", ORDERS)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_nnunets_network_has_the_names_that_are_written_and_our_logits(topology, transpose_forward):
    axes = order_of(transpose_forward)
    theirs, ours = their_network(topology, axes), random_network(topology)
    weights = to_nnunet(ours.state_dict(), topology, axes)
    named = with_all_names(weights, has_biases=topology.upsampling_bias)
    assert named.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(named)
    read = of_plan(theirs.state_dict(), topology, axes, "nnUNetTrainer")
    assert_equal(from_nnunet(read, topology, axes), ours.state_dict())
    size = tuple(3 * stride for stride in topology.total_stride)
    image = torch.randn(1, topology.in_channels, *size, dtype=torch.float64)
    # The axes of a file as nnU-Net's readers and its transpose_forward order them.
    turn = (0, 1, *(4 - axis for axis in transpose_forward))
    with torch.inference_mode():
        expected = theirs.double().eval()(image.permute(turn))
        logits = ours.double().eval()(image).permute(turn)
    assert (logits - expected).abs().max() / expected.abs().max() < 1e-10


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_what_is_written_is_read_again(topology):
    ours = random_network(topology).state_dict()
    axes = order_of((1, 2, 0))
    weights = with_all_names(to_nnunet(ours, topology, axes), has_biases=True)
    wrapped = {f"_orig_mod.module.{name}": value for name, value in weights.items()}
    back = from_nnunet(of_plan(wrapped, topology, axes, "nnUNetTrainer"), topology, axes)
    assert_equal(back, ours)


CONV, NORM = "encoder.stages.0.0.convs.0.conv.weight", "encoder.stages.0.0.convs.0.norm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder.transpconvs.1.weight": None}, "decoder.transpconvs.1.weight is missing"),
        ({CONV: torch.zeros(4, 2, 3, 3, 3)}, "0.conv.weight is 4x2x3x3x3 instead of 8x2x1x3x3"),
        (
            {"decoder.seg_layers.0.bias": torch.zeros(3, dtype=torch.int64)},
            "decoder.seg_layers.0.bias is 3",
        ),
        (
            {f"{NORM}.running_mean": torch.zeros(4), f"{NORM}.num_batches_tracked": torch.ones(())},
            "norm.running_mean is unknown",
        ),
        ({f"{NORM}.attention\x1b": torch.zeros(4)}, r"norm.attention\x1b is unknown"),
    ],
)
def test_weights_of_another_network_are_refused(change, message):
    axes = order_of((0, 1, 2))
    changed = {**to_nnunet(random_network(PLAIN).state_dict(), PLAIN, axes), **change}
    weights = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError) as caught:
        of_plan(weights, PLAIN, axes, "nnUNetTrainerMine")
    assert message in str(caught.value)
    assert "nnUNetTrainerMine" in str(caught.value)


@pytest.mark.parametrize("name", ["decoder.{}", "_orig_mod.{}", "all_modules"])
def test_two_values_of_one_parameter_are_refused(name):
    ours = random_network(PLAIN).state_dict()
    axes = order_of((0, 1, 2))
    weights = with_all_names(to_nnunet(ours, PLAIN, axes), has_biases=True)
    copied = {key: value.clone() for key, value in weights.items()}
    repeated = CONV.replace(".conv.", ".all_modules.0.") if "{" not in name else name.format(CONV)
    other = {**copied, repeated: copied[CONV].clone()}
    read = of_plan(other, PLAIN, axes, "nnUNetTrainer")
    assert_equal(from_nnunet(read, PLAIN, axes), ours)
    other[repeated][0, 0, 0, 0, 0] += 1
    with pytest.raises(ValueError, match=f"{re.escape(CONV)} has two values"):
        of_plan(other, PLAIN, axes, "nnUNetTrainer")
