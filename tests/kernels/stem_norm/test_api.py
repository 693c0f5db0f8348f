"""The first convolution with the normalisation behind it."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, assert_same, channels_last, tensor
from tests.kernels.comparison import results as results_of
from tests.kernels.norm.closed_form import EPS, closed_form
from unet3d.kernels import conv3x3x3_instance_norm, recomputed_in_backward
from unet3d.kernels.norm import api as norm_api
from unet3d.kernels.norm import op as norm
from unet3d.kernels.sharding import sharded
from unet3d.kernels.stem_norm import op
from unet3d.memory.saved_tensors import handling
from unet3d.parallel.spatial.division import divide
from unet3d.parallel.spatial.shard import NoMessages, VolumeShard

SLOPE = 0.01
Size = tuple[int, int, int, tuple[int, int, int]]


def inputs_of(samples: int, inputs: int, outputs: int, size: tuple[int, int, int]) -> list[Tensor]:
    """Return image, kernel, weight, bias and the gradient of the result, in float64."""
    shapes = (
        (samples, inputs, *size),
        (outputs, inputs, 3, 3, 3),
        (outputs,),
        (outputs,),
        (samples, outputs, *size),
    )
    return [tensor(*shape, seed=number) for number, shape in enumerate(shapes)]


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    image, *parameters, dy = inputs
    return results_of(lambda *given: function(image, *given), parameters, dy)


def joined(image: Tensor, *parameters: Tensor) -> Tensor:
    return conv3x3x3_instance_norm(image, *parameters, EPS, SLOPE)


def apart(image: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The convolution's result is rounded as it is stored.
    y = F.conv3d(image.double(), kernel.double(), padding=1)
    y = y + (y.detach().to(image.dtype).double() - y.detach())
    return closed_form(y, weight.double(), bias.double(), EPS, SLOPE)


def test_it_is_the_convolution_and_the_normalisation():
    inputs = inputs_of(2, 1, 4, (5, 4, 6))
    assert_same(results(joined, inputs), results(apart, inputs), 1e-10)


FAKE_GPU = torch.device("cpu", 0)


def test_of_large_maps_one_is_kept():
    kept: list[Tensor] = []
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        image = torch.empty(1, 1, 128, 64, 64, device=FAKE_GPU)
        kernel = torch.empty(32, 1, 3, 3, 3, device=FAKE_GPU, requires_grad=True)
        affine = [torch.empty(32, device=FAKE_GPU, requires_grad=True) for _ in range(2)]
        with handling(kept.append):
            y = joined(image, kernel, *affine)
        assert y.grad_fn is not None and "StemNorm" in y.grad_fn.name()
        assert y.dtype == torch.bfloat16 and y.shape == (1, 32, 128, 64, 64)
        assert sorted(value.numel() for value in kept)[-2:] == [image.numel(), y.numel()]
        gradients = torch.autograd.grad(y, [kernel, *affine], torch.empty_like(y))
        assert [g.shape for g in gradients] == [kernel.shape, (32,), (32,)]


class SizesGathered(NoMessages):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def gather(self, received: Tensor, sent: Tensor) -> None:
        self.sizes.append(sent.numel())


def test_slabs_of_any_size_gather_the_same_moments(monkeypatch):
    # With their halos 16 planes have fewer elements, and 8 stand for more.
    monkeypatch.setattr(norm_api, "MIN_ELEMENTS", 2**20)
    uneven = divide(24, 2, (1, 2, 4, 8), 4)
    sizes = []
    for index, planes in enumerate((16, 8)):
        messages = SizesGathered()
        with FakeTensorMode(), sharded(VolumeShard(index, uneven, messages)):
            image = torch.empty(1, 1, planes + 2, 40, 44, device=FAKE_GPU, dtype=torch.bfloat16)
            kernel = torch.empty(32, 1, 3, 3, 3, device=FAKE_GPU, dtype=torch.bfloat16)
            affine = [torch.empty(32, device=FAKE_GPU) for _ in range(2)]
            conv3x3x3_instance_norm(image, kernel, *affine, EPS, SLOPE, has_halo=True)
        sizes.append(messages.sizes)
    assert sizes[0] == sizes[1]


@pytest.mark.gpu
def test_what_is_not_kept_is_recomputed_the_same():
    image, kernel, weight, bias, _ = (v.cuda() for v in inputs_of(1, 1, 32, (32, 32, 64)))
    inputs = [image.bfloat16(), kernel.bfloat16(), weight.float(), bias.float()]
    gradients = []
    for recomputes in (False, True):
        leaves = [value.clone().requires_grad_() for value in inputs[1:]]
        scale = torch.ones((), device="cuda", requires_grad=True)
        with recomputed_in_backward() if recomputes else nullcontext():
            y = joined(inputs[0], *leaves)
            loss = (y * scale).float().square().sum()  # keeps y
        gradients.append(torch.autograd.grad(loss, [*leaves, scale]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


SIZES: list[Size] = [
    (1, 1, 32, (40, 48, 56)),
    (2, 3, 20, (7, 9, 11)),
    (1, 4, 64, (6, 6, 6)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_low_precision_on_a_gpu_against_float64(size, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(norm_api, "MIN_ELEMENTS", 0)
    image, kernel, weight, bias, dy = (value.cuda() for value in inputs_of(*size))
    inputs = [image.to(dtype), kernel.to(dtype), weight.float(), bias.float(), dy.to(dtype)]
    actual = results(joined, inputs)
    expected = results(apart, [*inputs[:4], inputs[4].double()])
    assert_near(actual, expected, tolerance)
    again = results(joined, inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
def test_the_operation_is_registered_as_pytorch_wants_it():
    image, kernel, weight, bias, dy = (v.cuda() for v in inputs_of(2, 1, 8, (5, 7, 9)))
    image, kernel, y, dy = (channels_last(v.bfloat16()) for v in (image, kernel, dy + 1, dy))
    mean, rstd, _ = norm.merge(norm.moments(y), 5 * 7 * 9, EPS)
    affine = (weight.float(), bias.float(), mean, rstd)
    total = norm.total(norm.sums(dy, y, *affine, slope=SLOPE))
    options = {"total": total, "voxels": 5 * 7 * 9, "kernel": kernel, "before": 1, "slope": SLOPE}
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op.weight_gradient, (dy, image, y, *affine), options, test_utils=checks)
