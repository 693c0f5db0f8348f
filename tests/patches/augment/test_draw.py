from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.transform import Rotation

from tests.patches.known_cases import probable
from unet3d.config import AugmentationSettings
from unet3d.patches.augment.draw import STILL, AugmentationDraw, DrawnChannel, free_axes

NUM_DRAWN = 5_000
MAX_ERROR = 0.02
"""At least three standard deviations of a share in this number of draws."""


def draw(**changes):
    return AugmentationDraw(probable(0, **{"mirror_axes": (), **changes}))


def drawn_matrices(augmentation, count, size=(9, 9, 9), spacing_mm=(1, 1, 1)):
    """Return the matrices of ``count`` patches, without patches that are not transformed."""
    rngs = (np.random.default_rng(seed) for seed in range(count))
    drawn = [augmentation.matrix(rng, size, spacing_mm) for rng in rngs]
    return np.array([matrix for matrix in drawn if matrix is not None])


def drawn_channels(augmentation, count=NUM_DRAWN, num_channels=1, spacing_mm=(1, 1, 1)):
    rngs = [np.random.default_rng(seed) for seed in range(count)]
    return [c for rng in rngs for c in augmentation.channels(rng, num_channels, spacing_mm)]


def is_uniform(values, low, high):
    """Kolmogorov-Smirnov test; and the extremes must be as close to the ends as is likely."""
    reached = 10 * (high - low) / np.size(values)  # closer with a probability of 1 - exp(-10)
    begins_there = low - 1e-9 <= np.min(values) <= low + reached
    ends_there = high - reached <= np.max(values) <= high + 1e-9
    pvalue = stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue
    return begins_there and ends_there and pvalue > 1e-3


@pytest.fixture(scope="module")
def defaults():
    return drawn_channels(AugmentationDraw(AugmentationSettings()))


# Ranges and probabilities of nnunetv2 2.8.1, nnUNetTrainer.get_training_transforms, one channel.


def test_noise_and_filters_are_drawn_as_in_nnunet(defaults):
    drawn = [channel.noise_std for channel in defaults if channel.noise_std]
    assert len(drawn) / NUM_DRAWN == pytest.approx(0.1, abs=MAX_ERROR)
    assert is_uniform(drawn, 0, 0.1)
    assert len({channel.noise_seed for channel in defaults}) > 0.999 * NUM_DRAWN
    sigmas = [channel.blur_sigma for channel in defaults if channel.blur_sigma]
    assert len(sigmas) / NUM_DRAWN == pytest.approx(0.2 * 0.5, abs=MAX_ERROR)
    assert is_uniform(np.ravel(sigmas), 0.5, 1)
    assert all(len(set(sigma)) == 3 for sigma in sigmas)
    resolutions = [channel.resolution for channel in defaults if channel.resolution != STILL]
    assert len(resolutions) / NUM_DRAWN == pytest.approx(0.25 * 0.5, abs=MAX_ERROR)
    assert all(len(set(resolution)) == 1 for resolution in resolutions)
    assert is_uniform([x for x, _, _ in resolutions], 0.5, 1)


@pytest.mark.parametrize(
    ("name", "low", "high", "probability"),
    [
        ("brightness", 0.75, 1.25, 0.15),
        ("contrast", 0.75, 1.25, 0.15),
        ("inverted_gamma", 0.7, 1.5, 0.1),
        ("gamma", 0.7, 1.5, 0.3),
    ],
)
def test_factors_are_drawn_as_in_nnunet(defaults, name, low, high, probability):
    drawn = np.array([getattr(channel, name) for channel in defaults])
    drawn = drawn[drawn != 1]
    assert len(drawn) / NUM_DRAWN == pytest.approx(probability, abs=MAX_ERROR)
    assert (drawn < 1).mean() == pytest.approx(0.5, abs=0.07)
    assert is_uniform(drawn[drawn < 1], low, 1)
    assert is_uniform(drawn[drawn > 1], 1, high)


def test_rotation_and_scaling_are_drawn_as_in_nnunet():
    """Angles up to 30 degrees about each axis; scales from 0.7 to 1.4."""
    turns = drawn_matrices(draw(rotation_probability=0.2), NUM_DRAWN)
    scales = drawn_matrices(draw(scaling_probability=0.2), NUM_DRAWN)
    assert len(turns) / NUM_DRAWN == pytest.approx(0.2, abs=MAX_ERROR)
    assert len(scales) / NUM_DRAWN == pytest.approx(0.2, abs=MAX_ERROR)
    angles = Rotation.from_matrix(turns).as_euler("xyz", degrees=True)
    for axis in range(3):
        assert is_uniform(angles[:, axis], -30, 30)
    np.testing.assert_allclose(scales, scales[:, :1, :1] * np.eye(3), atol=1e-12)
    assert is_uniform(np.log(scales[:, 0, 0]), np.log(0.7), np.log(1.4))


