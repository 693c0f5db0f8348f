"""The stages of a normalisation: parts of a volume give the same as the whole volume."""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, channels_last
from tests.kernels.norm.closed_form import EPS, arguments, called, in_float64
from unet3d.kernels.norm import op, reference
from unet3d.kernels.norm.op import WANTED_PROGRAMS, grid_of

SHAPE, ON_GPU = (2, 3, 7, 4, 5), (1, 32, 7, 56, 64)
SLOPE = 0.01
on_a_gpu = pytest.mark.gpu


def in_parts(stages, inputs, sizes, exchanges_runs, slope=SLOPE):
    """Return value and gradients, computed as if each slab along X were on another device."""
    x, weight, bias, dy = inputs
    voxels = x[0, 0].numel()
    slabs = [channels_last(slab) for slab in x.split(sizes, 2)]
    gradients = [channels_last(slab) for slab in dy.split(sizes, 2)]
    moments = [stages.moments(slab) for slab in slabs]
    if not exchanges_runs:  # slabs exchange merged moments
        moments = [
            stages.merge(part, slab[0, 0].numel(), EPS)[2]
            for part, slab in zip(moments, slabs, strict=True)
        ]
    mean, rstd, _ = stages.merge(torch.cat(moments), voxels, EPS)
    affine = (weight, bias, mean, rstd)
    y = [torch.empty_like(slab) for slab in slabs]
    for made, slab in zip(y, slabs, strict=True):
        stages.normalize(made, slab, *affine, slope=slope, pads=False)
    pairs = list(zip(gradients, slabs, strict=True))
    total = stages.total(torch.cat([stages.sums(*pair, *affine, slope=slope) for pair in pairs]))
    options = {"total": total, "voxels": voxels, "slope": slope, "pads": False}
    dx = [stages.gradient(*pair, *affine, **options) for pair in pairs]
    return [torch.cat(y, 2), torch.cat(dx, 2), total[1].sum(0), total[0].sum(0)]


@pytest.mark.parametrize(
    ("stages", "given", "slope", "tolerance"),
    [
        (reference, (SHAPE,), SLOPE, 1e-12),
        (reference, (SHAPE,), 1.0, 1e-12),
        *(
            pytest.param(op, (ON_GPU, mean, torch.float32, "cuda"), SLOPE, 2e-6, marks=on_a_gpu)
            for mean in (0.0, 1e4)
        ),
    ],
)
@pytest.mark.parametrize("exchanges_runs", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 4, 2)], ids=str)
def test_parts_give_what_the_whole_gives(stages, given, slope, tolerance, sizes, exchanges_runs):
    inputs = arguments(*given)
    # The slabs differ, so that no slab's mean is the volume's mean.
    inputs[0][:, :, :2] += 5
    actual = in_parts(stages, inputs, sizes, exchanges_runs, slope)
    assert_near(actual, in_float64(inputs, slope), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_statistics_have_32_bits_at_least(dtype):
    exact = torch.promote_types(dtype, torch.float32)
    x = arguments(SHAPE, 0.0, dtype)[0]
    moments = reference.moments(x)
    assert moments.dtype == exact
    assert {value.dtype for value in reference.merge(moments, 140, EPS)} == {exact}
    for device in ("cpu", "meta"):  # fake statistics take no memory
        with FakeTensorMode():
            fake = reference.moments(torch.empty(SHAPE, dtype=dtype, device=device))
            huge = reference.moments(torch.empty(1, 32, 2048, 2048, 2048, device=device))
        made = (fake.shape, fake.dtype, fake.stride())
        assert made == (moments.shape, exact, moments.stride())
        assert huge.shape == (1, 3, 1, 32)


def test_a_grid_covers_every_voxel_and_channel():
    of_channels = (1, 5, 32, 33, 64, 70, 320)
    of_voxels = (1, 63, 64, 65, 4097, 96**3, 640**3)
    for samples, channels, voxels in product((1, 2, 7), of_channels, of_voxels):
        grid = grid_of(samples, channels, voxels)
        blocks, channel_blocks, _ = grid.over_blocks
        assert grid.block_channels & (grid.block_channels - 1) == 0
        assert channel_blocks * grid.block_channels >= channels
        assert (channel_blocks - 1) * grid.block_channels < channels
        assert blocks * grid.block_voxels >= voxels > (blocks - 1) * grid.block_voxels
        assert grid.runs * grid.run >= voxels > (grid.runs - 1) * grid.run
        assert grid.run % grid.block_voxels == 0
        assert grid.runs * samples * channel_blocks <= WANTED_PROGRAMS + samples * channel_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 32, 40, 48, 56), (3, 70, 3, 5, 7)], ids=str)
def test_the_operations_are_registered_as_pytorch_wants_it(shape):
    x, weight, bias, dy = arguments(shape, 0.0, torch.float32, "cuda", torch.channels_last_3d)
    voxels = x[0, 0].numel()
    moments = called(op.moments, x)
    mean, rstd, _ = called(op.merge, moments, voxels, EPS)
    affine = (weight, bias, mean, rstd)
    called(op.normalize, torch.zeros_like(x), x, *affine, slope=SLOPE, pads=False)
    total = called(op.total, called(op.sums, dy, x, *affine, slope=SLOPE))
    called(op.gradient, dy, x, *affine, total=total, voxels=voxels, slope=SLOPE, pads=False)
