import itertools

import numpy as np
import pytest
import torch

from unet3d.patches.augment import intensity
from unet3d.patches.augment.intensity import Statistics, change_contrast, change_gamma

SHAPE = (12, 15, 9)


def channel(scale=1.0, offset=0.0):
    values = np.random.default_rng(0).normal(size=SHAPE) * scale + offset
    return torch.from_numpy(values.astype(np.float32))


def statistics(of):
    return Statistics(None, of.numel(), None)


@pytest.mark.parametrize("bounds", [(0, 5, 12), (0, 1, 11, 12), (0, 0, 12)])
def test_levels_of_slabs_are_gathered(bounds, monkeypatch):
    """Also for a mean far from zero, and where a slab has margins, or no voxel."""
    monkeypatch.setattr(intensity, "CHUNK_VOXELS", 3 * 15 * 9)
    image = channel(2.0, 500.0)
    own = []

    def noted(numbers):
        own.append(numbers)
        return numbers[None]

    slabs = list(itertools.pairwise(bounds))
    boxes = [image[max(0, first - 1) : last + 1] for first, last in slabs]
    inner = [(slice(min(first, 1), min(first, 1) + last - first),) for first, last in slabs]
    for box, part in zip(boxes, inner, strict=True):
        Statistics(part, image.numel(), noted).levels(box)
    values = image.numpy().astype(np.float64)
    for box, part in zip(boxes, inner, strict=True):
        levels = Statistics(part, image.numel(), lambda _: torch.stack(own)).levels(box)
        assert levels.mean.dtype == levels.deviation.dtype == torch.float32
        np.testing.assert_allclose(levels.mean, values.mean(), rtol=1e-7)
        np.testing.assert_allclose(levels.deviation, values.std(ddof=1), rtol=1e-6)
        assert (levels.low, levels.high) == (values.min(), values.max())


def nnunet_gamma(values, exponent, is_inverted):
    """The formula of batchgeneratorsv2, in float64, written anew."""
    sign = -1 if is_inverted else 1
    values = sign * values
    mean, std = values.mean(), values.std(ddof=1)
    low, span = values.min(), values.max() - values.min()
    bent = ((values - low) / span) ** exponent * span + low
    restored = (bent - bent.mean()) * (std / bent.std(ddof=1)) + mean
    return np.asarray(sign * restored)


@pytest.mark.parametrize("exponent", [0.7, 1.5])
@pytest.mark.parametrize("is_inverted", [False, True])
@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (3.0, -2.0), (0.5, 100.0)])
def test_gamma_is_nnunets(exponent, is_inverted, scale, offset):
    image = channel(scale, offset)
    expected = nnunet_gamma(image.numpy().astype(np.float64), exponent, is_inverted)
    change_gamma(image, exponent, is_inverted, statistics(image))
    np.testing.assert_allclose(image, expected, rtol=1e-6, atol=2e-5 * scale)


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_contrast_keeps_mean_and_range(factor):
    image = channel()
    values = image.numpy().astype(np.float64)
    expected = ((values - values.mean()) * factor + values.mean()).clip(values.min(), values.max())
    change_contrast(image, factor, statistics(image))
    np.testing.assert_allclose(image, expected, atol=1e-6)


def test_a_constant_channel_stays_as_it_is():
    for value, is_inverted in itertools.product((0.0, -3.0, 1e6), (False, True)):
        image = torch.full(SHAPE, value)
        change_gamma(image, 0.7, is_inverted, statistics(image))
        change_contrast(image, 1.25, statistics(image))
        torch.testing.assert_close(image, torch.full(SHAPE, value))
    image = torch.tensor([[[2.0]]])
    change_gamma(image, 0.7, False, statistics(image))
    assert image.item() == 2.0
