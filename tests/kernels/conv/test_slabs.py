import math
from collections import Counter
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.comparison import (
    LAYOUTS,
    assert_near,
    assert_same,
    channels_last,
    results,
    tensor,
)
from tests.products import each_value
from unet3d.kernels import conv1x1x1, conv3x3x3, upsampled_conv3x3x3
from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.api import upsample
from unet3d.kernels.conv.planes import Axis
from unet3d.memory.allocations import counted_allocations


class ConvolutionCalls(TorchDispatchMode):
    """Counts the calls of PyTorch's convolutions, and records inputs and the largest tensor."""

    def __init__(self):
        super().__init__()
        self.count, self.largest, self.read = Counter(), 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("convolution", "convolution_backward"):
            self.count[name] += 1
            self.read.add(args[0].untyped_storage().data_ptr())
            made = result if isinstance(result, tuple) else (result,)
            tensors = [value for value in (*args, *made) if isinstance(value, Tensor)]
            self.largest = max(self.largest, *(value.numel() for value in tensors))
        return result


SIZES = [(1, 12, 4, 5), (1, 13, 4, 5), (2, 12, 4, 5), (2, 9, 6, 4), (1, 2, 9, 9), (1, 1, 9, 9)]
STRIDES = [(1, 1, 1), (2, 2, 2), (1, 2, 2), (2, 1, 1)]


@each_value(
    layout=LAYOUTS,
    stride=STRIDES,
    size=SIZES,
    padding=[(1, 1, 1), (0, 1, 0)],
    in_place=[False, True],
)
def test_convolutions_in_slabs_are_the_whole_ones(
    size, stride, layout, padding, in_place, monkeypatch
):
    """Also as on a GPU, where cuDNN writes results in place, and a kernel copies planes."""
    n, *space = size
    if space[0] + 2 * padding[0] < 3:
        return
    x = tensor(n, 3, *space).contiguous(memory_format=layout)
    weight = tensor(4, 3, 3, 3, 3, seed=1)
    expected = results(lambda x, w: F.conv3d(x, w, None, stride, padding), [x, weight])
    if in_place:
        monkeypatch.setattr(slabs, "is_gpu", lambda device: True)
        monkeypatch.setattr(slabs, "_LOW_TYPES", (torch.float64,))
    for limit in (60, 150, 300, 420):
        monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
        with ConvolutionCalls() as calls:
            actual = results(lambda x, w: slabs.convolve(x, w, stride, padding), [x, weight])
        assert_same(actual, expected, 1e-12)
        of_one = {"convolution": 1, "convolution_backward": 1}
        assert actual[0].is_contiguous(memory_format=LAYOUTS[1]) or calls.count == of_one
        # A call needs four planes with their neighbours at least.
        plane = math.prod(space[1:]) * 4
        assert calls.largest <= max(limit, 5 * plane)


@pytest.mark.parametrize(("kernel", "stride"), list(product((1, 2, 3, 4), (1, 2, 3))))
def test_planes_that_are_read_and_made_are_those_that_are_counted(kernel, stride):
    for size, padding in product((1, 2, 3, 5, 8, 9), range(kernel)):
        axis = Axis(size, kernel, stride, padding)
        if size + 2 * padding < kernel or stride > kernel:
            continue
        read = [range(y * stride - padding, y * stride - padding + kernel) for y in range(size + 9)]
        made = [one for one in read if one.stop <= size + padding]
        assert axis.result == len(made)
        zeros = [one.start < 0 or one.stop > size for one in made]
        assert [y not in axis.inside() for y in range(len(made))] == zeros
        for first, stop in combinations(range(len(made) + 1), 2):
            assert axis.read_by(range(first, stop)) == range(made[first].start, made[stop - 1].stop)
        for first, stop in combinations(range(size + 1), 2):
            reads = [y for y, one in enumerate(made) if one.start < stop and one.stop > first]
            assert list(axis.readers_of(range(first, stop))) == reads


@each_value(
    stride=[(2, 2, 2), (1, 2, 2), (3, 1, 2)],
    size=[(1, 6, 3, 2), (1, 7, 3, 2), (2, 6, 3, 2), (1, 1, 4, 4)],
    limit=[60, 100, 250],
)
def test_transposed_convolutions_in_slabs_are_the_whole_ones(size, stride, limit, monkeypatch):
    n, *space = size
    values = [tensor(n, 4, *space), tensor(4, 3, *stride, seed=1)]
    expected = results(lambda x, w: F.conv_transpose3d(x, w, stride=stride), values)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    assert_same(results(lambda x, w: slabs.upsample(x, w, stride), values), expected, 1e-12)


