import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage

from unet3d.patches.augment.cut import Extent
from unet3d.patches.augment.draw import DrawnChannel
from unet3d.patches.augment.filters import (
    blur_matrices,
    coarsening_matrices,
    filtered,
    reach_of,
)
from unet3d.patches.augment.intensity import Part
from unet3d.preparation.prepared_image import whole_box


def blur(channel, *sigmas, box=None):
    """Return a channel, or a box of it, blurred by several implementations."""
    return applied(channel, blur_matrices(sigmas, channel.shape), len(sigmas), box)


def coarsen(channel, *factors, box=None):
    return applied(channel, coarsening_matrices(factors, channel.shape), len(factors), box)


def applied(channel, matrices, number, box):
    box = box or whole_box(channel.shape)
    part = Part(Extent(channel.shape, box, box))
    own = channel[box]
    return filtered(own.expand(number, *own.shape), part, matrices).squeeze(0)


def noise(*shape):
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("shape", [(20, 31, 17), (130, 9, 66), (12, 1, 70)])
def test_blur_is_scipys_gaussian_mirrored_at_the_faces(shape):
    channel = noise(*shape)
    values = channel.numpy().astype(np.float64)
    # SciPy ends the Gaussian at a whole voxel, which cuts off 3e-4 of its weight at most.
    for sigma, atol in (((0.5, 0.8, 1.0), 2e-3), ((1.0, 1.0, 1.0), 1e-5)):
        expected = ndimage.gaussian_filter(values, sigma, mode="mirror", truncate=4.0)
        np.testing.assert_allclose(blur(channel, sigma), expected, atol=atol)


@pytest.mark.parametrize("shape", [(7, 8, 9), (2, 3, 1), (1, 1, 5)])
def test_a_constant_stays_that_constant(shape):
    three = torch.full(shape, 3.0)
    blurred = blur(three, (1.0, 0.7, 0.5))
    for result in (blurred, coarsen(three, (0.5, 0.63, 0.9))):
        torch.testing.assert_close(result, three, rtol=1e-6, atol=0)
    assert coarsening_matrices([(1.0, 1.0, 0.99)], shape) == (None, None, None)


@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_coarsening_is_pytorchs_area_and_linear_interpolation(factor):
    channel = noise(16, 24, 32)
    smaller = [round(voxels * factor) for voxels in channel.shape]
    area = F.interpolate(channel[None, None], size=smaller, mode="area")
    expected = F.interpolate(area, size=channel.shape, mode="trilinear", align_corners=False)[0, 0]
    result = coarsen(channel, (factor, factor, factor))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 0.55, 0.61, 0.77, 0.94])
@pytest.mark.parametrize("voxels", [21, 64, 101])
def test_coarsening_moves_nothing(voxels, factor):
    """MONAI's version takes the nearest voxel, which moved the image by 0.64 voxels on average."""
    place = torch.arange(voxels).float()
    ramp = place[:, None, None].expand(voxels, 3, 3).contiguous()
    moved = coarsen(ramp, (factor, 1.0, 1.0))[:, 0, 0] - place
    inner = moved[voxels // 5 : -voxels // 5]
    assert inner.mean().abs() < 0.05
    bump = torch.exp(-((place - voxels / 2 + 0.3) ** 2) / 18)[:, None, None].expand_as(ramp)
    after = coarsen(bump.contiguous(), (factor, 1.0, 1.0))[:, 0, 0]
    centre = [(place * line).sum() / line.sum() for line in (bump[:, 0, 0], after)]
    assert abs(centre[0] - centre[1]) < 0.05


@pytest.mark.parametrize("start", [(0, 0, 0), (10, 0, 30), (64, 5, 7)])
def test_a_box_is_the_same_box_of_the_whole(start):
    size = (130, 20, 70)
    channel = noise(*size)
    stop = tuple(min(n, first + 60) for n, first in zip(size, start, strict=True))
    box = tuple(slice(first, last) for first, last in zip(start, stop, strict=True))
    for change, how in (
        (blur, {"blur_sigma": (1.0, 0.6, 0.8)}),
        (coarsen, {"resolution": (0.7, 0.5, 0.9)}),
    ):
        whole, part = (change(channel, *how.values(), box=some) for some in (None, box))
        far = reach_of(DrawnChannel(**how), size)
        right = tuple(
            slice(0 if first == 0 else reach, last - first - (0 if last == voxels else reach))
            for first, last, voxels, reach in zip(start, stop, size, far, strict=True)
        )
        torch.testing.assert_close(part[right], whole[box][right], rtol=0, atol=1e-5)


def test_each_channel_has_its_own_filter():
    """Also if one channel keeps an axis that another one coarsens."""
    channel, sigmas = noise(70, 9, 12), [(0.5, 1.0, 0.7), (1.0, 0.6, 0.9)]
    factors = [(1.0, 0.5, 0.8), (0.6, 1.0, 1.0), (1.0, 1.0, 1.0)]
    for change, numbers in ((blur, sigmas), (coarsen, factors)):
        for one, result in zip(numbers, change(channel, *numbers), strict=True):
            torch.testing.assert_close(result, change(channel, one), rtol=0, atol=1e-6)
    torch.testing.assert_close(coarsen(channel, *factors)[2], channel, rtol=0, atol=0)
