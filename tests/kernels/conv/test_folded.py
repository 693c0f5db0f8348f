"""Two neighbours along Z computed as one voxel: the same result as voxel by voxel."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.comparison import assert_same, between, padded, results, tensor
from tests.products import each_value
from unet3d.kernels import strided_conv3x3x3
from unet3d.kernels.conv import api, slabs
from unet3d.kernels.conv.folded import FoldedConvolution
from unet3d.kernels.maps import with_padding


def plain(x, weight, stride=(1, 1, 1), x_padding=1):
    return F.conv3d(x, weight, None, stride, (x_padding, 1, 1))


def test_a_padded_map_shows_its_own_voxels_only():
    x = tensor(2, 8, 5, 4, 6)
    made = padded(x)
    assert torch.equal(made, x)
    assert torch.equal(with_padding(made), F.pad(x, (1, 1)))


@each_value(
    sizes=[(1, 8, 8), (2, 32, 16), (2, 8, 24)],
    x_padding=[0, 1],
    pads_x=[False, True],
    pads_dy=[False, True],
    limit=[1000, slabs.MAX_ELEMENTS],
)
def test_two_voxels_at_a_time_give_the_same(sizes, x_padding, pads_x, pads_dy, limit, monkeypatch):
    """With zeros around Z or without, with neighbours' planes, whole or in slabs."""
    num_samples, inputs, outputs = sizes
    x, weight = tensor(num_samples, inputs, 7, 3, 4), tensor(outputs, inputs, 3, 3, 3, seed=1)
    expected = results(lambda x, w: plain(x, w, x_padding=x_padding), [x, weight])
    dy = tensor(*expected[0].shape, seed=9)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)
    given = [padded(x) if pads_x else x, weight]
    dy = padded(dy) if pads_dy else dy
    assert_same(results(lambda x, w: FoldedConvolution.apply(x, w, x_padding), given, dy), expected)


@each_value(
    stride=[(2, 2, 1), (2, 2, 2), (1, 2, 2)],
    inputs=[8, 40],
    is_sharded=[False, True],
    is_kept_padded=[False, True],
    limit=[200, slabs.MAX_ELEMENTS],
)
def test_strides_over_a_padded_map(stride, inputs, is_sharded, is_kept_padded, limit, monkeypatch):
    """Backward may get the stored map with zeros around Z, or a recomputed map without."""
    values = [tensor(2, inputs, 6, 3, 4), tensor(12, inputs, 3, 3, 3, seed=1)]
    expected = results(lambda x, w: plain(x, w, stride, 0 if is_sharded else 1), values)
    monkeypatch.setattr(slabs, "MAX_ELEMENTS", limit)

    def strided(x, weight):
        with between() if is_sharded else nullcontext():
            return strided_conv3x3x3(x, weight, stride)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved, lambda saved: saved if is_kept_padded else saved.clone()
    ):
        given = [padded(values[0]), values[1]]
        actual = results(strided, given)
    assert_same(actual, expected)
    # A map without zeros around Z takes other code, in pairs or not.
    for folds in (False, True):
        monkeypatch.setattr(api, "can_fold", lambda x, channels, folds=folds: folds)
        actual = results(strided, values)
        assert_same(actual, expected)


@pytest.mark.parametrize("needed", [0, 1])
def test_only_gradients_that_are_wanted_are_computed(needed):
    values = [tensor(1, 8, 5, 4, 6), tensor(8, 8, 3, 3, 3, seed=1)]
    leaf = values[needed].requires_grad_()
    y, expected = FoldedConvolution.apply(*values), plain(*values)
    gradients = [torch.autograd.grad(value.sum(), leaf)[0] for value in (y, expected)]
    assert_same(gradients[:1], gradients[1:])
