import weakref

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
    """As in some fine-tuning, the first stage has no trainable parameters."""
    model, plain = make_network(DEEP), make_network(DEEP)
    for one in (model, plain):
        one.encoder.requires_grad_(False)
    image, target = make_batch(3)
    layout = Layout(devices=(CPU, CPU), num_micro_batches=num_micro_batches)
    parallelize(model, layout).forward_backward(image, target, dice_cross_entropy)
    dice_cross_entropy(plain(image), target).total.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


def test_dropout_cannot_pass_forward_twice():
    """Batch Dice and recomputed levels both need the same forward pass twice."""

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


class Unit(nn.Sequential):
    """A user's block, which is not divided further."""


def chain(inplace):
    """Return networks that begin with an activation, or have one before the last block."""
    torch.manual_seed(0)
    parts = (
        *(nn.ELU(inplace=inplace), nn.Conv3d(2, 4, 3, padding=1)),
        Unit(nn.ELU(inplace=inplace), nn.Conv3d(4, 3, 3, padding=1)),
    )
    return SequentialNetwork(nn.Sequential(*parts), (2, 16, 16, 8)).double()


@pytest.mark.parametrize(("cuts", "num_micro_batches"), [((), 1), ((), 3), ((2,), 1), ((2,), 3)])
def test_modules_in_place_change_neither_the_image_nor_what_others_read(cuts, num_micro_batches):
    devices = (CPU,) * (len(cuts) + 1)
    layout = Layout(devices=devices, cuts=cuts, num_micro_batches=num_micro_batches)
    model, plain = chain(inplace=True), chain(inplace=False)
    executor = parallelize(model, layout)
    image, target = make_batch(3)
    before = image.clone()
    executor.forward_backward(image, target, dice_cross_entropy)
    logits = executor.predict(image)
    assert torch.equal(image, before)
    dice_cross_entropy(plain(image), target).total.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))
    torch.testing.assert_close(logits, plain(image), rtol=1e-10, atol=1e-12)


class InPlace(nn.Module):
    """Changes its input in place, but does not declare it by a module's ``inplace``."""

    def forward(self, x):
        return x.mul_(2) + 1


@pytest.mark.parametrize(("place", "changed"), [(0, "image"), (1, "chain.0")])
def test_a_network_that_changes_what_others_read_is_refused_by_name(place, changed):
    parts = [nn.Conv3d(2, 2, 1), nn.Conv3d(2, 3, 1)]
    parts.insert(place, InPlace())
    network = SequentialNetwork(nn.Sequential(*parts), (2, 16, 16, 8)).double()
    executor = parallelize(network, Layout(devices=(CPU, CPU), cuts=(1,)))
    with pytest.raises(ConfigError, match=f"changes the tensor {changed} in place"):
        executor.forward_backward(*make_batch(1), dice_cross_entropy)


def test_a_step_that_fails_keeps_nothing_and_the_next_one_works():
    model, plain = make_network(DEEP), make_network(DEEP)
    executor = parallelize(model, Layout(devices=(CPU, CPU), num_micro_batches=3))
    image, target = make_batch(3)
    nodes = []

    def failing(logits, target):
        if len(nodes) == 2:
            raise ValueError("no loss")
        return dice_cross_entropy(logits, target)

    block = executor.stages[0].blocks[0].module
    hook = block.register_forward_hook(lambda _, inputs, made: nodes.append(weakref.ref(made)))
    with pytest.raises(ValueError, match="no loss"):
        executor.forward_backward(image, target, failing)
    hook.remove()
    assert len(nodes) == 2 and all(node() is None for node in nodes)
    model.zero_grad()
    executor.forward_backward(image, target, dice_cross_entropy)
    dice_cross_entropy(plain(image), target).total.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))
