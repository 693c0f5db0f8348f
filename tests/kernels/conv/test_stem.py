"""The first convolution in Triton, against float64."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import LAYOUTS, assert_near, between, results, tensor
from tests.kernels.norm.closed_form import called
from tests.products import each_value
from unet3d.kernels import conv3x3x3
from unet3d.kernels.conv.api import MAX_STEM_CHANNELS, MAX_STEM_ROWS
from unet3d.kernels.conv.stem_op import FORWARD, division_of, stem, stem_with_moments

SHAPES = [
    # samples, channels of image and result, size
    (1, 1, 32, (40, 48, 56)),
    (1, 1, 32, (160, 64, 72)),
    (2, 1, 8, (5, 7, 9)),
    (3, 2, 20, (3, 5, 7)),
    (1, 4, 64, (6, 6, 6)),
    (2, 3, 33, (1, 1, 1)),
]


def arguments(samples, inputs, outputs, size):
    return tensor(samples, inputs, *size), tensor(outputs, inputs, 3, 3, 3, seed=1)


@pytest.mark.gpu
@each_value(shape=SHAPES, is_sharded=[False, True], dtype=[torch.bfloat16, torch.float16])
def test_low_precision_on_a_gpu_against_float64(shape, is_sharded, dtype):
    image, weight = (value.cuda().to(dtype) for value in arguments(*shape))
    is_sharded = is_sharded and image.shape[2] > 2

    def convolved(weight):
        with between() if is_sharded else nullcontext():
            y = conv3x3x3(image, weight)
        assert y.grad_fn is not None and "stem" in y.grad_fn.name()
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
        return y

    def plain(weight):
        return F.conv3d(image.double(), weight, None, 1, (1 - is_sharded, 1, 1))

    actual = results(convolved, [weight])
    assert {value.dtype for value in actual} == {dtype}
    dy = tensor(*actual[0].shape, seed=9).to(actual[0])
    expected = results(plain, [weight.double()], dy.double())
    assert_near(actual, expected, {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype])
    assert torch.equal(results(convolved, [weight])[1], actual[1])


@pytest.mark.gpu
@each_value(shape=SHAPES, padding=[0, 1], mean=[0, 1000])
def test_moments_of_the_result_come_with_it(shape, padding, mean):
    image, weight = arguments(*shape)
    if image.shape[2] < 3:
        padding = 1
    image = (image + mean).cuda().bfloat16()
    if mean:  # no zeros around the image, which would be far from its mean
        weight[:, :, (0, 2)] = weight[:, :, :, (0, 2)] = weight[..., (0, 2)] = 0
        padding = 1
    weight = weight.cuda().bfloat16()
    y, moments = stem_with_moments(image, weight, padding)
    assert torch.equal(y, stem(image, weight, padding))
    assert torch.equal(moments, stem_with_moments(image, weight, padding)[1])
    exact = F.conv3d(image.double(), weight.double(), None, 1, (padding, 1, 1))
    count, variance, *of_mean = moments.double().unbind(1)
    of_mean = of_mean[0] + of_mean[1]
    assert (count.sum(0) == exact[0, 0].numel()).all()
    share = count / count.sum(0)
    whole = (share * of_mean).sum(0)
    variance = (share * (variance + (of_mean - whole) ** 2)).sum(0)
    wanted = exact.var((2, 3, 4), unbiased=False)
    rounding = 1e-6 * exact.abs().amax((2, 3, 4))
    assert ((whole - exact.mean((2, 3, 4))).abs() <= 1e-3 * wanted.sqrt() + rounding).all()
    assert ((variance - wanted).abs() <= 1e-3 * wanted + rounding**2).all()


def test_programs_take_all_planes_of_all_tiles():
    launch = FORWARD[0]
    of_planes, of_voxels = (1, 2, 127, 128, 640), (1, 63, 64, 65, 96**2, 640**2)
    for samples, planes, voxels in product((1, 2, 7, 600), of_planes, of_voxels):
        tiles, run, runs = division_of(launch, samples, planes, voxels)
        assert tiles * launch.block_voxels >= voxels > (tiles - 1) * launch.block_voxels
        assert runs * run >= tiles * planes > (runs - 1) * run
        assert runs * samples <= launch.programs + samples


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operations_are_registered_as_pytorch_wants_it(layout):
    given = (value.cuda().bfloat16() for value in arguments(*SHAPES[2]))
    image, weight = (value.contiguous(memory_format=layout) for value in given)
    called(stem_with_moments, image, weight, 0)
    torch.library.opcheck(stem, (image, weight.requires_grad_(), 0))


def test_a_fake_gpu_takes_it_for_images():
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        image = torch.empty(2, 1, 8, 6, 5, device="cpu:0")
        weight = torch.empty(16, 1, 3, 3, 3, device="cpu:0", requires_grad=True)
        y = conv3x3x3(image, weight)
        assert (y.shape, y.dtype) == ((2, 16, 8, 6, 5), torch.bfloat16)
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
        assert y.grad_fn is not None and "stem" in y.grad_fn.name()
        y.sum().backward()
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, torch.float32)


@pytest.mark.parametrize(
    ("channels", "outputs", "dtype", "needs_gradient", "takes"),
    [
        (MAX_STEM_ROWS // 27, MAX_STEM_CHANNELS, torch.bfloat16, False, True),
        (MAX_STEM_ROWS // 27 + 1, 16, torch.bfloat16, False, False),
        (1, MAX_STEM_CHANNELS + 1, torch.bfloat16, False, False),
        (1, 16, torch.float32, False, False),
        (1, 16, torch.bfloat16, True, False),
    ],
)
def test_other_maps_do_not_take_it(channels, outputs, dtype, needs_gradient, takes):
    with FakeTensorMode():
        image = torch.empty(1, channels, 4, 4, 4, dtype=dtype, device="cpu:0")
        image.requires_grad_(needs_gradient)
        weight = torch.empty(outputs, channels, 3, 3, 3, dtype=dtype, device="cpu:0")
        y = conv3x3x3(image, weight.requires_grad_())
        assert y.grad_fn is not None and ("stem" in y.grad_fn.name()) == takes
