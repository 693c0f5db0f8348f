"""Networks of any shape that nnU-Net can plan compute what their layers define."""

from contextlib import nullcontext

import pytest
import torch

from tests.model.shapes import HALF, ONE, SHAPES, image_of, topology_of, without_plain_numbers
from tests.nnunet.models import their_network
from tests.products import each_value
from tests.reference_network import Reference
from unet3d.kernels import recompute
from unet3d.kernels.conv import api, slabs
from unet3d.model import UNet3d
from unet3d.nnunet.weights import from_nnunet, of_plan, order_of

TOLERANCE = 1e-10
LAYOUTS = [torch.contiguous_format, torch.channels_last_3d]
NNUNETS_AXES = order_of((2, 1, 0))
"""nnU-Net's axes in the order of ours."""


def network_of(topology):
    torch.manual_seed(1)
    network = UNet3d(topology).double()
    without_plain_numbers(network)
    return network


def assert_is_reference(network, image):
    logits = network(image)
    logits = logits if isinstance(logits, tuple) else (logits,)
    directions = [torch.randn_like(level) for level in logits]
    sum((level * way).sum() for level, way in zip(logits, directions, strict=True)).backward()
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in network.named_parameters()
    }
    expected = Reference(network.topology, weights).logits(image)
    assert len(logits) == len(expected)
    sum((level * way).sum() for level, way in zip(expected, directions, strict=True)).backward()
    for level, wanted in zip(logits, expected, strict=True):
        assert (level - wanted).norm() <= TOLERANCE * wanted.norm()
    largest = max(value.grad.norm() for value in weights.values())
    for name, parameter in network.named_parameters():
        wanted = weights[name].grad
        assert parameter.grad is not None, name
        error = (parameter.grad - wanted).norm()
        # The gradient of a bias before a normalisation is rounding error.
        assert error <= TOLERANCE * max(wanted.norm(), 1e-4 * largest), f"{name}: {error:.1e}"


@each_value(
    shape=list(SHAPES),
    encoder=["plain", "residual"],
    memory=LAYOUTS,
    recomputed_above=[None, 200, slabs.MAX_ELEMENTS],
)
def test_a_network_is_what_its_layers_say(shape, encoder, memory, recomputed_above, monkeypatch):
    """Also with recomputation, and in slabs, when maps are above the limit."""
    fields, size = SHAPES[shape]
    network = network_of(topology_of(encoder=encoder, **fields)).to(memory_format=memory)
    monkeypatch.setattr(recompute, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", recomputed_above or slabs.MAX_ELEMENTS)
    with recompute.recomputed_in_backward() if recomputed_above else nullcontext():
        assert_is_reference(network, image_of(size).contiguous(memory_format=memory))


@pytest.mark.parametrize("widths", [(8, 16, 16), (40, 8, 8)], ids=["pairs", "many channels"])
def test_upsampling_and_convolution_as_one_have_the_bias(widths, monkeypatch):
    # A private name: only 16-bit maps on a GPU are composed, not float64.
    monkeypatch.setattr(api, "_composes", lambda x, up, weight: up.shape[4] == 2)
    topology = topology_of(channels=widths, strides=(ONE, (1, 2, 2), HALF), norm_eps=0.03)
    assert_is_reference(network_of(topology), image_of((4, 8, 8)))


@each_value(shape=list(SHAPES), num_samples=[1, 2], memory=LAYOUTS)
def test_float32_on_a_cpu_takes_other_ways_to_the_same(shape, num_samples, memory):
    fields, size = SHAPES[shape]
    network = network_of(topology_of(**fields))
    image = image_of(size)[:num_samples]
    with torch.no_grad():
        exact = Reference(network.topology, dict(network.named_parameters())).logits(image)
    network = network.float().to(memory_format=memory)
    logits = network(image.float().contiguous(memory_format=memory))
    for level, wanted in zip(logits if len(exact) > 1 else [logits], exact, strict=True):
        assert (level - wanted).norm() <= 1e-4 * wanted.norm()


@each_value(
    shape=[name for name, (fields, _) in SHAPES.items() if "norm" not in fields],
    encoder=["plain", "residual"],
    has_bias=[False, True],
    deep_supervision=[False, True],
)
def test_logits_are_those_of_nnunet(shape, encoder, has_bias, deep_supervision):
    """Logits of all heads, compared with nnU-Net's own networks if they are installed."""
    fields, size = SHAPES[shape]
    given = {"upsampling_bias": has_bias, "deep_supervision": deep_supervision}
    topology = topology_of(**{**fields, **given, "encoder": encoder})
    torch.manual_seed(1)
    theirs = their_network(topology, NNUNETS_AXES)
    theirs.decoder.deep_supervision = deep_supervision
    without_plain_numbers(theirs)
    ours = UNet3d(topology)
    weights = of_plan(theirs.state_dict(), topology, NNUNETS_AXES, "nnUNetTrainer")
    ours.load_state_dict(from_nnunet(weights, topology, NNUNETS_AXES))
    image = image_of(size)
    with torch.no_grad():
        expected, actual = theirs.double()(image), ours.double()(image)
    expected = expected if isinstance(expected, list) else [expected]
    actual = actual if isinstance(actual, tuple) else (actual,)
    # nnU-Net also has a head at the last level but one, with weight 0 in the loss.
    assert len(actual) == (max(len(expected) - 1, 1) if deep_supervision else 1)
    for own, wanted in zip(actual, expected, strict=False):
        assert (own - wanted).norm() <= TOLERANCE * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_a_bias_in_bfloat16_on_a_gpu_against_float64(encoder):
    """For maps that are large enough for every special case on a GPU."""
    topology = topology_of(encoder=encoder, channels=(32, 64), strides=(ONE, HALF))
    network = network_of(topology)
    with torch.no_grad():
        network.decoder.levels["0"]["up"].bias.mul_(10)
    image = image_of((64, 64, 64)).cuda()
    weights = {name: value.detach().cuda() for name, value in network.named_parameters()}
    (exact,) = Reference(topology, weights).logits(image)
    network = network.float().cuda().to(memory_format=torch.channels_last_3d)
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        logits = network(image.float().contiguous(memory_format=torch.channels_last_3d))
    logits = logits[0] if isinstance(logits, tuple) else logits
    face = (..., 0)
    assert (logits - exact).norm() <= 2e-2 * exact.norm()
    assert (logits - exact)[face].norm() <= 3e-2 * exact[face].norm()


def test_a_bias_of_the_upsampling_starts_at_zero_and_is_named():
    network = UNet3d(topology_of())
    biases = {n: p for n, p in network.named_parameters() if n.endswith("up.bias")}
    shapes = {name: tuple(value.shape) for name, value in biases.items()}
    assert shapes == {"decoder.levels.1.up.bias": (6,), "decoder.levels.0.up.bias": (4,)}
    assert not any(value.any() for value in biases.values())
