"""Sums over voxels of the loss, and their gradients, against float64 and counting."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.kernels.comparison import LAYOUTS, assert_near, assert_same, results
from tests.kernels.norm.closed_form import called
from tests.products import each_value
from unet3d.kernels import dice_ce_sums, region_sums
from unet3d.kernels.loss_sums import MAX_CLASSES, gradient_of, sums


def arguments(shape, dtype=torch.float64, device="cpu", num_others=0):
    """Return logits, a target with some indices beyond the classes, and a gradient of the sums."""
    generator = torch.Generator().manual_seed(0)
    n, k, *space = shape
    logits = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, k + num_others, (n, *space), generator=generator)
    gradient = torch.randn(4, n, k, generator=generator, dtype=torch.float64)
    return logits.to(device), target.to(device), gradient.to(device)


def sums_and_gradient(logits, target, gradient):
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return results(lambda logits: dice_ce_sums(logits, target), [logits], gradient.to(dtype))


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_sums_and_gradients_are_those_of_a_loop_over_voxels(num_others):
    """Voxels whose index is beyond the classes change nothing."""
    logits, target, gradient = arguments((2, 3, 2, 3, 2), num_others=num_others)

    def in_a_loop(logits):
        expected = torch.zeros(4, 2, 3, dtype=torch.float64)
        for sample in range(2):
            for voxel in torch.cartesian_prod(*(torch.arange(n) for n in (2, 3, 2))).tolist():
                values = logits[(sample, slice(None), *voxel)]
                chances = values.exp() / values.exp().sum()
                label = int(target[(sample, *voxel)])
                if label < 3:
                    expected[0, sample, label] -= chances[label].log()
                    expected[1, sample, label] += chances[label]
                    expected[2, sample] += chances
                    expected[3, sample, label] += 1
        return expected

    made, found = sums_and_gradient(logits, target, gradient)
    assert_same([made, found], results(in_a_loop, [logits], gradient), 1e-13)
    assert not found.movedim(1, -1)[target >= 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_gpu_takes_the_operation(dtype):
    with FakeTensorMode():
        logits = torch.empty(2, 5, 4, 3, 2, dtype=dtype, device="cpu:0", requires_grad=True)
        target = torch.empty(2, 4, 3, 2, dtype=torch.uint8, device="cpu:0")
        made = dice_ce_sums(logits, target)
        assert (made.shape, made.dtype) == ((4, 2, 5), torch.float32)
        assert made.grad_fn.gradient_of is gradient_of
        (found,) = torch.autograd.grad(made.sum(), logits)
        assert (found.shape, found.dtype) == (logits.shape, dtype)
        assert found.is_contiguous(memory_format=torch.channels_last_3d)
        many = torch.empty(1, MAX_CLASSES + 1, 2, 2, 2, device="cpu:0", requires_grad=True)
        plain = dice_ce_sums(many, torch.zeros(1, 2, 2, 2, device="cpu:0", dtype=torch.long))
        assert plain.grad_fn.gradient_of is not gradient_of


@pytest.mark.gpu
@each_value(
    shape=[
        (1, 3, 40, 48, 56),
        (2, 2, 7, 9, 11),
        (3, 5, 3, 5, 7),
        (1, 16, 6, 6, 6),
        (2, 33, 8, 8, 8),
        (1, MAX_CLASSES, 9, 9, 9),
    ],
    kind=[(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)],
    num_others=[0, 1],
)
def test_sums_and_gradients_on_a_gpu_against_float64(shape, kind, num_others):
    dtype, tolerance = kind
    logits, target, gradient = arguments(shape, dtype, "cuda", num_others)
    made, found = sums_and_gradient(logits, target, gradient)
    expected, wanted = sums_and_gradient(logits.double(), target, gradient)
    assert (made.dtype, found.dtype) == (torch.float32, dtype)
    for row, other in zip(made, expected, strict=True):  # sums are in float32 for any type
        assert (row.double() - other).norm() <= 1e-6 * other.norm()
    assert torch.equal(made[3].double(), expected[3])
    assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
    assert not found.movedim(1, -1)[target >= shape[1]].any()
    again = sums_and_gradient(logits, target, gradient)
    assert all(torch.equal(a, b) for a, b in zip((made, found), again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_integer_type_and_layout_on_a_gpu(layout):
    logits, target, gradient = arguments((2, 3, 6, 5, 7), torch.float32, "cuda")
    expected = sums_and_gradient(logits, target, gradient)
    # Every second voxel of a larger target, as in deep supervision.
    large = target.repeat_interleave(2, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        strided = large.to(dtype)[:, ::2, ::2, ::2]
        actual = sums_and_gradient(logits.contiguous(memory_format=layout), strided, gradient)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operation_is_registered_as_pytorch_wants_it(dtype):
    logits, target, gradient = arguments((2, 2, 7, 9, 11), dtype, "cuda")
    called(sums, logits, target)
    called(gradient_of, gradient.float(), logits, target)


NESTED = ((1, 2, 3), (2, 3), (3,))
REGIONS = [NESTED, ((1,),), ((2, 1), (1, 3))]


def region_arguments(regions, num_others, dtype=torch.float64):
    """Return logits, a target with some ignored indices, and a gradient of the sums."""
    generator = torch.Generator().manual_seed(0)
    num_classes = max(map(max, regions)) + 1
    shape = (2, len(regions), 3, 4, 5)
    logits = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, num_classes + num_others, (2, 3, 4, 5), generator=generator)
    return logits, target, torch.randn(5, *shape[:2], generator=generator, dtype=torch.float64)


def plain_sums(logits, target, regions):
    mask = (target <= max(map(max, regions))).to(logits.dtype).unsqueeze(1)
    truth = torch.stack([torch.isin(target, torch.tensor(r)) for r in regions], 1).to(logits.dtype)
    entropy = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    chance = logits.sigmoid()
    parts = (entropy * mask, chance * truth, chance * mask, truth, mask.expand_as(truth))
    return torch.stack([part.sum((2, 3, 4)) for part in parts])


@pytest.mark.parametrize("num_others", [0, 1, 3])
@pytest.mark.parametrize("regions", REGIONS, ids=str)
def test_sums_and_gradients_are_those_of_pytorch(regions, num_others):
    logits, target, gradient = region_arguments(regions, num_others)
    sums, found = results(lambda x: region_sums(x, target, regions), [logits], gradient)
    expected = results(lambda x: plain_sums(x, target, regions), [logits], gradient)
    assert_same([sums, found], expected, 1e-12)
    is_left_out = (target > max(map(max, regions))).unsqueeze(1).expand_as(found)
    assert not found[is_left_out].any()
    for dtype in (torch.uint8, torch.int16):
        assert torch.equal(region_sums(logits, target.to(dtype), regions), sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_low_precision_is_summed_in_float32(dtype, layout):
    logits, target, gradient = region_arguments(NESTED, 1, dtype)
    logits = logits.contiguous(memory_format=layout)
    sums, ours = results(lambda x: region_sums(x, target, NESTED), [logits], gradient.float())
    expected = results(lambda x: region_sums(x, target, NESTED), [logits.double()], gradient)
    assert (sums.dtype, ours.dtype, ours.stride()) == (torch.float32, dtype, logits.stride())
    assert_near([sums], expected[:1], 1e-6)
    assert_near([ours], expected[1:], torch.finfo(dtype).eps)


def test_logits_of_any_size_have_finite_sums():
    logits = torch.tensor([-300.0, 300.0]).view(1, 1, 2, 1, 1).requires_grad_()
    for label in (0, 1):
        sums = region_sums(logits, torch.full((1, 2, 1, 1), label), ((1,),))
        assert sums[0].item() == 300
        (found,) = torch.autograd.grad(sums[:3].sum(), logits)
        assert found.isfinite().all()
