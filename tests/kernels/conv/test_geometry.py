"""Which planes a convolution reads and makes: compared with counting them one by one."""

from itertools import product

import pytest

from unet3d.kernels.conv.geometry import Axis, Slab, divide, halves

KERNELS = list(product((1, 2, 3, 4), (1, 2, 3)))


def axes(kernel: int, stride: int) -> list[Axis]:
    """Return axes of many sizes and paddings."""
    return [
        Axis(size, kernel, stride, before, after)
        for size in (1, 2, 3, 5, 8, 9)
        for before, after in product(range(kernel), repeat=2)
        if size + before + after >= kernel
    ]


def products(axis: Axis) -> set[tuple[int, int, int]]:
    """Return (plane of the input, of the kernel, of the result) of every product of a volume."""
    return {
        (result * axis.stride + tap - axis.before, tap, result)
        for result in range((axis.size + axis.before + axis.after - axis.kernel) // axis.stride + 1)
        for tap in range(axis.kernel)
        if 0 <= result * axis.stride + tap - axis.before < axis.size
    }


def products_of(slab: Slab, axis: Axis) -> set[tuple[int, int, int]]:
    """Return those that a call on a slab computes, in planes of the volume."""
    call = Axis(len(slab.x), axis.kernel, axis.stride, slab.padding, slab.padding)
    assert call.result == len(slab.y)
    return {
        (x + slab.x.start, tap, y + slab.y.start)
        for x, tap, y in products(call)
        if 0 <= x + slab.x.start < axis.size
    }


def runs(planes: int) -> list[tuple[int, int]]:
    return [(first, stop) for first in range(planes) for stop in range(first + 1, planes + 1)]


@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_planes_are_those_that_are_counted(kernel, stride):
    for axis in axes(kernel, stride):
        all_of_them = products(axis)
        assert (
            axis.result == (axis.size + axis.before + axis.after - axis.kernel) // axis.stride + 1
        )
        for first, stop in runs(axis.result):
            read = axis.read_by(range(first, stop))
            counted = {x for x, _, y in all_of_them if first <= y < stop}
            assert counted <= set(read)
            assert read.start == first * axis.stride - axis.before
            assert len(read) == (stop - 1 - first) * axis.stride + axis.kernel
        for first, stop in runs(axis.size):
            counted = {y for x, _, y in all_of_them if first <= x < stop}
            readers = axis.readers_of(range(first, stop))
            assert counted <= set(readers)
            # With strides above the kernel some planes have no readers.
            assert axis.stride > axis.kernel or set(readers) == counted
        inside = axis.inside()
        for y in range(axis.result):
            read = axis.read_by(range(y, y + 1))
            assert (y in inside) == (read.start >= 0 and read.stop <= axis.size)


@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_slabs_compute_what_the_volume_does(kernel, stride):
    for axis in axes(kernel, stride):
        all_of_them = products(axis)
        for first, stop in runs(axis.result):
            expected = {entry for entry in all_of_them if first <= entry[2] < stop}
            for slab in (axis.for_result(first, stop), axis.exact(first, stop)):
                assert slab.wanted == range(first, stop)
                assert set(slab.wanted) <= set(slab.y)
                computed = products_of(slab, axis)
                assert {entry for entry in computed if first <= entry[2] < stop} == expected
            assert axis.exact(first, stop).padding == 0
        for first, stop in runs(axis.size):
            slab = axis.for_gradient(first, stop)
            assert slab.wanted == range(first, stop)
            assert set(slab.wanted) <= set(slab.x)
            expected = {entry for entry in all_of_them if first <= entry[0] < stop}
            computed = products_of(slab, axis)
            assert {entry for entry in computed if first <= entry[0] < stop} == expected


@pytest.mark.parametrize(("kernel", "stride"), KERNELS)
def test_a_padding_is_symmetric_where_it_gives_the_same(kernel, stride):
    for axis in axes(kernel, stride):
        same = Axis(axis.size, axis.kernel, axis.stride, axis.before, axis.before)
        if axis.symmetric is None:
            assert products(same) != products(axis) or same.result != axis.result
        else:
            assert axis.symmetric == axis.before
            assert products(same) == products(axis)


@pytest.mark.parametrize(
    ("most", "expected"), [(12, [12]), (7, [6, 6]), (5, [4, 4, 4]), (0, [1] * 12)]
)
def test_slabs_are_the_fewest_that_fit(most, expected):
    axis = Axis(12, 1, 1, 0, 0)
    slabs = divide(axis.for_result, range(12), lambda slab: len(slab.x) <= most)
    assert [len(slab.wanted) for slab in slabs] == expected
    assert [plane for slab in slabs for plane in slab.wanted] == list(range(12))
    assert divide(axis.exact, range(3, 3), lambda slab: True) == []


@pytest.mark.parametrize("planes", [1, 2, 3, 8, 9])
def test_halves_are_of_equal_length(planes):
    first, second = halves(planes)
    assert len(first) == len(second)
    assert set(first) | set(second) == set(range(planes))
    assert len(set(first) & set(second)) == planes % 2
