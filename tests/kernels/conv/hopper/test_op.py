"""Fake results of the hand-written convolutions, for a GPU that does not exist."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unet3d.kernels.conv.hopper import op
from unet3d.kernels.maps import empty_map

NO_AFFINE = (None,) * 4
NO_HALO = (None,) * 2


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("sides", [(1, 1), (0, 1), (0, 0)], ids=str)
def test_fake_gpus_return_maps_and_parts(sides, pads):
    before, after = sides
    options = {"slope": 0.01, "before": before, "after": after}
    with FakeTensorMode():
        like = torch.empty(2, 32, 8, 6, 5, device="cpu:1", dtype=torch.bfloat16)
        x = empty_map(like, pads)
        kernel = torch.empty(64, 32, 3, 3, 3, device=x.device, dtype=x.dtype)
        mean = torch.empty(2, 32, 2, device=x.device)
        affine = (mean[0, :, 0], mean[0, :, 1], mean, mean[..., 0])
        y, moments = op.convolve(x, kernel, *affine, *NO_HALO, **options, moments=True)
        dx, sums = op.input_gradient(y, kernel, x, *affine, **options)
        dweight = op.weight_gradient(y, x, *affine, *NO_HALO, slope=0.01, before=before)
        _, no_moments = op.convolve(x, kernel, *NO_AFFINE, *NO_HALO, **options, moments=False)
        _, no_sums = op.input_gradient(y, kernel, None, *NO_AFFINE, **options)
    assert (y.shape, dx.shape) == ((2, 64, 6 + sum(sides), 6, 5), x.shape)
    assert {y.dtype, dx.dtype} == {torch.bfloat16}
    assert all(one.is_contiguous(memory_format=torch.channels_last_3d) for one in (y, dx))
    # One part for each of a program's eight warps; each program makes one plane here.
    planes = 6 + sum(sides)
    assert (moments.shape, sums.shape) == ((2 * planes * 8, 4, 2, 64), (2 * 8 * 8, 2, 2, 32))
    assert (len(no_moments), len(no_sums)) == (0, 0)
    assert dweight.shape == kernel.shape
    assert {moments.dtype, sums.dtype, dweight.dtype} == {torch.float32}
    assert {one.device for one in (y, moments, dx, sums, dweight)} == {x.device}


def test_large_maps_have_a_program_on_each_processor():
    with FakeTensorMode():
        x = torch.empty(1, 32, 64, 64, 64, device="cpu:1", dtype=torch.bfloat16)
        for outputs, programs in ((32, 132), (64, 66)):
            kernel = torch.empty(outputs, 32, 3, 3, 3, device=x.device, dtype=x.dtype)
            options = {"slope": 1.0, "before": 1, "after": 1, "moments": True}
            _, moments = op.convolve(x, kernel, *NO_AFFINE, *NO_HALO, **options)
            assert moments.shape == (programs * op.WARPS, 4, 1, outputs)
