import pytest
import torch
from torch import nn

from tests.plain_network import assert_gradients, gradients_of, make_batch, make_network
from unet3d.errors import ConfigError
from unet3d.model import SegmentationLoss, SequentialNetwork, Topology, dice_cross_entropy
from unet3d.parallel import Layout, parallelize

CPU = torch.device("cpu")
DEEP = Topology(
    in_channels=2,
    num_classes=3,
    channels=(4, 4, 8, 8),
    strides=((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 1)),
    deep_supervision=True,
)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_frozen_encoder_is_passed_by(num_micro_batches):
    """As in fine-tuning: the first stage has nothing to learn."""
    model, plain = make_network(DEEP), make_network(DEEP)
    for one in (model, plain):
        one.encoder.requires_grad_(False)
    image, target = make_batch(3)
    layout = Layout(devices=(CPU, CPU), num_micro_batches=num_micro_batches)
    parallelize(model, layout).forward_backward(image, target, dice_cross_entropy)
    dice_cross_entropy(plain(image), target).total.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


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
    model, plain = make_network(DEEP), make_network(DEEP)
    image, target = make_batch(3)

    def fine_only(logits, target):
        return dice_cross_entropy(logits[0], target)

    parallelize(model, Layout(devices=(CPU, CPU))).forward_backward(image, target, fine_only)
    dice_cross_entropy(plain(image)[0], target).total.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))