@pytest.mark.parametrize("about", [0, 1, 2])
def test_thick_slices_are_turned_all_the_way_round_in_their_plane(about):
    """As in nnU-Net, which augments thick slices like 2-D images."""
    spacing_mm = tuple(np.roll((6.0, 1.2, 1.0), about))
    drawn = drawn_matrices(draw(rotation_probability=1.0), 1000, (9, 9, 9), spacing_mm)
    in_mm = np.diag(spacing_mm) @ drawn @ np.linalg.inv(np.diag(spacing_mm))
    np.testing.assert_allclose(in_mm @ in_mm.swapaxes(1, 2), [np.eye(3)] * 1000, atol=1e-12)
    vectors = Rotation.from_matrix(in_mm).as_rotvec(degrees=True)
    np.testing.assert_allclose(np.delete(vectors, about, axis=1), 0, atol=1e-9)
    assert is_uniform(vectors[:, about], -180, 180)


@pytest.mark.parametrize("plane", [True, False])
def test_each_limit_of_rotation_is_that_of_its_patches(plane):
    spacing_mm = (1, 1, 5) if plane else (1, 1, 1)
    limits = {"rotation_degrees": 12, "in_plane_rotation_degrees": 70}
    # X and Y are treated alike.
    turns = drawn_matrices(draw(rotation_probability=1.0, **limits), 2000, (9, 9, 9), spacing_mm)
    angles = Rotation.from_matrix(turns).as_euler("xyz", degrees=True)
    assert is_uniform(angles[:, 2], *((-70, 70) if plane else (-12, 12)))
    still = draw(rotation_probability=1.0, **{**limits, [*limits][plane]: 0})
    matrices = drawn_matrices(still, 20, (9, 9, 9), spacing_mm)
    np.testing.assert_allclose(matrices, [np.eye(3)] * 20, atol=1e-12)


def test_nothing_else_happens_than_what_is_asked():
    drawn = drawn_channels(draw(noise_probability=0.7))
    assert np.mean([c.noise_std > 0 for c in drawn]) == pytest.approx(0.7, abs=MAX_ERROR)
    assert len(drawn_matrices(draw(), 50)) == 0
    for channel in drawn_channels(draw(), 50):
        assert channel == DrawnChannel(noise_seed=channel.noise_seed)


def test_channels_are_drawn_apart_but_share_the_deviation_of_noise():
    """A channel's gamma does not suit another channel, which has other extremes."""
    always = AugmentationDraw(probable(1))
    drawn = [always.channels(np.random.default_rng(seed), 3, (1, 1, 1)) for seed in range(200)]
    for channels in drawn:
        assert len({channel.noise_std for channel in channels}) == 1
        for name in ("noise_seed", "gamma", "inverted_gamma", "brightness", "contrast"):
            assert len({getattr(channel, name) for channel in channels}) == 3
    blurred = [sum(channel.blur_sigma is not None for channel in channels) for channels in drawn]
    assert np.mean(blurred) == pytest.approx(1.5, abs=0.25)


@pytest.mark.parametrize(
    ("size", "spacing_mm", "turning", "scaling"),
    [
        ((9, 9, 9), (1, 1, 1), "xyz", "xyz"),
        ((1, 9, 9), (1, 1, 1), "yz", "yz"),
        ((9, 9, 9), (5, 5, 1), "xy", "xy"),
        ((9, 9, 9), (4, 1, 10), "xz", "xz"),
        ((9, 9, 9), (1, 5, 25), "", "xyz"),
        ((9, 1, 9), (1, 5, 25), "", "xz"),
        ((1, 1, 9), (1, 1, 1), "z", "z"),
    ],
)
def test_axes_that_turn_and_scale(size, spacing_mm, turning, scaling):
    turns, scales = free_axes(size, spacing_mm)
    assert "".join(axis for axis, is_in in zip("xyz", turns, strict=True) if is_in) == turning
    assert "".join(axis for axis, is_in in zip("xyz", scales, strict=True) if is_in) == scaling
    both = draw(rotation_probability=1.0, scaling_probability=1.0)
    for matrix in drawn_matrices(both, 10, size, spacing_mm):
        for axis, name in enumerate("xyz"):
            if name not in scaling:
                np.testing.assert_allclose(matrix[axis], np.eye(3)[axis], atol=1e-12)
                np.testing.assert_allclose(matrix[:, axis], np.eye(3)[axis], atol=1e-12)
        is_turned = abs(matrix - np.diag(np.diag(matrix))).max() > 1e-6
        assert is_turned == (len(turning) > 1)


def test_only_the_named_axes_are_mirrored_each_one_time_in_two():
    matrices = drawn_matrices(draw(mirror_axes=("x", "z")), 400)
    for signs in [(-1, 1, 1), (1, 1, -1), (-1, 1, -1)]:
        share = (matrices == np.diag(signs)).all(axis=(1, 2)).sum() / 400
        assert share == pytest.approx(0.25, abs=0.09)
    assert len(matrices) / 400 == pytest.approx(0.75, abs=0.09)


def test_thick_slices_keep_their_resolution():
    for channel in drawn_channels(draw(low_resolution_probability=1.0), 20, 1, (1, 1, 5)):
        assert channel.resolution == STILL or (channel.resolution[2] == 1 != channel.resolution[0])


def test_one_probability_changes_nothing_else():
    """So two trainings can be compared."""
    before = drawn_channels(AugmentationDraw(AugmentationSettings()), 50, 2)
    after = drawn_channels(AugmentationDraw(AugmentationSettings(gamma_probability=0)), 50, 2)
    assert [replace(channel, gamma=1) for channel in before] == after
