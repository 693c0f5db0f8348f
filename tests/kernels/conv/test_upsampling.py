"""Upsampling and the convolution behind it, computed as one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conv.maps import tensor
from unet3d.kernels import padding, upsampled_conv3x3x3
from unet3d.kernels.conv import api, folded
from unet3d.kernels.conv.folded import ComposedUpsampling, composed_kernel
from unet3d.kernels.pad import padded_copy
from unet3d.kernels.padding import has_room, mark_padded, was_folded

Stride = tuple[int, int, int]
STRIDES = [(2, 2, 2), (1, 2, 2), (2, 1, 2)]


def weights(inputs: int, outputs: int, stride: Stride) -> tuple[Tensor, Tensor]:
    return tensor(inputs, 3, *stride, seed=1), tensor(outputs, 3, 3, 3, 3, seed=2)


def plain(x: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    stride = tuple(up.shape[2:])
    return F.conv3d(F.conv_transpose3d(x, up, stride=stride), weight, padding=1)


def composed(x: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    kernel = composed_kernel(up, weight)
    return ComposedUpsampling.apply(x, kernel, tuple(up.shape[2:]), (1, 1))


def results(function: object, values: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, a, b in zip(("y", "x", "up", "weight"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stride", [*STRIDES, (2, 2, 1), (3, 1, 1)], ids=str)
def test_the_kernel_of_both_is_exact(stride: Stride) -> None:
    up, weight = weights(4, 5, stride)
    x = tensor(2, 4, 3, 4, 2)
    y = F.conv_transpose3d(x, composed_kernel(up, weight), stride=stride, padding=1)
    torch.testing.assert_close(y, plain(x, up, weight), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("pads_dy", [False, True])
@pytest.mark.parametrize("outputs", [8, 40])
@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("size", [(1, 3, 4, 2), (2, 2, 1, 5)], ids=str)
def test_both_are_one_transposed_convolution(
    size: tuple[int, ...], stride: Stride, outputs: int, pads_dy: bool
) -> None:
    n, *space = size
    x, (up, weight) = tensor(n, 6, *space), weights(6, outputs, stride)
    dy = tensor(*plain(x, up, weight).shape, seed=9)
    expected = results(plain, [x, up, weight], dy)
    given = mark_padded(padded_copy(dy)) if pads_dy else dy
    assert_same(results(composed, [x, up, weight], given), expected)


def test_second_derivatives_are_refused() -> None:
    x, (up, weight) = tensor(1, 6, 3, 4, 2).requires_grad_(), weights(6, 8, (2, 2, 2))
    y = composed(x, up, weight)
    (dx,) = torch.autograd.grad(y, x, tensor(*y.shape).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("outputs", [8, 40])
def test_slabs_of_it_are_the_whole(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, (up, weight) = tensor(1, 6, 7, 2, 3), weights(6, outputs, (2, 2, 2))
    dy = tensor(*plain(x, up, weight).shape, seed=9)
    expected = results(plain, [x, up, weight], dy)
    monkeypatch.setattr(folded.slabs, "MAX_ELEMENTS", 900)
    assert_same(results(composed, [x, up, weight], dy), expected)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose maps of any size and type."""
    for module in (api, padding):
        monkeypatch.setattr(module, "is_gpu", lambda device: True)
    monkeypatch.setattr(api, "MIN_COMPOSED_ELEMENTS", 0)
    monkeypatch.setattr(api, "MIN_COMPOSED_VOXELS", 0)
    monkeypatch.setattr(api.slabs, "lowered", lambda x: torch.bfloat16)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("stride", "outputs", "is_composed"),
    [((2, 2, 2), 8, True), ((1, 2, 2), 8, True), ((2, 2, 1), 8, False), ((2, 2, 2), 4, False)],
)
def test_what_is_worth_composing(stride: Stride, outputs: int, is_composed: bool) -> None:
    x, (up, weight) = tensor(1, 6, 3, 4, 2), weights(6, outputs, stride)
    assert api._composes(x, up, weight) == is_composed


@pytest.mark.usefixtures("as_on_a_gpu")
def test_small_maps_of_many_channels_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x, (up, weight) = tensor(2, 6, 3, 4, 2), weights(6, 8, (2, 2, 2))
    voxels = 2 * 6 * 8 * 4
    for name, most in (("MIN_COMPOSED_VOXELS", voxels // 6), ("MIN_COMPOSED_ELEMENTS", 8 * voxels)):
        monkeypatch.setattr(api, name, most)
        assert api._composes(x, up, weight)
        monkeypatch.setattr(api, name, most + 1)
        assert not api._composes(x, up, weight)
        monkeypatch.setattr(api, name, 0)


def test_a_cpu_composes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MIN_COMPOSED_ELEMENTS", 0)
    monkeypatch.setattr(api, "MIN_COMPOSED_VOXELS", 0)
    assert not api._composes(tensor(1, 6, 3, 4, 2), *weights(6, 8, (2, 2, 2)))


@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("is_composed", [False, True])
def test_shards_with_a_plane_of_their_neighbours_are_the_whole(
    is_composed: bool, stride: Stride, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slabs of the coarse map, each with one plane of its neighbours'."""
    monkeypatch.setattr(api, "_composes", lambda *_: is_composed)
    x, (up, weight) = tensor(1, 6, 9, 2, 3), weights(6, 8, stride)

    def in_shards(x: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        parts = ((x[:, :, :4], (1, 0)), (x[:, :, 2:7], (0, 0)), (x[:, :, 5:], (0, 1)))
        return torch.cat(
            [upsampled_conv3x3x3(v, up, weight, stride, x_padding=sides) for v, sides in parts], 2
        )

    dy = tensor(*plain(x, up, weight).shape, seed=9)
    assert_same(results(in_shards, [x, up, weight], dy), results(plain, [x, up, weight], dy))


@pytest.mark.parametrize(("outputs", "has"), [(32, True), (64, False)])
def test_few_channels_leave_room_around(
    outputs: int, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_composes", lambda *_: True)
    x, (up, weight) = tensor(1, 6, 3, 4, 2), weights(6, outputs, (2, 2, 2))
    y = upsampled_conv3x3x3(x, up, weight, (2, 2, 2))
    assert has_room(y) == was_folded(y) == has


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(64, 32, 48), (128, 64, 32), (64, 8, 50)])
def test_bfloat16_on_a_gpu_against_float64(inputs: int, outputs: int, size: int) -> None:
    x, (up, weight) = tensor(2, inputs, size, size, size), weights(inputs, outputs, (2, 2, 2))
    values = [(v / v.std() / 8).cuda() for v in (x, up, weight)]
    values[0] = values[0].bfloat16()
    assert api._composes(*values)
    dy = tensor(2, outputs, 2 * size, 2 * size, 2 * size, seed=9).cuda().bfloat16()
    actual = results(lambda *v: upsampled_conv3x3x3(*v, (2, 2, 2)), values, dy)
    exact = results(plain, [value.double() for value in values], dy.double())
    for a, b in zip(actual, exact, strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()
