import itertools

import numpy as np
import pytest
import torch
from scipy import ndimage

from unet3d.preparation.interpolation import interpolated, line_matrix

RNG = np.random.default_rng(0)


def test_the_nearest_voxel_is_that_of_scipy_where_two_are_as_near():
    ties = 0
    for size, new_size in itertools.product(range(1, 40), range(1, 40)):
        line = RNG.permutation(size).astype(np.float64)
        places = size / new_size * (np.arange(new_size) + 0.5) - 0.5
        expected = ndimage.map_coordinates(line, places[None], order=0, mode="nearest")
        found = line_matrix(size, new_size, 0).double() @ torch.from_numpy(line)
        np.testing.assert_array_equal(found.numpy(), expected)
        ties += int(np.isclose(places % 1, 0.5).sum())
    assert ties > 1000


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_matrix_is_kept_for_other_images(order):
    assert torch.equal(line_matrix(7, 7, order), torch.eye(7))
    assert line_matrix(30, 40, order) is line_matrix(30, 40, order)


SIZES = [{1: 5}, {3: 200}, {1: 150, 2: 3}, {1: 3, 2: 100, 3: 21}, {}]


@pytest.mark.parametrize(
    ("order", "sizes"),
    list(zip(itertools.permutations(range(4)), itertools.cycle(SIZES), strict=False)),
    ids=str,
)
def test_any_order_of_memory_gives_the_products(order, sizes):
    shape = (2, 90, 7, 80)
    array = torch.from_numpy(RNG.normal(size=[shape[dim] for dim in order]).astype(np.float32))
    array = array.permute([order.index(dim) for dim in range(4)])
    assert array.shape == shape
    matrices = {dim: line_matrix(shape[dim], size, 3) for dim, size in sizes.items()}
    expected = array.double().numpy()
    for dim, matrix in matrices.items():
        expected = np.moveaxis(np.tensordot(matrix.double().numpy(), expected, (1, dim)), 0, dim)
    found = interpolated(array, matrices)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    # The slowest in memory is still the slowest.
    assert found.permute(order).is_contiguous()
