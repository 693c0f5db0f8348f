import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.kernels import (
    conv1x1x1,
    conv3x3x3,
    padding,
    recomputed_in_backward,
    strided_conv3x3x3,
    upsampled_conv3x3x3,
)
from unet3d.kernels import recompute as recomputing
from unet3d.kernels.conv import api as convolution
from unet3d.kernels.conv import slabs
from unet3d.kernels.conv.api import upsample
from unet3d.kernels.conv.folded import FoldedConvolution
from unet3d.kernels.pad import padded_copy
from unet3d.model import Topology, UNet3d, dice_cross_entropy

Shape = tuple[int, int, int]


class ConvolutionCalls(TorchDispatchMode):
    """Counts the convolutions that reach PyTorch, and remembers their largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name in ("convolution", "convolution_backward"):
            self.count[name] += 1
            results = result if isinstance(result, tuple) else (result,)
            tensors = [value for value in (*args, *results) if isinstance(value, Tensor)]
            self.largest = max(self.largest, *(value.numel() for value in tensors))
        return result


def tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def value_and_gradients(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    y.backward(channels_last(tensor(*y.shape, seed=9)))
    return [y.detach(), x.grad, weight.grad]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, a, b in zip(("y", "x", "weight"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


SIZES = [(1, 12, 4, 5), (1, 13, 4, 5), (2, 12, 4, 5), (2, 9, 6, 4), (1, 2, 9, 9), (1, 1, 9, 9)]
STRIDES = [(1, 1, 1), (2, 2, 2), (1, 2, 2), (2, 1, 1)]


@pytest.mark.parametrize("layout", [torch.channels_last_3d, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("stride", STRIDES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_convolutions_in_slabs_are_the_whole_ones(
    size: tuple[int, int, int, int],
    stride: Shape,
    layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, *space = size
    x = tensor(n, 3, *space).contiguous(memory_format=layout)
    weight = tensor(4, 3, 3, 3, 3, seed=1)
    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, None, stride, 1), x, weight)
    for limit in (60, 150, 300, 420):
        monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
        with ConvolutionCalls() as calls:
            actual = value_and_gradients(
                lambda x, w: slabs.convolve(x, w, stride, (1, 1, 1)), x, weight
            )
        assert_equal(actual, expected)
        assert actual[0].is_contiguous(memory_format=torch.channels_last_3d) or calls.count == {
            "convolution": 1,
            "convolution_backward": 1,
        }
        # Four planes with their neighbours are the least that a call can be given.
        plane = math.prod(space[1:]) * 4
        assert calls.largest <= max(limit, 5 * plane)


@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 4, 7, 8, 11])
def test_other_kernels_and_strides(
    kernel: int, stride: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pad = (kernel - 1) // 2
    x, weight = tensor(1, 2, size, 3, 4), tensor(3, 2, kernel, kernel, kernel, seed=1)
    steps, pads = (stride,) * 3, (pad,) * 3
    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, None, steps, pads), x, weight)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 50)
    assert_equal(
        value_and_gradients(lambda x, w: slabs.convolve(x, w, steps, pads), x, weight), expected
    )


@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("size", [(1, 6, 3, 2), (1, 7, 3, 2), (2, 6, 3, 2), (1, 1, 4, 4)], ids=str)
@pytest.mark.parametrize("limit", [60, 100, 250])
def test_transposed_convolutions_in_slabs_are_the_whole_ones(
    size: tuple[int, int, int, int], stride: Shape, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, *space = size
    x = channels_last(tensor(n, 4, *space))
    weight = tensor(4, 3, *stride, seed=1)
    expected = value_and_gradients(lambda x, w: F.conv_transpose3d(x, w, stride=stride), x, weight)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    assert_equal(
        value_and_gradients(lambda x, w: slabs.upsample(x, w, stride), x, weight), expected
    )


def test_slabs_are_few_equal_and_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = channels_last(tensor(1, 2, 40, 5, 5)), tensor(2, 2, 3, 3, 3)  # 50 in a plane
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 1050)  # 21 planes: half of it and one neighbour
    with ConvolutionCalls() as calls:
        y = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
    assert calls.count == {"convolution": 2}
    assert calls.largest == 1050
    with ConvolutionCalls() as calls:
        slabs.input_gradient(y, x, weight, (1, 1, 1), (1, 1, 1))
    assert calls.count == {"convolution_backward": 2}
    assert calls.largest == 1050
    with ConvolutionCalls() as calls:
        slabs.weight_gradient(y, x, weight, (1, 1, 1), (1, 1, 1))
    assert calls.count == {"convolution_backward": 2 + 2}  # and the planes at both ends
    assert calls.largest == 1050
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 1049)
    with ConvolutionCalls() as calls:
        slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
    assert calls.count == {"convolution": 3}
    assert calls.largest == 50 * 15  # 13 planes between two neighbours, 14 beside one


def test_below_the_limit_each_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensor(2, 2, 6, 4, 4), tensor(2, 2, 3, 3, 3)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", x.numel())
    with ConvolutionCalls() as calls:
        value_and_gradients(lambda x, w: slabs.convolve(x, w, (1, 1, 1), (1, 1, 1)), x, weight)
    assert calls.count == {"convolution": 1, "convolution_backward": 1}
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", x.numel() // 2)
    with ConvolutionCalls() as calls:
        value_and_gradients(lambda x, w: slabs.convolve(x, w, (1, 1, 1), (1, 1, 1)), x, weight)
    # A call for each of two samples, forward and for either gradient.
    assert calls.count == {"convolution": 2, "convolution_backward": 4}


def test_the_input_of_a_slab_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = channels_last(tensor(1, 2, 40, 5, 5)), tensor(2, 2, 3, 3, 3)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 500)
    seen = []
    convolution = F.conv3d

    def watched(x: Tensor, *args: Any) -> Tensor:
        seen.append(x.untyped_storage().data_ptr())
        return convolution(x, *args)

    monkeypatch.setattr(slabs.F, "conv3d", watched)
    slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
    assert len(seen) > 2
    assert set(seen) == {x.untyped_storage().data_ptr()}


def test_autocast_lowers_what_is_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensor(1, 2, 8, 4, 4).float(), tensor(2, 2, 3, 3, 3).float().requires_grad_()
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 100)
    with torch.autocast("cpu", torch.bfloat16):
        y = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
        exact = slabs.convolve(x.double(), weight.double(), (1, 1, 1), (1, 1, 1))
        # Fake, for CPUs are known that have not the instructions to do this in bfloat16.
        with FakeTensorMode(allow_non_fake_inputs=True):
            up = slabs.upsample(x, weight[..., :2, :2, :2], (2, 2, 2))
    assert (y.dtype, up.dtype, exact.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_the_weights_of_many_slabs_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 + 512 x 2^-8 = 3, but in bfloat16 1 + 2^-8 is 1.
    x = torch.full((1, 1, 513, 1, 1), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0, 0] = 1
    weight = torch.zeros(1, 1, 1, 1, 1, dtype=torch.bfloat16)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 1)
    total = slabs.weight_gradient(torch.ones_like(x), x, weight, (1, 1, 1), (0, 0, 0))
    assert total.item() == 3


def padded(x: Tensor) -> Tensor:
    """Return a map that is stored with zeros around Z."""
    return padding.mark_padded(padded_copy(x))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(("channels", "outputs"), [(8, 8), (8, 40), (40, 8)])
def test_folded_convolutions_in_slabs_are_the_whole_ones(
    channels: int, outputs: int, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = channels_last(tensor(1, channels, 11, 3, 4))
    weight = tensor(outputs, channels, 3, 3, 3, seed=1)
    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, padding=1), x, weight)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 1000)
    x, weight = padded(x) if is_padded else x, weight.requires_grad_()
    folded = x.requires_grad_()
    y = FoldedConvolution.apply(folded, weight)
    y.backward(channels_last(tensor(*y.shape, seed=9)))
    assert_equal([y.detach(), folded.grad, weight.grad], expected)


@pytest.mark.parametrize("limit", [60, 200, 500])
@pytest.mark.parametrize("sides", [1, (1, 1), (3, 1), (1, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("size", [(1, 4, 3, 2), (2, 7, 2, 3)], ids=str)
def test_transposed_convolutions_leave_planes_out(
    size: tuple[int, int, int, int],
    sides: int | tuple[int, int],
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, *space = size
    x, weight = channels_last(tensor(n, 4, *space)), tensor(4, 3, 4, 4, 2, seed=1)
    before, after = (sides, sides) if isinstance(sides, int) else sides
    whole = F.conv_transpose3d(x, weight, stride=(2, 2, 1), padding=(0, 1, 0))
    expected = whole[:, :, before : whole.shape[2] - after]
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    actual = slabs.transposed(x, weight, (2, 2, 1), (sides, 1, 0))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stride", [(2, 2, 2), (1, 2, 2)], ids=str)
def test_padded_strided_convolutions_in_slabs_are_the_whole_ones(
    stride: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = channels_last(tensor(1, 3, 11, 4, 4)), tensor(5, 3, 3, 3, 3, seed=1)
    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, None, stride, 1), x, weight)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 200)
    x, weight = padded(x).requires_grad_(), weight.requires_grad_()
    y = strided_conv3x3x3(x, weight, stride)
    y.backward(channels_last(tensor(*y.shape, seed=9)))
    assert_equal([y.detach(), x.grad, weight.grad], expected)


@pytest.mark.parametrize("folds", [False, True])
def test_a_head_in_slabs_is_the_whole_one(folds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = channels_last(tensor(1, 8, 9, 3, 8)), tensor(3, 8, 1, 1, 1, seed=1)
    expected = value_and_gradients(lambda x, w: F.conv3d(x, w, tensor(3)), x, weight)
    monkeypatch.setattr(convolution, "can_fold", lambda *_: folds)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 600)
    with ConvolutionCalls() as calls:
        actual = value_and_gradients(lambda x, w: conv1x1x1(x, w, tensor(3)), x, weight)
    assert_equal(actual, expected)
    assert calls.count["convolution"] == 3
    bias = tensor(3).requires_grad_()
    conv1x1x1(x, weight, bias).sum().backward()
    assert bias.grad is not None and bias.grad.tolist() == [9 * 3 * 8] * 3


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_network_in_slabs_has_the_plain_gradients(
    recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    topology = Topology(
        in_channels=1, num_classes=3, channels=(4, 8, 8), strides=((1, 1, 1), (2, 2, 2), (1, 2, 2))
    )
    model = UNet3d(topology).double()
    image, target = tensor(2, 1, 12, 8, 8), torch.randint(0, 3, (2, 12, 8, 8))
    monkeypatch.setattr(recomputing, "MIN_ELEMENTS", 1)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        if recomputes:
            with recomputed_in_backward():
                loss = dice_cross_entropy(model(image), target).total
        else:
            loss = dice_cross_entropy(model(image), target).total
        loss.backward()
        return [loss.detach(), *(value.grad.clone() for value in model.parameters())]

    expected = gradients()
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 700)
    with ConvolutionCalls() as calls:
        actual = gradients()
    # Of twelve layers, the nine that are above the limit run more than once.
    assert calls.count["convolution"] > 2 * 12
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_residual_network_in_slabs_has_the_plain_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    topology = Topology(
        in_channels=1,
        num_classes=2,
        channels=(4, 8),
        strides=((1, 1, 1), (2, 2, 2)),
        encoder="residual",
    )
    model = UNet3d(topology).double()
    image = tensor(1, 1, 8, 8, 8)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(image).square().mean().backward()
        return [value.grad.clone() for value in model.parameters()]

    expected = gradients()
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", 200)
    for a, b in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def large_volume() -> Tensor:
    """Return a volume of 2.3e9 elements, made in slabs: normal numbers take float32 meanwhile."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.empty(
        (1, 32, 416, 416, 416),
        dtype=torch.bfloat16,
        device="cuda",
        memory_format=torch.channels_last_3d,
    )
    generator = torch.Generator("cuda").manual_seed(0)
    for planes in x.split(52, 2):
        planes.normal_(generator=generator)
    assert x.numel() > slabs.MAX_ELEMENTS
    return x


