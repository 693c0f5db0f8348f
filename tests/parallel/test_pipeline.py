import pytest
import torch
from torch import Tensor, nn

from tests.plain_network import gradients_of
from unet3d.errors import ConfigError
from unet3d.model import (
    SegmentationLoss,
    SequentialNetwork,
    Topology,
    UNet3d,
    dice_cross_entropy,
)
from unet3d.parallel import Layout, parallelize

CPU = torch.device("cpu")
TOPOLOGY = Topology(
    in_channels=1,
    num_classes=3,
    channels=(4, 4, 8, 8),
    strides=((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2)),
    deep_supervision=True,
)


def network() -> UNet3d:
    torch.manual_seed(0)
    return UNet3d(TOPOLOGY).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(3, 1, 16, 16, 16, generator=generator, dtype=torch.float64)
    return image, torch.randint(0, 3, (3, 16, 16, 16), generator=generator)


def assert_same_gradients(model: UNet3d, plain: UNet3d) -> None:
    found, expected = gradients_of(model), gradients_of(plain)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() < 1e-9 * expected[name].norm().clamp_min(1e-8)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_frozen_encoder_is_passed_by(num_micro_batches):
    """As in fine-tuning: the first stage has nothing to learn."""
    model, plain = network(), network()
    for one in (model, plain):
        one.encoder.requires_grad_(False)
    image, target = batch()
    layout = Layout(devices=(CPU, CPU), num_micro_batches=num_micro_batches)
    parallelize(model, layout).forward_backward(image, target, dice_cross_entropy)
    dice_cross_entropy(plain(image), target).total.backward()
    assert_same_gradients(model, plain)


def test_dropout_cannot_pass_forward_twice():
    """Neither for batch Dice, nor where a level is recomputed."""

    def with_dropout():
        chain = nn.Sequential(nn.Conv3d(1, 3, 1), nn.Dropout3d(0.5), nn.Conv3d(3, 3, 1))
        return SequentialNetwork(chain, (1, 4, 4, 4))

    loss = SegmentationLoss(joins_samples=True)
    image = torch.randn(2, 1, 4, 4, 4)
    target = torch.zeros(2, 4, 4, 4, dtype=torch.uint8)
    once = parallelize(with_dropout(), Layout(devices=(CPU,)))
    assert once.forward_backward(image, target, loss).total.isfinite()
    twice = parallelize(with_dropout(), Layout(devices=(CPU,), num_micro_batches=2))
    with pytest.raises(ConfigError, match=r"dropout.*training\.batch_dice=false"):
        twice.forward_backward(image, target, loss)
    assert twice.forward_backward(image, target, dice_cross_entropy).total.isfinite()
    with pytest.raises(ConfigError, match="memory.recompute=norm"):
        parallelize(with_dropout(), Layout(devices=(CPU,), recompute="level"))


def test_a_loss_may_leave_out_a_result():
    model, plain = network(), network()
    image, target = batch()

    def fine_only(logits, target):
        return dice_cross_entropy(logits[0], target)

    parallelize(model, Layout(devices=(CPU, CPU))).forward_backward(image, target, fine_only)
    dice_cross_entropy(plain(image)[0], target).total.backward()
    assert_same_gradients(model, plain)
