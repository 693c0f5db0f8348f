"""The first convolution of a network, followed by normalisation."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, channels_last, tensor
from tests.kernels.comparison import results as results_of
from tests.kernels.norm.closed_form import EPS, called, closed_form
from unet3d.kernels import conv3x3x3, conv3x3x3_instance_norm, recomputed_in_backward
from unet3d.kernels.conv.stem_op import weight_gradient
from unet3d.kernels.norm import op, volume
from unet3d.kernels.sharding import sharded
from unet3d.memory.saved_tensors import handling
from unet3d.parallel.spatial.division import divide
from unet3d.parallel.spatial.shard import NoMessages, VolumeShard

SLOPE = 0.01


def inputs_of(samples, inputs, outputs, size):
    """Return image, kernel, weight, bias and the gradient of the result, in float64."""
    shapes = [(samples, inputs, *size), (outputs, inputs, 3, 3, 3), (outputs,), (outputs,)]
    shapes.append((samples, outputs, *size))
    return [tensor(*shape, seed=number) for number, shape in enumerate(shapes)]


def results(function, inputs):
    image, *parameters, dy = inputs
    return results_of(lambda *given: function(image, *given), parameters, dy)


def joined(image, *parameters):
    return conv3x3x3_instance_norm(image, *parameters, EPS, SLOPE)


def apart(image, kernel, weight, bias):
    # The convolution's result is rounded when it is stored.
    y = F.conv3d(image.double(), kernel.double(), padding=1)
    y = y + (y.detach().to(image.dtype).double() - y.detach())
    return closed_form(y, weight.double(), bias.double(), EPS, SLOPE)


FAKE_GPU = torch.device("cpu", 0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_of_large_maps_one_is_kept_or_none(recomputes):
    kept, shapes = [], [(32, 1, 3, 3, 3), (32,), (32,)]
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        image = torch.empty(1, 1, 128, 64, 64, device=FAKE_GPU)
        parameters = [torch.empty(s, device=FAKE_GPU, requires_grad=True) for s in shapes]
        with handling(kept.append), recomputed_in_backward() if recomputes else nullcontext():
            y = joined(image, *parameters)
        assert y.grad_fn is not None and "StemNorm" in y.grad_fn.name()
        assert y.dtype == torch.bfloat16 and y.shape == (1, 32, 128, 64, 64)
        large = [value.numel() for value in kept if value.numel() >= image.numel()]
        assert large == ([image.numel()] if recomputes else [image.numel(), y.numel()])
        gradients = torch.autograd.grad(y, parameters, torch.empty_like(y))
        assert [g.shape for g in gradients] == shapes


def test_slabs_of_any_size_gather_the_same_moments(monkeypatch):
    # With halos the slab of 16 planes would be below the limit, but its neighbour of 8 would
    # estimate a size above it.
    monkeypatch.setattr(volume, "MIN_ELEMENTS", 2**20)
    uneven = divide(24, 2, (1, 2, 4, 8), 4)
    sizes = ([], [])
    for index, planes in enumerate((16, 8)):
        messages = NoMessages()
        messages.gather = lambda _, sent, of=sizes[index]: of.append(sent.numel())
        with FakeTensorMode(), sharded(VolumeShard(index, uneven, messages)):
            image = torch.empty(1, 1, planes + 2, 40, 44, device=FAKE_GPU, dtype=torch.bfloat16)
            kernel = torch.empty(32, 1, 3, 3, 3, device=FAKE_GPU, dtype=torch.bfloat16)
            affine = torch.empty(2, 32, device=FAKE_GPU)
            conv3x3x3_instance_norm(image, kernel, *affine, EPS, SLOPE, has_halo=True)
    assert sizes[0] == sizes[1] != []


@pytest.mark.gpu
@pytest.mark.parametrize("outputs_of_reader", [None, 32], ids=["apart", "reader normalises"])
def test_what_is_not_kept_is_recomputed_the_same(outputs_of_reader):
    image, kernel, weight, bias, _ = (v.cuda() for v in inputs_of(1, 1, 32, (32, 32, 64)))
    inputs = [image.bfloat16(), kernel.bfloat16(), weight.float(), bias.float()]
    gradients = []
    for recomputes in (False, True):
        leaves = [value.clone().requires_grad_() for value in inputs[1:]]
        reader = tensor(32, 32, 3, 3, 3, seed=9).cuda().float().requires_grad_()
        with recomputed_in_backward() if recomputes else nullcontext():
            y = conv3x3x3_instance_norm(
                *(inputs[0], *leaves, EPS, SLOPE), outputs_of_reader=outputs_of_reader
            )
            loss = conv3x3x3(y, reader).float().square().sum()  # saves y
        gradients.append(torch.autograd.grad(loss, [*leaves, reader]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 2e-3, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "size", [(1, 1, 32, (20, 24, 28)), (2, 3, 20, (7, 9, 11)), (1, 4, 64, (6, 6, 6))], ids=str
)
def test_it_is_the_convolution_and_the_normalisation(size, device, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(volume, "MIN_ELEMENTS", 0)
    image, kernel, *affine, dy = (value.to(device) for value in inputs_of(*size))
    affine = [value.to(torch.promote_types(dtype, torch.float32)) for value in affine]
    inputs = [image.to(dtype), kernel.to(dtype), *affine, dy.to(dtype)]
    actual = results(joined, inputs)
    assert_near(actual, results(apart, [*inputs[:4], inputs[4].double()]), tolerance)
    again = results(joined, inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
def test_the_operation_is_registered_as_pytorch_wants_it():
    image, kernel, weight, bias, dy = (v.cuda() for v in inputs_of(2, 1, 8, (5, 7, 9)))
    image, kernel, y, dy = (channels_last(v.bfloat16()) for v in (image, kernel, dy + 1, dy))
    mean, rstd, _ = op.merge(op.moments(y), 5 * 7 * 9, EPS)
    affine = (weight.float(), bias.float(), mean, rstd)
    total = op.total(op.sums(dy, y, *affine, slope=SLOPE))
    options = {"total": total, "voxels": 5 * 7 * 9, "kernel": kernel, "padding": 1, "slope": SLOPE}
    called(weight_gradient, dy, image, y, *affine, **options)
