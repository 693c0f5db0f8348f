"""The stages of a normalisation: parts of a volume give what the whole gives."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.comparison import assert_near, assert_same, channels_last
from tests.kernels.norm.closed_form import EPS, arguments, in_float64
from unet3d.kernels.norm import op, reference
from unet3d.kernels.norm.grid import WANTED_PROGRAMS, grid_of
from unet3d.kernels.norm.stages import Stages
from unet3d.kernels.padding import with_padding

SHAPE = (2, 3, 7, 4, 5)
SLOPE = 0.01


def in_parts(
    stages: Stages,
    inputs: list[Tensor],
    sizes: tuple[int, ...],
    exchanges_runs: bool,
    slope: float = SLOPE,
) -> list[Tensor]:
    """Return value and gradients, computed as if each slab along X were on another device."""
    x, weight, bias, dy = inputs
    voxels = x[0, 0].numel()
    slabs = [channels_last(slab) for slab in x.split(sizes, 2)]
    gradients = [channels_last(slab) for slab in dy.split(sizes, 2)]
    moments = [stages.moments(slab) for slab in slabs]
    if not exchanges_runs:  # but what they come to
        moments = [
            stages.merge(part, slab[0, 0].numel(), EPS)[2]
            for part, slab in zip(moments, slabs, strict=True)
        ]
    mean, rstd, _ = stages.merge(torch.cat(moments), voxels, EPS)
    affine = (weight, bias, mean, rstd)
    y = [stages.normalize(slab, *affine, slope=slope, pads=False) for slab in slabs]
    pairs = list(zip(gradients, slabs, strict=True))
    total = stages.total(torch.cat([stages.sums(*pair, *affine, slope=slope) for pair in pairs]))
    options = {"total": total, "voxels": voxels, "slope": slope, "pads": False}
    dx = [stages.gradient(*pair, *affine, **options) for pair in pairs]
    return [torch.cat(y, 2), torch.cat(dx, 2), total[1].sum(0), total[0].sum(0)]


@pytest.mark.parametrize("slope", [SLOPE, 1.0])
@pytest.mark.parametrize("exchanges_runs", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 4, 2)], ids=str)
def test_parts_of_a_volume_give_what_the_whole_gives(sizes, exchanges_runs, slope):
    inputs = arguments(SHAPE)
    # Slabs that differ, so that none of their means is the volume's.
    inputs[0][:, :, :2] += 5
    actual = in_parts(reference, inputs, sizes, exchanges_runs, slope)
    assert_same(actual, in_float64(inputs, slope), 1e-10)


def test_the_reference_stores_zeros_around_too():
    x, *affine, dy = arguments((2, 8, 3, 4, 6))
    affine += reference.merge(reference.moments(x), 72, EPS)[:2]
    total = reference.total(reference.sums(dy, x, *affine, slope=SLOPE))
    options = {"total": total, "voxels": 72, "slope": SLOPE}
    for stage, given in (
        (reference.normalize, {"slope": SLOPE}),
        (lambda *values, **named: reference.gradient(dy, *values, **named), options),
    ):
        plain, padded = (stage(x, *affine, **given, pads=pads) for pads in (False, True))
        assert torch.equal(padded, plain)
        assert torch.equal(with_padding(padded), F.pad(plain, (1, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_statistics_have_32_bits_at_least(dtype):
    exact = torch.promote_types(dtype, torch.float32)
    x = arguments(SHAPE, 0.0, dtype)[0]
    moments = reference.moments(x)
    assert moments.dtype == exact
    assert {value.dtype for value in reference.merge(moments, 140, EPS)} == {exact}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_references_fake_statistics_take_no_memory(device):
    real = reference.moments(torch.randn(SHAPE))
    with FakeTensorMode():
        fake = reference.moments(torch.empty(SHAPE, device=device))
        huge = reference.moments(torch.empty(1, 32, 2048, 2048, 2048, device=device))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
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


FAKE_GPU = torch.device("cpu", 0)


def all_stages(stages: Stages, x: Tensor, dy: Tensor, affine: list[Tensor]) -> list[Tensor]:
    moments = stages.moments(x)
    mean, rstd, merged = stages.merge(moments, 10, EPS)
    affine = [*affine, mean, rstd]
    results = [moments, mean, rstd, merged]
    sums = stages.sums(dy, x, *affine, slope=SLOPE)
    total = stages.total(sums)
    results += [sums, total]
    for pads in (False, True):
        results.append(stages.normalize(x, *affine, slope=SLOPE, pads=pads))
        options = {"total": total, "voxels": 10, "slope": SLOPE, "pads": pads}
        results.append(stages.gradient(dy, x, *affine, **options))
    return results


def fakes(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, list[Tensor]]:
    x = channels_last(torch.empty(shape, dtype=dtype, device=device))
    return x, torch.empty_like(x), [torch.empty(shape[1], device=device) for _ in range(2)]


def test_fake_stages_pass_on_what_the_next_one_takes():
    with FakeTensorMode():
        moments, mean, rstd, merged, sums, total, *maps = all_stages(
            op, *fakes((2, 32, 16, 16, 16), torch.bfloat16, FAKE_GPU)
        )
    runs = grid_of(2, 32, 16**3).runs
    assert moments.shape == (runs, 4, 2, 32) and merged.shape == (1, 4, 2, 32)
    assert (mean.shape, rstd.shape) == ((2, 32, 2), (2, 32))
    assert (sums.shape, total.shape) == ((runs, 2, 2, 32), (2, 2, 32))
    assert {value.dtype for value in (moments, mean, rstd, merged, sums, total)} == {torch.float32}
    assert {(y.shape, y.dtype, y.device) for y in maps} == {
        ((2, 32, 16, 16, 16), torch.bfloat16, FAKE_GPU)
    }
    assert [y.untyped_storage().nbytes() // 2**10 for y in maps] == [512, 512, 576, 576]


@pytest.mark.gpu
@pytest.mark.parametrize("exchanges_runs", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("sizes", [(40,), (20, 20), (3, 30, 7)], ids=str)
def test_parts_on_a_gpu_against_float64(sizes, mean, exchanges_runs):
    inputs = arguments((1, 32, 40, 24, 28), mean, torch.float32, "cuda")
    inputs[0][:, :, :2] += 5
    actual = in_parts(op, inputs, sizes, exchanges_runs)
    assert_near(actual, in_float64(inputs, SLOPE), 2e-6)


def called(function: Callable[..., Tensor], *args: object, **named: object) -> None:
    # Not with symbolic sizes: how a map is divided among programs is looked up by its size.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(function, args, named, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5, 6), (1, 32, 40, 48, 56), (3, 70, 3, 5, 7), (1, 320, 6, 6, 6)], ids=str
)
def test_the_operations_are_registered_as_pytorch_wants_it(shape):
    given = arguments(shape, 0.0, torch.float32, "cuda", torch.channels_last_3d)
    x, weight, bias, dy = given
    voxels = x[0, 0].numel()
    moments = op.moments(x)
    mean, rstd, _ = op.merge(moments, voxels, EPS)
    affine = (weight, bias, mean, rstd)
    sums = op.sums(dy, x, *affine, slope=SLOPE)
    called(op.moments, x)
    called(op.merge, moments, voxels, EPS)
    called(op.normalize, x, *affine, slope=SLOPE, pads=False)
    called(op.sums, dy, x, *affine, slope=SLOPE)
    called(op.total, sums)
    total = op.total(sums)
    called(op.gradient, dy, x, *affine, total=total, voxels=voxels, slope=SLOPE, pads=False)
