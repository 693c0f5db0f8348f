import itertools
import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from tests.products import each_value
from unet3d.preparation import interpolation
from unet3d.preparation.interpolation import Resampling, interpolated, line_matrix, restored_slabs

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
    # The slowest axis in memory stays the slowest.
    assert found.permute(order).is_contiguous()


GRIDS = [
    ((20, 16, 12), (33, 25, 40)),
    ((33, 25, 40), (20, 16, 12)),
    ((20, 16, 12), (20, 31, 12)),
    ((20, 16, 12), (7, 40, 12)),
    ((1, 5, 2), (9, 3, 2)),
    ((9, 3, 2), (1, 5, 2)),
]


def restoring(grid, shape, nearest_axis=None):
    orders = tuple(0 if axis == nearest_axis else 1 for axis in range(3))
    return Resampling.of((3, *grid), shape, orders)


def logits_of(shape):
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(3, *shape, generator=generator, dtype=torch.float64)


@each_value(grids=GRIDS, axis=[0, 1, 2], num_planes=[1, 3, 100], numbers=[1, 2**25])
def test_any_slabs_give_the_trilinear_interpolation_of_the_whole(
    grids, axis, num_planes, numbers, monkeypatch
):
    monkeypatch.setattr(interpolation, "PIECE_NUMBERS", numbers)
    grid, shape = grids
    logits = logits_of(grid)
    slabs = torch.split(logits, num_planes, dim=1 + axis)
    found = list(restored_slabs(slabs, axis, restoring(grid, shape)))
    expected = torch.nn.functional.interpolate(
        logits[None], size=shape, mode="trilinear", align_corners=False
    )[0]
    torch.testing.assert_close(torch.cat(found, 1 + axis), expected, rtol=0, atol=1e-6)
    if numbers == 1 and grid != shape:
        assert {slab.shape[1 + axis] for slab in found} == {1}


@pytest.mark.parametrize(
    ("nearest_axis", "expected"),
    [
        (None, [(10, 19), (20, 20), (30, 20), (40, 21)]),  # the last plane needs the next one
        (0, [(10, 20), (20, 20), (30, 20), (40, 20)]),
    ],
)
def test_planes_come_as_soon_as_they_are_known(nearest_axis, expected):
    given = []

    def slabs():
        for slab in torch.split(logits_of((40, 4, 4)), 10, dim=1):
            given.append(slab.shape[1])
            yield slab

    restored = restored_slabs(slabs(), 0, restoring((40, 4, 4), (80, 4, 4), nearest_axis))
    assert [(sum(given), slab.shape[1]) for slab in restored] == expected


def test_the_same_grid_needs_nothing():
    slabs = [logits_of((4, 5, 6)), logits_of((3, 5, 6))]
    found = list(restored_slabs(slabs, 0, restoring((7, 5, 6), (7, 5, 6))))
    assert all(one is other for one, other in zip(found, slabs, strict=True))


@each_value(grids=GRIDS, axis=[0, 1, 2], nearest=[0, 1, 2], num_planes=[1, 3, 100])
def test_any_slabs_give_the_nearest_slices(grids, axis, nearest, num_planes):
    grid, shape = grids
    logits = logits_of(grid)
    slabs = torch.split(logits, num_planes, dim=1 + axis)
    found = torch.cat(list(restored_slabs(slabs, axis, restoring(grid, shape, nearest))), 1 + axis)
    size = [grid[one] if one == nearest else shape[one] for one in range(3)]
    slices = torch.nn.functional.interpolate(logits[None], size=size, mode="trilinear")[0].numpy()
    places = grid[nearest] / shape[nearest] * (np.arange(shape[nearest]) + 0.5) - 0.5
    lines = [np.arange(n) if one != nearest else places for one, n in enumerate(shape)]
    expected = np.stack(
        [
            ndimage.map_coordinates(
                one, np.stack(np.meshgrid(*lines, indexing="ij")), order=0, mode="nearest"
            )
            for one in slices
        ]
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)
