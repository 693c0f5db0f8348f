import gc
import weakref
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.memory.saved_tensors import handling, storage_key
from unet3d.model import Topology, UNet3d
from unet3d.model.blocks import (
    Block,
    Conv3x3x3,
    ConvUnit,
    Head,
    ResidualUnit,
    Upsample,
    make_norm,
    run_blocks,
    run_levels,
)


class Add(nn.Module):
    """Adds its inputs and a number, and remembers which tensors were alive."""

    def __init__(self, number: float, seen: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.number = number
        self.seen = seen
        self.alive: list[bool] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        gc.collect()
        self.alive = [reference() is not None for reference in self.seen]
        out = sum(inputs) + self.number
        self.seen.append(weakref.ref(out))
        return out


def test_blocks_run_in_order_and_only_what_is_kept_comes_back() -> None:
    seen: list[weakref.ref[Tensor]] = []
    blocks = [
        Block(name="a", module=Add(1, seen), inputs=("image",)),
        Block(name="b", module=Add(10, seen), inputs=("a",)),
        Block(name="c", module=Add(100, seen), inputs=("a", "b")),
        Block(name="d", module=Add(1000, seen), inputs=("c", "image")),
    ]
    result = run_blocks(blocks, {"image": torch.zeros(2)}, ["d", "b"])
    assert {name: value.tolist() for name, value in result.items()} == {
        "b": [11.0, 11.0],
        "d": [1112.0, 1112.0],
    }


def test_a_tensor_is_freed_after_its_last_reader() -> None:
    seen: list[weakref.ref[Tensor]] = []
    modules = [Add(1, seen) for _ in range(5)]
    blocks = [
        Block(name="a", module=modules[0], inputs=("image",)),
        Block(name="b", module=modules[1], inputs=("a",)),
        Block(name="c", module=modules[2], inputs=("b",)),
        Block(name="d", module=modules[3], inputs=("a", "c", "a")),  # one that reads a tensor twice
        Block(name="e", module=modules[4], inputs=("d",)),
    ]
    run_blocks(blocks, {"image": torch.zeros(2)}, ["e"])
    assert modules[3].alive == [True, False, True]  # a is still to be read, b is not
    assert modules[4].alive == [False, False, False, True]


@pytest.mark.parametrize("run", [run_blocks, run_levels])
def test_the_caller_keeps_no_tensor_alive(run: Callable[..., dict[str, Tensor]]) -> None:
    tensors = {"image": torch.zeros(1)}
    made = run([Block(name="a", module=nn.Identity(), inputs=("image",))], tensors, ["a"])
    assert set(made) == {"a"}
    assert not tensors


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_running_by_level_keeps_only_what_enters_each_level(
    encoder: Literal["plain", "residual"],
) -> None:
    strides = ((1, 1, 1), (2, 2, 2), (2, 2, 1))
    topology = Topology(
        in_channels=2,
        num_classes=3,
        channels=(4, 8, 8),
        strides=strides,
        encoder=encoder,
        deep_supervision=True,
    )
    torch.manual_seed(0)
    model = UNet3d(topology).double()
    x = torch.randn(2, 2, 8, 12, 8, dtype=torch.float64)
    found = []
    for run in (run_blocks, run_levels):
        kept: list[Tensor] = []
        with handling(kept.append):
            made = run(model.blocks(), {"image": x}, model.outputs())
        wanted = list(model.parameters())
        total = sum(value.square().mean() for value in made.values())
        gradients = torch.autograd.grad(total, wanted)
        found.append((made, gradients, {storage_key(v): v.numel() for v in kept}))
    (made, gradients, all_kept), (made_again, gradients_again, kept_levels) = found
    assert list(made) == list(made_again)
    assert all(torch.equal(made[name], made_again[name]) for name in made)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    full, half, low = (2 * 8 * 12 * 8, 2 * 4 * 6 * 4, 2 * 2 * 3 * 4)
    # The image; both skips; what the lowest level, and the decoder's at half, hand up; what the
    # heads read is the last and one of those.
    expected = [2 * full, 4 * full, 8 * half, 8 * low, 8 * half, 4 * full]
    parameters = {storage_key(value) for value in model.parameters()}
    sizes = [size for key, size in kept_levels.items() if key not in parameters and size > 0]
    assert sorted(sizes) == sorted(expected)
    assert sum(sizes) < sum(size for key, size in all_kept.items() if key not in parameters) / 3


def image(channels: int = 3, size: tuple[int, int, int] = (6, 4, 8)) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, channels, *size, generator=generator, dtype=torch.float64)