@each_value(size=[(1, 4, 3, 2), (2, 7, 2, 3)], left_out=[1, 3], limit=[60, 200, 500])
def test_transposed_convolutions_leave_planes_out(size, left_out, limit, monkeypatch):
    n, *space = size
    x, weight = tensor(n, 4, *space), tensor(4, 3, 4, 4, 2, seed=1)
    expected = F.conv_transpose3d(x, weight, stride=(2, 2, 1), padding=(left_out, 1, 0))
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    actual = slabs.transposed(x, weight, (2, 2, 1), (left_out, 1, 0))
    assert_same([actual], [expected], 1e-12)


@pytest.mark.parametrize(("kernel", "size"), [(1, 7), (1, 8), (2, 9)])
def test_planes_without_a_reader_have_no_gradient(kernel, size, monkeypatch):
    """A stride above the kernel skips planes of the input."""
    x, weight = tensor(2, 3, size, 4, 4), tensor(4, 3, kernel, 1, 1, seed=1)
    stride = (kernel + 1, 2, 2)
    expected = results(lambda x, w: F.conv3d(x, w, stride=stride), [x, weight])
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 60)
    made = slabs.empty_channels_last
    monkeypatch.setattr(
        slabs, "empty_channels_last", lambda shape, like: made(shape, like).fill_(torch.nan)
    )
    assert_same(
        results(lambda x, w: slabs.convolve(x, w, stride, (0, 0, 0)), [x, weight]), expected
    )


def test_slabs_are_few_equal_and_below_the_limit(monkeypatch):
    x, weight = tensor(1, 2, 40, 5, 5), tensor(2, 2, 3, 3, 3)  # 50 elements in a plane
    given = (x, weight, (1, 1, 1), (1, 1, 1))
    y = slabs.convolve(*given)
    # A slab of at most 1050 elements has 21 planes: half of the inner planes and two neighbours.
    # The planes at both ends are further slabs.
    for limit, function, values, name, count, largest in [
        (1050, slabs.convolve, given, "convolution", 2 + 2, 1050),
        (1150, slabs.transposed, (y, *given[1:]), "convolution", 2, 1150),
        (1050, slabs.weight_gradient, (y, *given), "convolution_backward", 2 + 2, 1050),
        (1049, slabs.convolve, given, "convolution", 3 + 2, 50 * 15),
    ]:
        monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
        with ConvolutionCalls() as calls:
            function(*values)
        assert calls.count == {name: count}
        assert calls.largest == largest
        # Slabs are views of the input, not copies.
        if function is slabs.convolve:
            assert values[0].untyped_storage().data_ptr() in calls.read
            assert len(calls.read) <= 3  # the two end slabs are copies with zeros
    x = tensor(2, 2, 6, 4, 4)
    # Above the limit, a call for each of two samples, forward and for each gradient.
    for limit, count in [
        (x.numel(), {"convolution": 1, "convolution_backward": 1}),
        (x.numel() // 2, {"convolution": 4, "convolution_backward": 2}),
    ]:
        monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
        with ConvolutionCalls() as calls:
            results(lambda x, w: slabs.convolve(x, w, (1, 1, 1), (1, 1, 1)), [x, weight])
        assert calls.count == count


def test_autocast_lowers_what_is_in_slabs(monkeypatch):
    x, weight = tensor(1, 2, 8, 4, 4).float(), tensor(2, 2, 3, 3, 3).float().requires_grad_()
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 100)
    with torch.autocast("cpu", torch.bfloat16):
        y = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
        exact = slabs.convolve(x.double(), weight.double(), (1, 1, 1), (1, 1, 1))
        # With fake tensors, because some CPUs lack the instructions to compute this in bfloat16.
        with FakeTensorMode(allow_non_fake_inputs=True):
            up = slabs.upsample(x, weight[..., :2, :2, :2], (2, 2, 2))
    assert (y.dtype, up.dtype, exact.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_the_weights_of_many_slabs_are_summed_in_float32(monkeypatch):
    # The sum is 1 + 512 x 2^-8 = 3, but in bfloat16 1 + 2^-8 is rounded to 1.
    x = torch.full((1, 1, 513, 1, 1), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0, 0] = 1
    weight = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 1)
    total = slabs.weight_gradient(torch.ones_like(x), x, weight, (1, 1, 1), (0, 0, 0))
    assert total.item() == 3


def test_on_a_gpu_there_is_no_copy_of_what_is_computed(monkeypatch):
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 2**19)
    gpu = torch.device("cpu", 1)  # stands for a GPU
    peaks = {}
    for dtype in (torch.bfloat16, torch.float32):
        with counted_allocations() as recorder:
            x = channels_last(torch.empty((1, 32, 64, 32, 32), dtype=dtype, device=gpu))
            weight = torch.empty((32, 32, 3, 3, 3), dtype=dtype, device=gpu)
            before = recorder.now[gpu]
            recorder.peak[gpu] = before
            y = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
            plane = x.nbytes // 64
            peaks[dtype] = (recorder.peak[gpu] - before - y.nbytes) / plane
    assert peaks[torch.bfloat16] <= 3  # the padded planes at the ends
    assert peaks[torch.float32] > 10


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
def test_cudnn_writes_planes_to_their_place(padding, stride, monkeypatch):
    x, weight = tensor(2, 32, 37, 24, 20), tensor(32, 32, 3, 3, 3, seed=1) * 0.03
    x, weight = x.to("cuda", torch.bfloat16), weight.to("cuda", torch.bfloat16)
    given = (None, (stride, 1, 1), (padding, 1, 1))
    expected = F.conv3d(x.double(), weight.double(), *given)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 150_000)
    monkeypatch.delattr(slabs.F, "conv3d")  # conv3d would make a copy
    y = slabs.convolve(x, weight, *given[1:])
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    norms = [z.transpose(1, 2).flatten(2).norm(dim=2) for z in (y.double() - expected, expected)]
    assert (norms[0] / norms[1]).max() <= 4e-3  # for every plane of every sample


