import itertools
import math
import time

import numpy as np
import pytest
import torch
from scipy import ndimage

from tests.inference.blending import TOPOLOGY
from unet3d.errors import VolumeError
from unet3d.inference.windows import (
    Windows,
    gaussian_weight,
    longest_axis,
    product,
    window_starts,
    windows_at_a_time,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.5, 0.75, 0.9, 0.99])
def test_starts_cover_an_axis_with_the_overlap_asked_for(overlap):
    for window, size in ((n, size) for n in (1, 2, 10, 20, 31) for size in range(n, 4 * n + 3)):
        starts = window_starts(size, window, overlap)
        assert starts[0] == 0
        assert starts[-1] == size - window
        steps = [b - a for a, b in itertools.pairwise(starts)]
        assert all(step >= 1 for step in steps)
        # A step leaves the overlap, in whole voxels, but is at least one voxel.
        assert all(step <= max(1, math.ceil(window * (1 - overlap) - 1e-9)) for step in steps)
        if steps:
            assert max(steps) - min(steps) <= 1  # evenly spread


@pytest.mark.parametrize("window", [(16, 16, 16), (64, 9, 4), (5, 1, 8), (40, 56, 40), (2, 3, 1)])
def test_weights_are_scipys_gaussian_of_a_point(window):
    point = np.zeros(window)
    point[tuple(n // 2 for n in window)] = 1
    expected = ndimage.gaussian_filter(point, [n / 8 for n in window], mode="constant")
    expected /= expected.max()
    assert expected.min() > 0  # the Gaussian is cut off at four sigma, beyond the window
    weight = gaussian_weight(window)
    assert weight.dtype == torch.float32
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)
    assert weight.max() == 1
    assert weight.min() > 1e-11  # far above the numbers that float32 rounds to 0


@pytest.mark.parametrize(
    ("window", "devices", "expected"),
    [
        ((16, 16, 16), ("cpu",), 256),
        ((40, 40, 40), ("cpu", "cpu"), 16),
        ((96, 96, 96), ("cpu",), 1),
        ((256, 256, 256), ("cpu",), 1),
        ((16, 16, 16), ("cuda:0",), 1),
        ((16, 16, 16), ("cpu", "cuda:0"), 1),
    ],
)
def test_a_cpu_takes_small_windows_together(window, devices, expected):
    assert windows_at_a_time(window, [torch.device(name) for name in devices]) == expected


@pytest.mark.parametrize("size", [(40, 20, 10), (21, 37, 11), (16, 9, 30), (7, 7, 7)])
@pytest.mark.parametrize(("overlap", "batch_size"), [(0.0, 1), (0.5, 4), (0.8, 100)])
def test_windows_advance_along_the_longest_axis_and_reach_no_further(size, overlap, batch_size):
    windows = Windows.of(size, TOPOLOGY, (16, 16, 8), overlap, batch_size, [CPU])
    axis = longest_axis(size)
    assert windows.axis == axis and size[axis] == max(size)
    along = [start[axis] for start in windows.starts]
    assert along == sorted(along)
    assert len(windows.starts) == len(set(windows.starts))
    seen = torch.zeros(windows.size)
    for batch in windows.batches():
        assert len(batch) <= batch_size
        ends = [start[axis] + windows.shape[axis] for start in batch]
        assert max(ends) - min(start[axis] for start in batch) <= windows.slab[axis]
        for start in batch:
            seen[windows.place(start)] += gaussian_weight(windows.shape)
    assert seen.min() > 0
    torch.testing.assert_close(product(windows.summed_weights()).float(), seen)
    assert tuple(seen[windows.inside].shape) == size


@pytest.mark.parametrize("size", [(10**9, 10**9, 10**9), (3000, 3000, 2000)])
def test_windows_are_counted_before_they_are_listed(size):
    began = time.monotonic()
    with pytest.raises(VolumeError, match="windows of 16x16x16, but at most 2097152 .*--window"):
        Windows.of(size, TOPOLOGY, (16, 16, 16), 0.5, 1, [CPU])
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(("device", "reach"), [("cpu", 16), ("cuda:0", 16 + 8)])
def test_on_a_cpu_no_slab_is_longer_than_a_window(device, reach):
    devices = [torch.device(device)]
    windows = Windows.of((160, 40, 8), TOPOLOGY, (16, 16, 8), 0.5, 3, devices)
    assert windows.slab == (reach, 40, 8)
    batches = list(windows.batches())
    assert [start for batch in batches for start in batch] == windows.starts
    assert max(map(len, batches)) == 3
    # Batches span rows that have fewer windows: smaller batches would only be slower.
    few = Windows.of((160, 24, 8), TOPOLOGY, (16, 16, 8), 0.5, 3, devices)
    assert {len(batch) for batch in list(few.batches())[:-1]} == {3}