def closed_form_instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean((2, 3, 4), keepdim=True)
    variance = ((x - mean) ** 2).mean((2, 3, 4), keepdim=True)
    shape = (1, -1, 1, 1, 1)
    return (x - mean) / (variance + 1e-5).sqrt() * weight.view(shape) + bias.view(shape)


def test_a_conv_unit_is_convolution_instance_norm_leaky_relu() -> None:
    unit = ConvUnit(in_channels=3, channels=4, stride=(2, 1, 2), norm="instance").double()
    nn.init.normal_(unit.norm.weight)
    nn.init.normal_(unit.norm.bias)
    x = image()
    plain = F.conv3d(x, unit.conv.weight, unit.conv.bias, (2, 1, 2), padding=1)
    normed = closed_form_instance_norm(plain, unit.norm.weight, unit.norm.bias)
    expected = torch.where(normed > 0, normed, 0.01 * normed)
    assert expected.shape == (2, 4, 3, 4, 4)
    torch.testing.assert_close(unit(x), expected)


def test_two_convolutions_that_are_added_are_one_over_both_inputs() -> None:
    skip, unit = (
        Conv3x3x3(2, 4).double(),
        ConvUnit(in_channels=3, channels=4, stride=(1, 1, 1), norm="instance").double(),
    )
    x = image(5)
    weight = torch.cat([skip.weight, unit.conv.weight], dim=1)
    plain = F.conv3d(x, weight, padding=1)
    expected = F.leaky_relu(
        closed_form_instance_norm(plain, unit.norm.weight, unit.norm.bias), 0.01
    )
    torch.testing.assert_close(unit(x[:, 2:], skip(x[:, :2])), expected)


def test_a_residual_unit_adds_its_input() -> None:
    unit = ResidualUnit(3, 3, (1, 1, 1), "instance").double()
    nn.init.zeros_(unit.norm.weight)  # what is added is then nothing
    x = image()
    torch.testing.assert_close(unit(x), F.leaky_relu(x, 0.01))


def test_a_residual_unit_averages_and_projects_where_the_shape_changes() -> None:
    unit = ResidualUnit(3, 5, (2, 2, 1), "instance").double()
    nn.init.zeros_(unit.norm.weight)
    x = image()
    projection, norm = unit.shortcut[1]
    averaged = x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    projected = torch.einsum("nixyz,oi->noxyz", averaged, projection.weight[:, :, 0, 0, 0])
    expected = F.leaky_relu(closed_form_instance_norm(projected, norm.weight, norm.bias), 0.01)
    torch.testing.assert_close(unit(x), expected)


def test_an_input_is_not_changed_by_the_in_place_activation() -> None:
    for unit in (
        ConvUnit(in_channels=3, channels=3, stride=(1, 1, 1), norm="group"),
        ResidualUnit(3, 3, (1, 1, 1), "instance"),
    ):
        x = image()
        before = x.clone()
        unit.double()(x)
        assert torch.equal(x, before)


def test_upsampling_makes_each_voxel_a_small_block() -> None:
    up = Upsample(3, 2, (2, 1, 2)).double()
    x = image()
    out = up(x)
    assert out.shape == (2, 2, 12, 4, 16)
    for i, j, k in ((0, 0, 0), (1, 0, 0), (1, 0, 1)):
        expected = torch.einsum("nixyz,io->noxyz", x, up.weight[:, :, i, j, k])
        torch.testing.assert_close(out[:, :, i::2, j::1, k::2], expected)


def test_a_head_mixes_channels_only() -> None:
    head = Head(3, 2).double()
    x = image()
    expected = torch.einsum("nixyz,oi->noxyz", x, head.weight[:, :, 0, 0, 0])
    torch.testing.assert_close(head(x), expected + head.bias.view(1, -1, 1, 1, 1))


@pytest.mark.parametrize(("channels", "num_groups"), [(32, 8), (12, 4), (6, 2), (5, 1)])
def test_group_norm_takes_groups_that_divide(channels: int, num_groups: int) -> None:
    norm, _ = make_norm("group", channels, activated=True)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == num_groups


def test_only_batch_norm_mixes_samples() -> None:
    for name, mixes in (("instance", False), ("group", False), ("batch", True)):
        unit = ConvUnit(in_channels=3, channels=4, stride=(1, 1, 1), norm=name).double()
        x = image()
        together, alone = unit(x)[:1], unit(x[:1])
        assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12) != mixes, name
