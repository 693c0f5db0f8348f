"""Sums over voxels of the loss of regions, and their gradients, against autograd and counting."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.comparison import LAYOUTS, assert_near, assert_same, results
from unet3d.kernels import region_sums

NESTED = ((1, 2, 3), (2, 3), (3,))
REGIONS = [NESTED, ((1,),), ((2, 1), (1, 3))]


def arguments(regions, num_others, dtype=torch.float64):
    """Return logits, target, with so many indices that are left out, and a gradient of sums."""
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
    logits, target, gradient = arguments(regions, num_others)
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
    logits, target, gradient = arguments(NESTED, 1, dtype)
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
