"""Padding that differs before and behind along X, as a shard of a volume has it."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conv.maps import tensor
from unet3d.kernels import conv3x3x3, strided_conv3x3x3
from unet3d.kernels.conv import api, slabs
from unet3d.kernels.conv.folded import FoldedConvolution
from unet3d.kernels.pad import padded_copy
from unet3d.kernels.padding import mark_padded

Sides = tuple[int, int]
SIDES = [(1, 0), (0, 1), (0, 0), (1, 1), (2, 0), (2, 1)]


def value_and_gradients(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
) -> list[Tensor]:
    # A mark of zeros around is on the tensor itself, so it is not detached.
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), tensor(*y.shape, seed=9))]


def plain(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple) -> Tensor:
    sides, *in_plane = padding
    return F.conv3d(F.pad(x, (0, 0, 0, 0, *sides)), weight, None, stride, (0, *in_plane))


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("y", "x", "weight"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("limit", [60, 200, 10**6])
@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "sides"), [(k, sides) for k in (2, 3) for sides in SIDES if max(sides) < k]
)
def test_each_side_has_its_padding(
    kernel: int,
    stride: tuple[int, int, int],
    sides: Sides,
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    for samples, size in product((1, 2), (2, 5, 8)):
        if size + sum(sides) < kernel:
            continue
        x, weight = tensor(samples, 2, size, 4, 3), tensor(3, 2, *(kernel,) * 3, seed=1)
        padding = (sides, 1, 0)
        expected = value_and_gradients(lambda x, w, p=padding: plain(x, w, stride, p), x, weight)
        given = value_and_gradients(
            lambda x, w, p=padding: slabs.convolve(x, w, stride, p), x, weight
        )
        assert_same(given, expected)
        dy = tensor(*expected[0].shape, seed=9)
        with torch.no_grad():
            direct = [
                slabs.input_gradient(dy, x, weight, stride, padding),
                slabs.weight_gradient(dy, x, weight, stride, padding),
            ]
        assert_same([given[0], *direct], expected)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (8, 40), (40, 8)])
def test_folded_convolutions_have_it_too(
    inputs: int, outputs: int, sides: Sides, is_padded: bool
) -> None:
    x, weight = tensor(2, inputs, 5, 3, 4), tensor(outputs, inputs, 3, 3, 3, seed=1)
    padding = (sides, 1, 1)
    expected = value_and_gradients(lambda x, w: plain(x, w, (1, 1, 1), padding), x, weight)
    x = mark_padded(padded_copy(x.detach())) if is_padded else x.detach()
    actual = value_and_gradients(lambda x, w: FoldedConvolution.apply(x, w, sides), x, weight)
    assert_same(actual, expected)


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("pads_dy", [False, True])
def test_a_padded_gradient_finds_the_same_weights(sides: Sides, pads_dy: bool) -> None:
    x, weight = tensor(1, 8, 5, 3, 4), tensor(8, 8, 3, 3, 3, seed=1).requires_grad_()
    y = FoldedConvolution.apply(x, weight, sides)
    dy = tensor(*y.shape, seed=9)
    (expected,) = torch.autograd.grad(plain(x, weight, (1, 1, 1), (sides, 1, 1)), weight, dy)
    (actual,) = torch.autograd.grad(y, weight, mark_padded(padded_copy(dy)) if pads_dy else dy)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_strided_convolutions_have_it_too(sides: Sides, is_padded: bool) -> None:
    stride = (2, 2, 2)
    x, weight = tensor(2, 8, 6, 3, 4), tensor(5, 8, 3, 3, 3, seed=1)
    expected = value_and_gradients(lambda x, w: plain(x, w, stride, (sides, 1, 1)), x, weight)
    x = mark_padded(padded_copy(x.detach())) if is_padded else x.detach()
    actual = value_and_gradients(
        lambda x, w: strided_conv3x3x3(x, w, stride, x_padding=sides), x, weight
    )
    assert_same(actual, expected)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_shards_with_halos_are_the_whole_convolution(
    stride: int, folds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slabs of a volume, each with its neighbours' planes, or zeros at the volume's edge."""
    monkeypatch.setattr(api, "can_fold", lambda *_: folds)
    x, weight = tensor(1, 8, 12, 3, 4), tensor(8, 8, 3, 3, 3, seed=1)

    def convolve(x: Tensor, weight: Tensor, sides: Sides) -> Tensor:
        if stride == 1:
            return conv3x3x3(x, weight, x_padding=sides)
        return strided_conv3x3x3(x, weight, (stride,) * 3, x_padding=sides)

    def in_shards(x: Tensor, weight: Tensor) -> Tensor:
        after = 1 if stride == 1 else 0  # the plane behind is not read at stride 2
        return torch.cat(
            [
                convolve(x[:, :, : 4 + after], weight, (1, 0)),
                convolve(x[:, :, 3 : 8 + after], weight, (0, 0)),
                convolve(x[:, :, 7:], weight, (0, 1)),
            ],
            2,
        )

    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, None, stride, 1), x, weight)
    assert_same(value_and_gradients(in_shards, x, weight), expected)
