"""A normalisation and the head behind it as one operation."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, assert_same, channels_last
from tests.kernels.comparison import results as results_of
from tests.kernels.norm.closed_form import EPS, arguments, called, closed_form
from tests.products import each_value
from unet3d.kernels import instance_norm, instance_norm_head
from unet3d.kernels.maps import MAX_CHANNELS, mark_folded, with_padding
from unet3d.kernels.norm import head as head_api
from unet3d.kernels.norm import op, volume
from unet3d.memory.saved_tensors import handling

SLOPE = 0.01


def inputs_of(shape, classes, dtype, device, *, adds, mean=1.0):
    """Return x, weight, bias, the head's weight and bias, the added map, and a gradient."""
    x, weight, bias, _ = arguments(shape, mean, dtype, device)
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(classes, shape[1], 1, 1, 1, generator=generator)
    head_bias = torch.randn(classes, generator=generator)
    added = [torch.randn(shape, generator=generator).to(dtype)] if adds else []
    dy = torch.randn(len(x), classes, *shape[2:], generator=generator).to(dtype)
    if dtype == torch.float64:
        head, head_bias = head.double(), head_bias.double()
    values = (x, weight, bias, head, head_bias, *added, dy)
    return [(channels_last(v) if v.dim() == 5 else v).to(device) for v in values]


def results(function, inputs):
    *values, dy = inputs
    # A convolution's result, which may be overwritten.
    return results_of(lambda x, *others: function(x.clone(), *others), values, dy)


def joined(x, weight, bias, head, head_bias, added=None):
    options = {"head_weight": head, "head_bias": head_bias, "added": added}
    return instance_norm_head(x, weight, bias, EPS, SLOPE, **options)


def apart(x, weight, bias, head, head_bias, added=0):
    x = x + added
    return F.conv3d(closed_form(x, weight, bias, EPS, SLOPE), head, head_bias)


@pytest.mark.parametrize("adds", [False, True])
def test_the_reference_is_the_closed_form(adds):
    inputs = inputs_of((2, 3, 4, 5, 6), 2, torch.float64, "cpu", adds=adds)
    assert_same(results(joined, inputs), results(apart, inputs), 1e-10)


@pytest.mark.parametrize(
    ("channels", "classes", "adds", "is_joined"),
    [
        (32, 3, False, True),
        (32, 3, True, True),
        (64, 16, False, True),
        (65, 3, False, False),
        (32, 17, False, False),
    ],
)
def test_few_channels_and_classes_are_joined_and_of_maps_only_the_input_is_kept(
    channels, classes, adds, is_joined
):
    kept, options = [], {"device": "cpu:0", "dtype": torch.bfloat16, "requires_grad": True}
    with FakeTensorMode():
        maps = [torch.empty(1, channels, 64, 64, 64, **options) for _ in range(1 + adds)]
        affine = [torch.empty(channels, device="cpu:0", requires_grad=True) for _ in range(2)]
        head = [torch.empty(classes, channels, 1, 1, 1, **options), torch.empty(classes, **options)]
        with handling(kept.append):
            y = joined(maps[0], *affine, *head, *maps[1:])
        assert y.grad_fn is not None and ("NormHead" in y.grad_fn.name()) == is_joined
        assert (y.shape, y.dtype) == ((1, classes, 64, 64, 64), torch.bfloat16)
        large = [value.numel() for value in kept if value.numel() > channels * classes]
        assert (large == [maps[0].numel()]) == is_joined
        for gradient in torch.autograd.grad(y, maps, torch.empty_like(y)):
            assert (gradient.shape, gradient.dtype) == (maps[0].shape, torch.bfloat16)


