import numpy as np
import pytest
import torch
from scipy import stats

from unet3d.kernels.affine import noise
from unet3d.kernels.affine.noise import add_noise, gaussian_noise

CPU = torch.device("cpu")
SIZE = (40, 50, 60)


def whole(seed):
    return gaussian_noise((0, 0, 0), SIZE, SIZE, seed, CPU)


@pytest.mark.parametrize("seed", [(0, 0), (1, 2), (2**32 - 1, 2**31), (123456789, 987654321)])
def test_it_is_normally_distributed(seed):
    values = whole(seed).flatten().numpy()
    assert values.dtype == np.float32 and np.isfinite(values).all()
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert stats.kurtosis(values) == pytest.approx(0, abs=0.1)


def test_neighbours_along_every_axis_and_seeds_are_independent():
    values = whole((3, 4))
    for axis in range(3):
        for distance in (1, 2, 8, 16):
            pair = [
                values.narrow(axis, begin, values.shape[axis] - distance).flatten().numpy()
                for begin in (0, distance)
            ]
            assert abs(np.corrcoef(*pair)[0, 1]) < 0.015
            assert abs(np.corrcoef(*np.square(pair))[0, 1]) < 0.015
    noises = [whole(seed).flatten().numpy() for seed in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)]]
    correlations = np.corrcoef(noises) - np.eye(len(noises))
    assert np.abs(correlations).max() < 0.015


def test_a_part_has_the_noise_of_the_whole(monkeypatch):
    """For any number of planes that are made at a time."""
    expected = whole((8, 9))[3:10, 10:15, 20:50]
    assert torch.equal(gaussian_noise((3, 10, 20), (7, 5, 30), SIZE, (8, 9), CPU), expected)
    monkeypatch.setattr(noise, "CHUNK_VOXELS", 3 * 5 * 30)
    channel = torch.ones(7, 5, 30)
    add_noise(channel, 0.5, (3, 10, 20), SIZE, (8, 9))
    torch.testing.assert_close(channel, 1 + 0.5 * expected)
