from contextlib import nullcontext
from itertools import product

import pytest
import torch
from monai.losses import DiceCELoss

from tests.gpu_waits import refused_waits
from tests.products import each_value
from unet3d.model import SegmentationLoss, dice_cross_entropy
from unet3d.parallel.losses import total_of, weighted

BATCH_DICE = SegmentationLoss(joins_samples=True)


def make_batch(num_classes, num_samples=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_classes)
    shape = (num_samples, num_classes, 6, 5, 7)
    logits = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, num_classes, (num_samples, 6, 5, 7), generator=generator)
    return logits.requires_grad_(), target


def monai_loss(logits, target, joins_samples=False):
    options = {"include_background": False, "to_onehot_y": True, "softmax": True}
    loss = DiceCELoss(batch=joins_samples, smooth_nr=1e-5, smooth_dr=1e-5, **options)
    return loss(logits, target.unsqueeze(1))


def gradient(loss, logits):
    (result,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return result


def assert_same(ours, theirs, logits):
    """Compare losses, and their gradients."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    wanted = gradient(theirs, logits)
    torch.testing.assert_close(gradient(ours, logits), wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("joins_samples", [False, True])
@pytest.mark.parametrize(
    ("num_classes", "present"),
    [(2, (0, 1)), (3, (0, 1, 2)), (6, range(6)), (4, (0,)), (4, (0, 2)), (4, (1,))],
    ids=str,
)
def test_loss_and_gradient_are_monais(num_classes, present, joins_samples):
    logits, target = make_batch(num_classes)
    target = torch.tensor(present)[target % len(present)]
    ours = SegmentationLoss(joins_samples=joins_samples)(logits, target).total
    assert_same(ours, monai_loss(logits, target, joins_samples), logits)


@pytest.mark.parametrize("joins_samples", [False, True])
def test_ignored_voxels_are_as_if_they_were_not_there(joins_samples):
    """nnU-Net's masks, reimplemented: means over labelled voxels, of each sample or of all."""
    logits, target = make_batch(3)
    target[0, :4] = 3
    target[2] = 3  # the last sample has no labelled voxel
    loss = SegmentationLoss(joins_samples=joins_samples)
    terms = loss(logits, target)
    chance, dice, cross_entropy = logits.softmax(1), [], []
    groups = [[0, 1, 2]] if joins_samples else [[0], [1], [2]]
    for group in groups:
        mask = (target[group] != 3).double()
        surprise = torch.nn.functional.cross_entropy(
            logits[group], target[group], ignore_index=3, reduction="none"
        )
        cross_entropy.append(surprise.sum() / mask.sum().clamp_min(1))
        for label in (1, 2):
            truth = (target[group] == label).double()
            predicted = chance[group][:, label] * mask
            overlap = 2 * (predicted * truth).sum() + 1e-5
            dice.append(1 - overlap / (predicted.sum() + truth.sum() + 1e-5))
    expected = torch.stack(dice).mean() + torch.stack(cross_entropy).mean()
    found = gradient(terms.total, logits)
    assert_same(terms.total, expected, logits)
    assert not found[2].any() and not found[0, :, :4].any()
    # A batch without labels has a loss of 0.
    terms = loss(logits, torch.full_like(target, 3))
    assert terms.total.item() == pytest.approx(0, abs=1e-12)
    assert not gradient(terms.total, logits).any()


@each_value(
    regions=[((1, 2, 3), (2, 3), (3,)), ((1, 2, 3),)],
    joins_samples=[False, True],
    ignores=[False, True],
    num_levels=[1, 2],
)
def test_the_loss_of_regions_is_nnunets(regions, joins_samples, ignores, num_levels):
    """Binary cross-entropy plus Dice of every region (nnU-Net's DC_and_BCE_loss), reimplemented."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(0, 5 if ignores else 4, (3, 8, 4, 4), generator=generator)
    shapes = [(3, len(regions), 8 // n, 4 // n, 4 // n) for n in (1, 2)[:num_levels]]
    levels = [torch.randn(s, generator=generator).double().requires_grad_() for s in shapes]
    loss = SegmentationLoss(joins_samples=joins_samples, regions=regions)
    terms = loss(levels if num_levels > 1 else levels[0], target)
    expected = torch.zeros((), dtype=torch.float64)
    for number, logits in enumerate(levels):
        step = 2**number
        labels = target[:, ::step, ::step, ::step]
        mask = (labels != 4).double().unsqueeze(1)
        truth = torch.stack([torch.isin(labels, torch.tensor(r)) for r in regions], 1).double()
        entropy = mask * torch.nn.functional.binary_cross_entropy_with_logits(
            logits, truth, reduction="none"
        )
        chance = logits.sigmoid() * mask
        axes = (0, 2, 3, 4) if joins_samples else (2, 3, 4)
        overlap = 2 * (chance * truth).sum(axes) + 1e-5
        dice = 1 - overlap / (chance.sum(axes) + truth.sum(axes) + 1e-5)
        if joins_samples:
            cross_entropy = entropy.sum() / (mask.sum() * len(regions))
        else:
            over_voxels = entropy.sum((1, 2, 3, 4)) / (mask.sum((1, 2, 3, 4)) * len(regions))
            cross_entropy = over_voxels.mean()
        weight = 0.5**number / sum(0.5**n for n in range(num_levels))
        expected = expected + weight * (dice.mean() + cross_entropy)
    for level in levels:
        assert_same(terms.total, expected, level)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_taken_in_float32(dtype):
    logits, target = make_batch(3, dtype=dtype)
    exact = logits.detach().double().requires_grad_()
    loss, expected = dice_cross_entropy(logits, target).total, monai_loss(exact, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    found = gradient(loss, logits)
    assert found.dtype == dtype
    # The result is rounded once, to the type's precision.
    wanted = gradient(expected, exact)
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_any_integer_type_of_target():
    logits, target = make_batch(3)
    expected = dice_cross_entropy(logits, target).total
    for dtype in (torch.uint8, torch.int16, torch.int32):
        for levels in (logits, [logits]):
            assert torch.equal(dice_cross_entropy(levels, target.to(dtype)).total, expected)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 3)], ids=str)
def test_micro_batches_add_up(sizes):
    """Weighted losses add up; so do sums, joined along samples or added for batch Dice."""
    logits, target = make_batch(3, num_samples=5)
    whole = dice_cross_entropy(logits, target)
    portions = list(zip(logits.split(sizes), target.split(sizes), strict=True))
    losses = [weighted(dice_cross_entropy(*portion), len(portion[0]) / 5) for portion in portions]
    joined = torch.cat([dice_cross_entropy.sums(*portion) for portion in portions], 2)
    for found in (total_of(losses), dice_cross_entropy.from_sums(joined)):
        for name in ("total", "dice", "cross_entropy"):
            ours, expected = getattr(found, name), getattr(whole, name)
            torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    added = torch.stack([BATCH_DICE.sums(*portion) for portion in portions]).sum(0)
    assert added.shape == (1, 4, 1, 3)
    found = BATCH_DICE.from_sums(added).total
    torch.testing.assert_close(found, monai_loss(logits, target, True), rtol=1e-12, atol=0)


def test_sums_of_slabs_give_the_loss_of_the_volume():
    """Ratios of slabs do not add up; sums do, and so do their gradients."""
    logits, target = make_batch(4)
    slabs = zip(logits.split((1, 1, 4), 2), target.split((1, 1, 4), 1), strict=True)
    sums = torch.stack([dice_cross_entropy.sums(slab, labels) for slab, labels in slabs]).sum(0)
    assert sums.shape == (1, 4, 3, 4)
    assert_same(dice_cross_entropy.from_sums(sums).total, monai_loss(logits, target), logits)
    # One sample: background, and a class of 6 voxels, with a probability of 4 in them and 1
    # elsewhere.
    sums = torch.tensor([[[[2.0, 3.0]], [[9.0, 4.0]], [[11.0, 5.0]], [[10.0, 6.0]]]]).double()
    terms = dice_cross_entropy.from_sums(sums)
    assert terms.cross_entropy.item() == pytest.approx(5 / 16)
    assert terms.dice.item() == pytest.approx(1 - 8 / 11, abs=1e-6)
    assert terms.total.item() == pytest.approx(5 / 16 + 3 / 11, abs=1e-6)


def test_deep_supervision_is_the_weighted_sum_of_levels():
    generator = torch.Generator().manual_seed(5)
    target = torch.randint(0, 3, (2, 8, 8, 4), generator=generator)
    sizes = [(8, 8, 4), (4, 4, 4), (2, 2, 2)]  # the first stride does not halve Z
    steps = [(1, 1, 1), (2, 2, 1), (4, 4, 2)]
    logits = [torch.randn(2, 3, *size, generator=generator, dtype=torch.float64) for size in sizes]
    terms = dice_cross_entropy(logits, target)
    expected = torch.zeros((), dtype=torch.float64)
    for level, step, weight in zip(logits, steps, (4 / 7, 2 / 7, 1 / 7), strict=True):
        coarse = torch.empty(level[:, 0].shape, dtype=torch.long)
        for x, y, z in product(*map(range, level.shape[2:])):
            coarse[:, x, y, z] = target[:, x * step[0], y * step[1], z * step[2]]
        expected += weight * monai_loss(level, coarse)
    torch.testing.assert_close(terms.total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(terms.total, terms.dice + terms.cross_entropy)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_loss_stays_where_the_logits_are_and_nothing_waits_for_it(device):
    """No value is read back: meta tensors have none. No other device is used."""
    logits, target = (value.detach().to(device) for value in make_batch(3))
    logits.requires_grad_()
    with refused_waits() if device == "cuda" else nullcontext():
        terms = dice_cross_entropy([logits, logits[:, :, ::2]], target)
        made = (terms.total, terms.dice, terms.cross_entropy, gradient(terms.total, logits))
    assert {value.device.type for value in made} == {device}
