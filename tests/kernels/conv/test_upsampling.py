"""Upsampling and the next convolution, computed as one."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, assert_same, in_slabs, padded, results, tensor
from tests.products import each_value
from unet3d.kernels import upsampled_conv3x3x3
from unet3d.kernels.conv import api, slabs
from unet3d.kernels.conv.folded import ComposedUpsampling, composed_kernel
from unet3d.kernels.maps import has_room, was_folded

STRIDES = [(2, 2, 2), (1, 2, 2), (2, 1, 2)]


def weights(inputs, outputs, stride):
    return tensor(inputs, 3, *stride, seed=1), tensor(outputs, 3, 3, 3, 3, seed=2)


def plain(x, up, weight):
    stride = tuple(up.shape[2:])
    return F.conv3d(F.conv_transpose3d(x, up, stride=stride), weight, padding=1)


def composed(x, up, weight, in_pairs=True):
    kernel, stride = composed_kernel(up, weight), tuple(up.shape[2:])
    if in_pairs:
        return ComposedUpsampling.apply(x, kernel, stride, 1)
    return slabs.upsample(x, kernel, stride, (1, 1, 1))


@pytest.mark.parametrize("stride", [*STRIDES, (2, 2, 1), (3, 1, 1)], ids=str)
def test_the_kernel_of_both_is_exact(stride):
    up, weight = weights(4, 5, stride)
    x = tensor(2, 4, 3, 4, 2)
    y = F.conv_transpose3d(x, composed_kernel(up, weight), stride=stride, padding=1)
    assert_same([y], [plain(x, up, weight)])


@each_value(
    size=[(1, 3, 4, 2), (2, 2, 1, 5), (1, 7, 2, 3)],
    stride=STRIDES,
    outputs=[8, 40],
    in_pairs=[False, True],
    pads_dy=[False, True],
    limit=[900, slabs.MAX_ELEMENTS],
)
def test_both_are_one_transposed_convolution(
    size, stride, outputs, in_pairs, pads_dy, limit, monkeypatch
):
    n, *space = size
    values = [tensor(n, 6, *space), *weights(6, outputs, stride)]
    expected = results(plain, values)
    dy = tensor(*expected[0].shape, seed=9)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    made = results(partial(composed, in_pairs=in_pairs), values, padded(dy) if pads_dy else dy)
    assert_same(made, expected)


def test_second_derivatives_are_refused():
    x, (up, weight) = tensor(1, 6, 3, 4, 2).requires_grad_(), weights(6, 8, (2, 2, 2))
    y = composed(x, up, weight)
    (dx,) = torch.autograd.grad(y, x, tensor(*y.shape).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("shape", "stride", "outputs", "device", "is_composed"),
    [
        # Results of 2^17 voxels: the fewest elements with 8 outputs, and the fewest voxels with 256
        # input channels.
        ((1, 256, 16, 32, 32), (2, 2, 2), 8, "cpu:0", True),
        ((2, 256, 16, 32, 32), (1, 2, 2), 32, "cpu:0", True),
        ((1, 64, 16, 32, 32), (2, 2, 2), 64, "cpu:0", True),
        ((1, 257, 16, 32, 32), (2, 2, 2), 8, "cpu:0", False),
        ((1, 8, 16, 32, 31), (2, 2, 2), 8, "cpu:0", False),
        ((1, 8, 64, 32, 32), (2, 2, 2), 7, "cpu:0", False),
        ((1, 8, 64, 32, 32), (2, 2, 1), 8, "cpu:0", False),
        # On a CPU in every type: half as many voxels, and a kernel for which PyTorch always uses
        # oneDNN.
        ((1, 256, 8, 32, 32), (2, 2, 2), 4, "cpu", True),
        ((2, 256, 8, 32, 32), (1, 2, 2), 32, "cpu", True),
        ((1, 257, 8, 32, 32), (2, 2, 2), 4, "cpu", False),
        ((1, 8, 64, 32, 32), (2, 1, 2), 8, "cpu", False),
    ],
)
def test_what_is_worth_composing(shape, stride, outputs, device, is_composed, monkeypatch):
    """Large maps are; on a GPU (here ``cpu:0``) results of few channels have room around Z."""
    made = list[torch.Tensor]()

    def noted(*weights):
        made.append(composed_kernel(*weights))
        return made[-1]

    monkeypatch.setattr(api, "composed_kernel", noted)
    for dtype in (torch.bfloat16, torch.float32):
        made.clear()
        with FakeTensorMode():
            x = torch.empty(shape, device=device, dtype=dtype)
            up = torch.empty(shape[1], 3, *stride, device=device, dtype=dtype)
            weight = torch.empty(outputs, 3, 3, 3, 3, device=device, dtype=dtype)
            y = upsampled_conv3x3x3(x, up.requires_grad_(), weight, stride)
        on_gpu = device != "cpu"
        is_one = is_composed and (dtype == torch.bfloat16 or not on_gpu)
        assert y.grad_fn is not None and len(made) == is_one
        if is_one:
            assert ("Composed" in y.grad_fn.name()) == on_gpu
            assert has_room(y) == was_folded(y) == (on_gpu and outputs <= 32)


@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("is_composed", [False, True])
def test_shards_with_a_plane_of_their_neighbours_are_the_whole(is_composed, stride, monkeypatch):
    """Three slabs of the coarse map, each with its neighbours' planes."""
    # A private name: maps of this size would not be composed.
    monkeypatch.setattr(api, "_composes", lambda *_: is_composed)
    values = [tensor(1, 6, 9, 2, 3), *weights(6, 8, stride)]

    def in_shards(x, up, weight):
        return in_slabs(lambda x: upsampled_conv3x3x3(x, up, weight, stride), x, (0, 3, 6, 9))

    assert_same(results(in_shards, values), results(plain, values))


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs", "size"), [(64, 32, 48), (128, 64, 32), (64, 8, 50)])
def test_bfloat16_on_a_gpu_against_float64(inputs, outputs, size):
    x, (up, weight) = tensor(2, inputs, size, size, size), weights(inputs, outputs, (2, 2, 2))
    values = [(v / v.std() / 8).cuda() for v in (x, up, weight)]
    values[0] = values[0].bfloat16()
    dy = tensor(2, outputs, 2 * size, 2 * size, 2 * size, seed=9).cuda().bfloat16()

    def together(x, up, weight):
        y = upsampled_conv3x3x3(x, up, weight, (2, 2, 2))
        assert "Composed" in y.grad_fn.name()
        return y

    exact = results(plain, [value.double() for value in values], dy.double())
    assert_near(results(together, values, dy), exact, 1e-2)
