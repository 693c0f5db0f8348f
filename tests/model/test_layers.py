from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet3d.model.layers import (
    Convolution,
    ConvUnit,
    Head,
    HeadUnit,
    ResidualUnit,
    Upsample,
    UpsampledUnit,
)
from unet3d.model.norms import Norm, make_norm

Kind = Literal["instance", "group", "batch"]


def image(channels: int = 3, size: tuple[int, int, int] = (6, 4, 8)) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, channels, *size, generator=generator, dtype=torch.float64)


def closed_form_instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean((2, 3, 4), keepdim=True)
    variance = ((x - mean) ** 2).mean((2, 3, 4), keepdim=True)
    shape = (1, -1, 1, 1, 1)
    return (x - mean) / (variance + 1e-5).sqrt() * weight.view(shape) + bias.view(shape)


def test_a_conv_unit_is_convolution_instance_norm_leaky_relu() -> None:
    unit = ConvUnit(in_channels=3, channels=4, stride=(2, 1, 2), norm=Norm()).double()
    nn.init.normal_(unit.norm.weight)
    nn.init.normal_(unit.norm.bias)
    x = image()
    plain = F.conv3d(x, unit.conv.weight, unit.conv.bias, (2, 1, 2), padding=1)
    normed = closed_form_instance_norm(plain, unit.norm.weight, unit.norm.bias)
    expected = torch.where(normed > 0, normed, 0.01 * normed)
    assert expected.shape == (2, 4, 3, 4, 4)
    torch.testing.assert_close(unit(x), expected)


@pytest.mark.parametrize("kind", ["instance", "batch"])
def test_an_upsampled_unit_is_one_convolution_of_what_is_joined(kind: Kind) -> None:
    stride = (2, 1, 2)
    skip, up, unit = (
        Convolution(2, 4).double(),
        Upsample(6, 3, stride).double(),
        ConvUnit(in_channels=3, channels=4, stride=(1, 1, 1), norm=Norm(kind=kind)).double(),
    )
    low, high = image(6, (3, 4, 4)), image(2)
    weight = torch.cat([unit.conv.weight, skip.weight], dim=1)
    joined = torch.cat([F.conv_transpose3d(low, up.weight, stride=stride), high], 1)
    plain = F.conv3d(joined, weight, padding=1)
    if kind == "instance":
        normed = closed_form_instance_norm(plain, unit.norm.weight, unit.norm.bias)
    else:
        normed = F.batch_norm(plain, None, None, training=True)
    actual = UpsampledUnit(up, unit)(low, skip(high))
    torch.testing.assert_close(actual, F.leaky_relu(normed, 0.01))


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_a_head_unit_is_its_unit_and_its_head(kind: Kind) -> None:
    unit = ConvUnit(in_channels=3, channels=4, stride=(1, 1, 1), norm=Norm(kind=kind)).double()
    head = Head(4, 2).double()
    nn.init.normal_(head.bias)
    x = image()
    expected = F.conv3d(unit(x), head.weight, head.bias)
    torch.testing.assert_close(HeadUnit(unit, head)(x), expected)


def test_a_residual_unit_adds_its_input() -> None:
    unit = ResidualUnit(in_channels=3, channels=3, stride=(1, 1, 1), norm=Norm()).double()
    nn.init.zeros_(unit.norm.weight)  # what is added is then nothing
    x = image()
    torch.testing.assert_close(unit(x), F.leaky_relu(x, 0.01))


def test_a_residual_unit_averages_and_projects_where_the_shape_changes() -> None:
    unit = ResidualUnit(in_channels=3, channels=5, stride=(2, 2, 1), norm=Norm()).double()
    nn.init.zeros_(unit.norm.weight)
    x = image()
    projection, norm = unit.shortcut[1]
    averaged = x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    projected = torch.einsum("nixyz,oi->noxyz", averaged, projection.weight[:, :, 0, 0, 0])
    expected = F.leaky_relu(closed_form_instance_norm(projected, norm.weight, norm.bias), 0.01)
    torch.testing.assert_close(unit(x), expected)


def test_an_input_is_not_changed_by_the_in_place_activation() -> None:
    for unit in (
        ConvUnit(in_channels=3, channels=3, stride=(1, 1, 1), norm=Norm(kind="group")),
        ResidualUnit(in_channels=3, channels=3, stride=(1, 1, 1), norm=Norm()),
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
    norm, _ = make_norm(Norm(kind="group"), channels, activated=True)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == num_groups


def test_only_batch_norm_mixes_samples() -> None:
    for name, mixes in (("instance", False), ("group", False), ("batch", True)):
        unit = ConvUnit(in_channels=3, channels=4, stride=(1, 1, 1), norm=Norm(kind=name)).double()
        x = image()
        together, alone = unit(x)[:1], unit(x[:1])
        assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12) != mixes, name
