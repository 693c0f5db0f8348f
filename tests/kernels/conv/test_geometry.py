"""Which planes a convolution reads and makes: compared with counting them one by one."""

from itertools import product

import pytest

from unet3d.kernels.conv.geometry import Axis, divide


def axes(kernel, stride):
    """Return axes of many sizes and paddings."""
    return [
        Axis(size, kernel, stride, before, after)
        for size in (1, 2, 3, 5, 8, 9)
        for before, after in product(range(kernel), repeat=2)
        if size + before + after >= kernel
    ]


def products(axis):
    """Return (plane of the input, of the kernel, of the result) of every product of a volume."""
    return {
        (result * axis.stride + tap - axis.before, tap, result)
        for result in range((axis.size + axis.before + axis.after - axis.kernel) // axis.stride + 1)
        for tap in range(axis.kernel)
        if 0 <= result * axis.stride + tap - axis.before < axis.size
    }


def products_of(slab, axis):
    """Return those that a call on a slab computes, in planes of the volume."""
    call = Axis(len(slab.x), axis.kernel, axis.stride, slab.padding, slab.padding)
    assert call.result == len(slab.y)
    return {
        (x + slab.x.start, tap, y + slab.y.start)
        for x, tap, y in products(call)
        if 0 <= x + slab.x.start < axis.size
    }


def runs(planes):
    return [(first, stop) for first in range(planes) for stop in range(first + 1, planes + 1)]


def check_slab(slab, axis, side, wanted, expected):
    """See that a slab computes all products of what is wanted: planes of x (0) or of y (2)."""
    assert slab.wanted == wanted
    assert set(wanted) <= set(slab.y if side else slab.x)
    assert {entry for entry in products_of(slab, axis) if entry[side] in wanted} == expected


@pytest.mark.parametrize(("kernel", "stride"), list(product((1, 2, 3, 4), (1, 2, 3))))
def test_planes_and_slabs_are_those_that_are_counted(kernel, stride):
    for axis in axes(kernel, stride):
        all_of_them = products(axis)
        padded = axis.size + axis.before + axis.after
        assert axis.result == (padded - axis.kernel) // axis.stride + 1
        for first, stop in runs(axis.result):
            run = range(first, stop)
            read = axis.read_by(run)
            expected = {entry for entry in all_of_them if entry[2] in run}
            assert {x for x, _, _ in expected} <= set(read)
            assert read.start == first * axis.stride - axis.before
            assert len(read) == (stop - 1 - first) * axis.stride + axis.kernel
            assert axis.exact(first, stop).padding == 0
            for slab in (axis.for_result(first, stop), axis.exact(first, stop)):
                check_slab(slab, axis, 2, run, expected)
        for first, stop in runs(axis.size):
            run = range(first, stop)
            expected = {entry for entry in all_of_them if entry[0] in run}
            counted, readers = {y for _, _, y in expected}, set(axis.readers_of(run))
            assert counted <= readers
            # With strides above the kernel some planes have no readers.
            assert axis.stride > axis.kernel or readers == counted
            check_slab(axis.for_gradient(first, stop), axis, 0, run, expected)
        inside = axis.inside()
        for y in range(axis.result):
            read = axis.read_by(range(y, y + 1))
            assert (y in inside) == (read.start >= 0 and read.stop <= axis.size)
        # A padding is symmetric where it gives the same.
        same = Axis(axis.size, axis.kernel, axis.stride, axis.before, axis.before)
        is_same = products(same) == all_of_them and same.result == axis.result
        assert axis.symmetric == (axis.before if is_same else None)


@pytest.mark.parametrize(
    ("most", "expected"), [(12, [12]), (7, [6, 6]), (5, [4, 4, 4]), (0, [1] * 12)]
)
def test_slabs_are_the_fewest_that_fit(most, expected):
    axis = Axis(12, 1, 1, 0, 0)
    slabs = divide(axis.for_result, range(12), lambda slab: len(slab.x) <= most)
    assert [len(slab.wanted) for slab in slabs] == expected
    assert [plane for slab in slabs for plane in slab.wanted] == list(range(12))
    assert divide(axis.exact, range(3, 3), lambda slab: True) == []