def blocks(size: int, num_blocks: int) -> list[tuple[int, ...]]:
    """Return first voxels of blocks of 12 voxels: at both ends, around the middle, anywhere."""
    generator = torch.Generator().manual_seed(1)
    anywhere = torch.randint(0, size - 12, (num_blocks, 3), generator=generator).tolist()
    ends = [(0, 0, 0), (size - 12,) * 3, (size // 2 - 6,) * 3, (size // 2 - 6, 0, size - 12)]
    return [*ends, *(tuple(corner) for corner in anywhere)]


def crop(x: Tensor, corner: Sequence[int], margin: int, size: int = 12) -> Tensor:
    """Return a block of so many voxels with a margin, which is zero outside the volume."""
    slices: list[slice] = [slice(None), slice(None)]
    pads: list[int] = []
    for first, voxels in zip(corner, x.shape[2:], strict=True):
        start, stop = first - margin, first + size + margin
        slices.append(slice(max(start, 0), min(stop, voxels)))
        pads = [max(-start, 0), max(stop - voxels, 0), *pads]
    return F.pad(x[tuple(slices)].double(), pads)


@pytest.mark.gpu
def test_a_volume_above_the_limit_on_a_gpu() -> None:
    x = large_volume()
    weight = (tensor(32, 32, 3, 3, 3) * 0.03).to("cuda", torch.bfloat16).requires_grad_()
    with torch.no_grad():
        y = conv3x3x3(x, weight)
        plain = slabs.convolve(x, weight, (1, 1, 1), (1, 1, 1))
    for corner in blocks(416, 8):
        expected = F.conv3d(crop(x, corner, 1), weight.double())
        for result in (y, plain):
            error = (crop(result, corner, 0) - expected).norm() / expected.norm()
            assert error <= 4e-3, corner
    del y, plain
    # The gradient is zero but for a few blocks, so the expected sum is over these: at both ends,
    # where two slabs meet, and elsewhere.
    corners = [(0, 0, 0), (404, 404, 404), (204, 204, 204), (204, 0, 404), (100, 200, 300)]
    dy = torch.zeros_like(x)
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for corner in corners:
        place = dy[(..., *(slice(first, first + 12) for first in corner))]
        place.normal_()
        expected += torch.nn.grad.conv3d_weight(crop(x, corner, 1), weight.shape, place.double())
    results = [slabs.weight_gradient(dy, x, weight, (1, 1, 1), (1, 1, 1))]
    conv3x3x3(x, weight).backward(dy)
    results.append(weight.grad)
    for result in results:
        assert (result.double() - expected).norm() / expected.norm() <= 1e-2


@pytest.mark.gpu
def test_a_head_above_the_limit_on_a_gpu() -> None:
    x = large_volume()
    weight = tensor(3, 32, 1, 1, 1).to("cuda", torch.bfloat16).requires_grad_()
    bias = tensor(3).to("cuda", torch.bfloat16).requires_grad_()
    y = conv1x1x1(x, weight, bias)
    for corner in blocks(416, 8):
        expected = F.conv3d(crop(x, corner, 0), weight.double(), bias.double())
        error = (crop(y, corner, 0) - expected).norm() / expected.norm()
        assert error <= 8e-3, corner


@pytest.mark.gpu
def test_upsampling_above_the_limit_on_a_gpu() -> None:
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.randn(1, 64, 208, 208, 208, device="cuda", dtype=torch.bfloat16)
    x = channels_last(x)
    weight = tensor(64, 32, 2, 2, 2).to("cuda", torch.bfloat16)
    y = upsample(x, weight, (2, 2, 2))
    for corner in blocks(416, 8):
        corner = tuple(first // 2 * 2 for first in corner)
        coarse = x[(..., *(slice(first // 2, first // 2 + 6) for first in corner))]
        expected = F.conv_transpose3d(coarse.double(), weight.double(), stride=2)
        error = (crop(y, corner, 0) - expected).norm() / expected.norm()
        assert error <= 4e-3, corner


def composed_blocks(x: Tensor, up: Tensor, weight: Tensor, edge: int) -> list[tuple[Tensor, ...]]:
    """Return blocks of the upsampled convolution and of its gradient by x, each with its float64.

    Args:
        x: (1, I, edge / 2, ...), a leaf.
        up: Upsamples by two.
        weight: Of the convolution behind it.
        edge: Voxels of the result along each axis.
    """
    y = upsampled_conv3x3x3(x, up, weight, (2, 2, 2))
    dy = torch.empty_like(y, memory_format=torch.channels_last_3d)
    for planes in dy.split(52, 2):
        planes.normal_()
    (dx,) = torch.autograd.grad(y, x, dy)
    kernel = F.conv3d(up.double(), weight.double(), padding=2)
    found = []
    for corner in blocks(edge, 8):
        corner = tuple(first // 2 * 2 for first in corner)
        coarse = [first // 2 for first in corner]
        full = F.conv_transpose3d(crop(x, coarse, 1, 6), up.double(), stride=2)
        wanted = F.conv3d(full, weight.double())[..., 1:-1, 1:-1, 1:-1]
        found.append((crop(y, corner, 0), wanted))
        found.append((crop(dx, coarse, 0, 6), F.conv3d(crop(dy, corner, 1), kernel, stride=2)))
    return found


def test_blocks_of_an_upsampled_convolution_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "_composes", lambda *_: True)
    x = channels_last(tensor(1, 6, 12, 12, 12)).requires_grad_()
    weights = tensor(6, 8, 2, 2, 2, seed=1), tensor(8, 8, 3, 3, 3, seed=2)
    for actual, expected in composed_blocks(x, *weights, 24):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
def test_an_upsampled_convolution_above_the_limit_on_a_gpu() -> None:
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    x = torch.randn(1, 64, 208, 208, 208, device="cuda", dtype=torch.bfloat16)
    x = channels_last(x).requires_grad_()
    up = (tensor(64, 32, 2, 2, 2) * 0.1).float().cuda()
    weight = (tensor(32, 32, 3, 3, 3, seed=1) * 0.03).float().cuda()
    assert 32 * 416**3 > slabs.MAX_ELEMENTS
    for actual, expected in composed_blocks(x, up, weight, 416):
        assert (actual - expected).norm() <= 1e-2 * expected.norm()
