"""Slabs arrive where they belong, in their order, and errors where somebody can hear of them."""

import itertools

import numpy as np
import pytest
import torch

from unet3d.inference.label_volume import SlabSink

SHAPE = (7, 6, 5)


def slabs_of(whole, axis, sizes):
    return list(torch.split(whole, list(sizes), whole.ndim - 3 + axis))


@pytest.mark.parametrize("num_classes", [0, 3])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("axis", "sizes"),
    [(0, (7,)), (0, (1,) * 7), (0, (2, 4, 1)), (1, (1, 3, 2)), (2, (4, 1)), (2, (1,) * 5)],
)
def test_planes_follow_each_other(axis, sizes, order, num_classes):
    shape = (num_classes, *SHAPE) if num_classes else SHAPE
    whole = torch.randperm(int(np.prod(shape))).reshape(shape)
    target = np.full(shape, -1, order=order)
    sink = SlabSink(target[..., ::-1])
    for slab in slabs_of(whole, axis, sizes):
        sink.take(slab, axis)
    sink.finish()
    np.testing.assert_array_equal(target[..., ::-1], whole.numpy())


def test_it_converts_on_the_host_and_begins_anew():
    target = np.zeros(SHAPE, np.uint16)
    sink = SlabSink(target, np.array([0, 7, 300], np.uint16).__getitem__)
    sink.take(torch.full((4, 6, 5), 1), 0)
    sink.begin()
    whole = torch.arange(7 * 6 * 5).reshape(SHAPE) % 3
    for slab in slabs_of(whole, 2, (3, 2)):
        sink.take(slab, 2)
    sink.finish()
    np.testing.assert_array_equal(target, np.array([0, 7, 300])[whole.numpy()])


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_error_arrives(number):
    """With a later slab, or at the end."""
    calls = itertools.count()

    def full(array):
        if next(calls) == number:
            raise OSError("the disk is gone")
        return array

    sink = SlabSink(np.zeros(SHAPE), full)

    def add_all():
        for _ in range(7):
            sink.take(torch.zeros(1, 6, 5), 0)
        sink.finish()

    with pytest.raises(OSError, match="the disk is gone"):
        add_all()