def large_volume(channels, size):
    """Return a volume, filled slab by slab, because normal numbers are first made in float32."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.empty((1, size, size, size, channels), dtype=torch.bfloat16, device="cuda")
    for planes in x.split(52, 1):
        planes.normal_()
    return x.permute(0, 4, 1, 2, 3)


def weight_of(*shape, seed=0):
    return (tensor(*shape, seed=seed) * 0.05).to("cuda", torch.bfloat16)


def crop(x, corner, margin, size=12):
    """Return a block of a volume with a margin, which is zero outside of the volume."""
    slices, pads = [slice(None), slice(None)], []
    for first, voxels in zip(corner, x.shape[2:], strict=True):
        start, stop = first - margin, first + size + margin
        slices.append(slice(max(start, 0), min(stop, voxels)))
        pads = [max(-start, 0), max(stop - voxels, 0), *pads]
    return F.pad(x[tuple(slices)].double(), pads)


CORNERS = [(0, 0, 0), (404, 404, 404), (202, 202, 202), (202, 0, 404), (100, 200, 300)]
"""First voxels of blocks of 12: at both ends, where two slabs meet, and elsewhere."""


def half(corner):
    return [first // 2 for first in corner]


@pytest.mark.gpu
def test_values_above_the_limit_on_a_gpu():
    x, coarse = large_volume(32, 416), large_volume(64, 208)
    weight, up = weight_of(32, 32, 3, 3, 3), weight_of(64, 32, 2, 2, 2)
    head, bias = weight_of(3, 32, 1, 1, 1), weight_of(3)
    assert x.numel() > slabs.MAX_ELEMENTS

    def check(y, expected, tolerance):
        for corner in CORNERS:
            assert_near([crop(y, corner, 0)], [expected(corner)], tolerance)

    def upsampled(corner, margin):
        block = crop(coarse, half(corner), margin, 6)
        return F.conv_transpose3d(block, up.double(), stride=2)

    for y in (conv3x3x3(x, weight), slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))):
        check(y, lambda corner: F.conv3d(crop(x, corner, 1), weight.double()), 4e-3)
    y = conv1x1x1(x, head, bias)
    check(y, lambda corner: F.conv3d(crop(x, corner, 0), head.double(), bias.double()), 8e-3)
    check(upsample(coarse, up, (2, 2, 2)), lambda corner: upsampled(corner, 0), 4e-3)
    y = upsampled_conv3x3x3(coarse, up.float(), weight.float(), (2, 2, 2))
    inside = (..., *[slice(1, -1)] * 3)
    check(y, lambda corner: F.conv3d(upsampled(corner, 1), weight.double())[inside], 1e-2)


@pytest.mark.gpu
def test_gradients_above_the_limit_on_a_gpu():
    x, weight = large_volume(32, 416), weight_of(32, 32, 3, 3, 3).requires_grad_()
    # The gradient is 0 outside of a few blocks, so the expected sum is over these.
    dy, expected = torch.zeros_like(x), torch.zeros_like(weight, dtype=torch.float64)
    for corner in CORNERS:
        place = dy[(..., *(slice(first, first + 12) for first in corner))]
        place.normal_()
        expected += torch.nn.grad.conv3d_weight(crop(x, corner, 1), weight.shape, place.double())
    alone = slabs.weight_gradient(dy, x, weight, (1, 1, 1), (1, 1, 1))
    conv3x3x3(x, weight).backward(dy)
    assert_near([alone, weight.grad], [expected] * 2, 1e-2)
    del dy
    coarse, up = large_volume(64, 208).requires_grad_(), weight_of(64, 32, 2, 2, 2).float()
    y = upsampled_conv3x3x3(coarse, up, weight.detach().float(), (2, 2, 2))
    (dx,) = torch.autograd.grad(y, coarse, x)
    kernel = F.conv3d(up.double(), weight.detach().double(), padding=2)
    for corner in CORNERS:
        wanted = F.conv3d(crop(x, corner, 1), kernel, stride=2)
        assert_near([crop(dx, half(corner), 0, 6)], [wanted], 1e-2)
