"""The gradient of the first convolution's weights through the normalisation behind it, in Triton.

An image needs no gradient, so the only reader of the gradient between normalisation and convolution
is that of the weights. Each program makes it for a block of voxels and multiplies it at once by the
neighbours that it gathers (:mod:`unet3d.kernels.conv.stem_kernel`), instead of a kernel writing a
map that the next one reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unet3d.kernels.conv.stem_kernel import offsets, parts_of_weights, sum_of_parts
from unet3d.kernels.norm.blocks import gradient_of, load_gradient


@triton.jit
def _weights(
    x, y, dy, partial, weight, bias, means, rstds, totals, COUNT, BEFORE, X, Y, Z, V, CO, RUN, S,
    slope,
    CI: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    sample = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, K)
    o = tl.arange(0, BO)
    row = tl.arange(0, BV)
    known = o < CO
    samples = tl.num_programs(1)
    mean, scale, shift, slant, level = load_gradient(
        weight, bias, means, rstds, totals, sample, samples, o, known, CO, COUNT
    )
    x += sample * X * Y * Z * CI
    total = tl.zeros((K, BO), tl.float32)
    first = run * RUN
    last = tl.minimum(first + RUN, V)
    for start in range(first, last, BV):
        voxel = start + row
        at, inside = offsets(voxel[None, :], k[:, None], BEFORE, X, Y, Z, CI)
        values = tl.load(x + at, mask=inside & (voxel < last)[None, :], other=0.0)
        at = (sample * V + start) * CO + row[:, None] * CO + o[None, :]
        given = (voxel < last)[:, None] & known[None, :]
        value = tl.load(y + at, mask=given, other=0.0).to(tl.float32) - mean[None, :]
        g = tl.load(dy + at, mask=given, other=0.0).to(tl.float32)
        g = gradient_of(g, value, scale, shift, slant, level, slope)
        g = tl.where(given, g, 0.0)
        total += tl.dot(values, g.to(values.dtype))
    out = (sample * S + run) * K * BO + k[:, None] * BO + o[None, :]
    tl.store(partial + out, total)


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    y: Tensor,
    *affine: Tensor,
    total: Tensor,
    voxels: int,
    kernel: Tensor,
    before: int,
    slope: float,
) -> Tensor:
    """Return the gradient of the convolution's weights; all maps are channels-last."""
    runs, partial, sizes = parts_of_weights(dy, x)
    given = (*affine, total, voxels, before, *x.shape[2:], *runs, slope)
    with torch.cuda.device(x.device):
        _weights[(runs[-1], len(x))](x, y, dy, partial, *given, **sizes)
    return sum_of_parts(partial, kernel)
