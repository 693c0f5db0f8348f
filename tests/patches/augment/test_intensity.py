import itertools

import numpy as np
import pytest
import torch

from unet3d.patches.augment.cut import Extent
from unet3d.patches.augment.intensity import Part, change_contrast, change_gamma
from unet3d.preparation.prepared_image import whole_box

SHAPE = (12, 15, 9)


def channel(scale=1.0, offset=0.0):
    values = np.random.default_rng(0).normal(size=SHAPE) * scale + offset
    return torch.from_numpy(values.astype(np.float32))


def bend(image, *curves):
    """Change a channel's gamma in several ways: by exponents, inverted or not."""
    exponents, inverted = zip(*curves, strict=True)
    signs = [-1.0 if one else 1.0 for one in inverted]
    channels = image.repeat(len(curves), 1, 1, 1)
    numbers = torch.tensor(exponents)[:, None], torch.tensor(signs)[:, None]
    return change_gamma(channels, whole(image), *numbers)


def scale_contrast(image, *factors):
    channels = image.repeat(len(factors), 1, 1, 1)
    return change_contrast(channels, whole(image), torch.tensor(factors)[:, None])


def whole(image):
    box = whole_box(image.shape)
    return Part(Extent(image.shape, box, box))


@pytest.mark.parametrize("bounds", [(0, 5, 12), (0, 1, 11, 12), (0, 0, 12)])
def test_levels_of_slabs_are_gathered(bounds):
    """Also with a mean far from zero, and if a slab has margins, or no voxel."""
    image = channel(2.0, 500.0)
    channels = torch.stack((image, 3 - image))
    own = []

    def noted(numbers):
        own.append(numbers)
        return numbers[None]

    all_y_and_z = (slice(0, 15), slice(0, 9))
    parts = []
    for first, last in itertools.pairwise(bounds):
        part, made = slice(first, last), slice(max(0, first - 1), min(12, last + 1))
        extent = Extent(SHAPE, (part, *all_y_and_z), (made, *all_y_and_z))
        parts.append((channels[:, made], extent))
    for box, extent in parts:
        Part(extent, noted).levels(box)
    for box, extent in parts:
        levels = Part(extent, lambda _: torch.stack(own)).levels(box)
        assert levels.mean.dtype == levels.variance.dtype == torch.float32
        for one, *found in zip(channels, *levels, strict=True):
            values = one.numpy().astype(np.float64)
            np.testing.assert_allclose(found[0], [values.mean()], rtol=1e-7)
            np.testing.assert_allclose(found[1], [values.var(ddof=1)], rtol=2e-6)
            assert (found[2], found[3]) == (values.min(), values.max())


def nnunet_gamma(values, exponent, is_inverted):
    """The formula of batchgeneratorsv2, in float64, reimplemented."""
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
    curves = [(exponent, is_inverted), (1.2, False), (0.8, True)]
    for curve, found in zip(curves, bend(image, *curves), strict=True):
        expected = nnunet_gamma(image.numpy().astype(np.float64), *curve)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-5 * scale)


@pytest.mark.parametrize("factor", [0.75, 1.25])
def test_contrast_keeps_mean_and_range(factor):
    image = channel()
    values = image.numpy().astype(np.float64)
    expected = ((values - values.mean()) * factor + values.mean()).clip(values.min(), values.max())
    np.testing.assert_allclose(scale_contrast(image, 1.1, factor)[1], expected, atol=1e-6)


def test_a_constant_channel_stays_as_it_is():
    for value, is_inverted in itertools.product((0.0, -3.0, 1e6), (False, True)):
        image = torch.full(SHAPE, value)
        (bent,) = bend(image, (0.7, is_inverted))
        (found,) = scale_contrast(bent, 1.25)
        torch.testing.assert_close(found, torch.full(SHAPE, value))
    assert bend(torch.tensor([[[2.0]]]), (0.7, False)).item() == 2.0