@pytest.mark.gpu
@each_value(
    case=[
        ((1, 32, 40, 48, 56), 3),
        ((2, 5, 7, 9, 11), 16),
        ((3, 64, 3, 5, 7), 5),
        ((2, 1, 8, 8, 8), 1),
    ],
    kind=[
        (torch.float32, 0.0, 2e-6),
        (torch.float32, 1e4, 2e-6),
        (torch.bfloat16, 1.0, 8e-3),
        (torch.float16, 1.0, 1e-3),
    ],
)
def test_on_a_gpu_against_float64(case, kind, monkeypatch):
    monkeypatch.setattr(volume, "MIN_ELEMENTS", 0)
    (shape, classes), (dtype, mean, tolerance) = case, kind
    inputs = inputs_of(shape, classes, dtype, "cuda", adds=False, mean=mean)
    inputs[3] = inputs[3].to(dtype).float()
    expected = results(apart, [value.cpu().double() for value in inputs])
    actual = results(joined, inputs)
    assert actual[0].dtype == dtype
    voxels = expected[0][0, 0].numel() * shape[0]
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        # Sums over voxels may cancel: they are compared with the sum of absolute values.
        scale = max(b.norm().item(), (voxels * b.numel()) ** 0.5 if number > 1 else 0)
        assert (a.cpu().double() - b).norm().item() <= tolerance * scale, number
    again = results(joined, inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    # The sum with the added map is computed in float32 and rounded once.
    x, *others, dy = inputs
    added = torch.randn_like(x)
    in_sum = results(joined, [x, *others, added, dy])
    of_sum = results(joined, [(x.float() + added.float()).to(dtype), *others, dy])
    assert all(torch.equal(a, b) for a, b in zip(in_sum, [*of_sum, of_sum[1]], strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    inputs = inputs_of((1, 32, 8, 8, 8), 3, torch.bfloat16, "cuda", adds=False)
    inputs[3] = inputs[3].to(torch.bfloat16).float()
    assert 32 * (8 * 52) ** 3 > 2**31
    expected = results(apart, [value.cpu().double() for value in inputs])
    x, weight, bias = (value.double() for value in inputs[:3])
    normed = closed_form(x, weight, bias, EPS, SLOPE)
    # A volume of copies has the same statistics, and so the same logits and gradient of x.
    for index in (0, -1):
        inputs[index] = channels_last(inputs[index].repeat(1, 1, 52, 52, 52))
    y, dx, *sums = results(joined, inputs)
    actual = [y[..., -8:, -8:, -8:], dx[..., -8:, -8:, -8:], *(v / 52**3 for v in sums)]
    assert_near(actual, expected, 1e-2)
    with torch.no_grad():  # the normalised map alone
        y = instance_norm(*inputs[:3], EPS, SLOPE)
    assert_near([y[..., -8:, -8:, -8:], y[..., :8, :8, :8]], [normed] * 2, 4e-3)


@pytest.mark.gpu
def test_the_gradient_for_a_folded_convolution_has_zeros_around():
    x, weight, bias, head, head_bias, dy = inputs_of(
        (1, MAX_CHANNELS, 64, 64, 64), 3, torch.bfloat16, "cuda", adds=False
    )
    made = []
    for folds in (False, True):
        leaf = x.clone().requires_grad_()
        y = joined(mark_folded(leaf) if folds else leaf, weight, bias, head, head_bias)
        made.append(torch.autograd.grad(y, leaf, dy)[0])
    assert torch.equal(*made)
    assert torch.equal(with_padding(made[1]), F.pad(made[0], (1, 1)))


@pytest.mark.gpu
def test_the_operations_are_registered_as_pytorch_wants_it():
    inputs = inputs_of((2, 5, 4, 5, 6), 3, torch.float32, "cuda", adds=True)
    x, weight, bias, head, head_bias, added, dy = inputs
    mean, rstd, _ = op.merge(called(op.sum_moments, x, added), 120, EPS)
    affine = (weight, bias, mean, rstd, head.flatten(1))
    called(head_api.logits, x, *affine, head_bias, slope=SLOPE)
    sums, _ = called(head_api.sums, dy, x, *affine, slope=SLOPE)
    total = called(op.total, sums)
    called(op.gradient, dy, x, *affine, total=total, voxels=120, slope=SLOPE, pads=False)
