import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.kernels import conv1x1x1, conv3x3x3, padding
from unet3d.kernels.conv import api as convolution
from unet3d.kernels.conv import folded
from unet3d.kernels.conv.folded import FoldedConvolution, PaddedStridedConvolution
from unet3d.kernels.pad import padded_copy
from unet3d.kernels.padding import can_fold, mark_padded, with_padding

SIZE = (5, 4, 6)


def arguments(
    inputs: int, outputs: int, num_samples: int, size: tuple[int, int, int] = SIZE
) -> list[Tensor]:
    """Return x, weight and the gradient of the result, in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (num_samples, inputs, *size),
        (outputs, inputs, 3, 3, 3),
        (num_samples, outputs, *size),
    )
    values = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [value.contiguous(memory_format=torch.channels_last_3d) for value in values]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv3d(x, weight, padding=1)


def results(function: object, values: list[Tensor]) -> list[Tensor]:
    *leaves, gradient = values
    leaves = [value.clone().requires_grad_() for value in leaves]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (32, 32), (40, 16), (16, 40)])
def test_two_voxels_at_a_time_give_the_same(inputs: int, outputs: int, num_samples: int) -> None:
    values = arguments(inputs, outputs, num_samples)
    actual = results(FoldedConvolution.apply, values)
    for a, b in zip(actual, results(plain, values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def padded(x: Tensor) -> Tensor:
    """Return a copy of a map that is stored with zeros around Z."""
    return mark_padded(padded_copy(x))


def test_a_padded_map_shows_its_own_voxels_only() -> None:
    x = arguments(8, 8, 2)[0]
    made = padded(x)
    assert torch.equal(made, x)
    assert torch.equal(with_padding(made), F.pad(x, (1, 1)))


@pytest.mark.parametrize("pads_x", [False, True])
@pytest.mark.parametrize("pads_dy", [False, True])
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (32, 16), (40, 16), (16, 40)])
def test_zeros_around_change_nothing(
    inputs: int, outputs: int, num_samples: int, pads_dy: bool, pads_x: bool
) -> None:
    x, weight, dy = arguments(inputs, outputs, num_samples)
    leaf, weight = x.clone().requires_grad_(), weight.requires_grad_()
    expected = F.conv3d(leaf, weight, padding=1)
    wanted = torch.autograd.grad(expected, (leaf, weight), dy)
    x, dy = padded(x) if pads_x else x, padded(dy) if pads_dy else dy
    flipped = weight.detach().flip(2, 3, 4).transpose(0, 1)
    with torch.no_grad():
        actual = (
            folded._convolve(x, weight, (1, 1)),
            folded._convolve(dy, flipped, (1, 1)),
            folded._weight_gradient(dy, x, weight, (1, 1)),
        )
    for a, b in zip(actual, (expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("stride", [(2, 2, 1), (2, 2, 2), (1, 2, 2)], ids=str)
@pytest.mark.parametrize("inputs", [8, 40])
def test_strides_over_a_padded_map(
    inputs: int, stride: tuple[int, int, int], is_padded: bool
) -> None:
    x, weight, _ = arguments(inputs, 12, 2)
    leaf, weight = x.clone().requires_grad_(), weight.requires_grad_()
    expected = F.conv3d(leaf, weight, stride=stride, padding=1)
    # Backward may get the map as it was, or recomputed without zeros around.
    x = padded(x).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved if is_padded else saved.clone()
    ):
        actual = PaddedStridedConvolution.apply(x, weight, stride)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (leaf, weight), dy)
    for a, b in zip(torch.autograd.grad(actual, (x, weight), dy), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_derivatives_are_right() -> None:
    values = [value.requires_grad_() for value in arguments(2, 3, 1, (2, 2, 4))[:2]]
    assert torch.autograd.gradcheck(FoldedConvolution.apply, values)


@pytest.mark.parametrize("needed", [0, 1])
def test_only_gradients_that_are_wanted_are_computed(needed: int) -> None:
    x, weight, gradient = arguments(8, 8, 1)
    leaf = (x, weight)[needed].requires_grad_()
    y = FoldedConvolution.apply(x, weight)
    (actual,) = torch.autograd.grad(y, leaf, gradient)
    (expected,) = torch.autograd.grad(plain(x, weight), leaf, gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "is_gpu", lambda device: True)
    monkeypatch.setattr(padding, "MIN_ELEMENTS", 0)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("change", "folds"),
    [
        ({}, True),
        ({"inputs": 4}, False),
        ({"outputs": 64, "inputs": 64}, False),
        ({"size": (4, 6, 5)}, False),
        ({"dtype": torch.float32}, False),
        ({"layout": torch.contiguous_format}, False),
    ],
    ids=str,
)
def test_what_is_worth_folding(change: dict[str, object], folds: bool) -> None:
    options = {"inputs": 32, "outputs": 32, "num_samples": 1, "size": SIZE}
    options |= {name: value for name, value in change.items() if name in options}
    x, weight, *_ = arguments(**options)
    x = x.to(change.get("dtype", torch.bfloat16))
    x = x.contiguous(memory_format=change.get("layout", torch.channels_last_3d))
    assert can_fold(x, min(weight.shape[:2])) == folds


def test_a_cpu_folds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "MIN_ELEMENTS", 0)
    assert not can_fold(arguments(32, 32, 1)[0].bfloat16(), 32)


@pytest.mark.parametrize(
    ("outputs", "size", "folds"),
    [
        (3, (3, 4, 8), True),
        (16, (2, 3, 16), True),
        (17, (2, 3, 16), False),  # too much of the matrix would be zero
        (3, (3, 8, 4), False),  # Z is no multiple of 8
    ],
)
def test_a_head_multiplies_eight_voxels_at_a_time(
    outputs: int, size: tuple[int, int, int], folds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if x were of low precision on a GPU; in float64 the comparison is sharp.
    monkeypatch.setattr(convolution, "can_fold", lambda x, channels: True)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 5, *size), (outputs, 5, 1, 1, 1), (outputs,), (2, outputs, *size))
    )
    x = x.contiguous(memory_format=torch.channels_last_3d)
    called = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *values: called.append(1) or linear(*values))
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = conv1x1x1(*leaves)
    assert bool(called) == folds
    expected = F.conv3d(*leaves)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    actual = torch.autograd.grad(y, leaves, gradient)
    for a, b in zip(actual, torch.autograd.grad(expected, leaves, gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.gpu
def test_bfloat16_on_a_gpu_against_float64() -> None:
    values = [v.cuda().bfloat16() for v in arguments(32, 32, 1, (64, 64, 64))]
    assert can_fold(values[0], 32)
    actual = results(conv3x3x3, values)
    assert actual[0].is_contiguous(memory_format=torch.channels_last_3d)
    exact = results(plain, [value.double() for value in values])
    for a, b in zip(actual, exact, strict=True):
        assert (a.double() - b).norm() <= 2e-2 * b.norm()
