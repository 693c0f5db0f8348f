"""A whole volume at once, in PyTorch's batch normalisation: small maps on a GPU, and others.

Nothing is exchanged between the stages here, so that one operation does several of them. A sample's
channel is treated as a channel of a batch: a map (N, C, X, Y, Z) is rows (1, N * C, X, Y, Z).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ALL = (True, True, True)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the three stages of forward.

    Returns:
        The result, the mean (N, C, 1) and 1 / deviation (N, C).
    """
    n, c = x.shape[:2]
    given = (weight.repeat(n), bias.repeat(n), None, None, True, 0.0, eps)
    y, mean, rstd = torch.native_batch_norm(_rows(x), *given)
    y = y.reshape(x.shape)
    return y if slope == 1 else F.leaky_relu_(y, slope), mean.view(n, c, 1), rstd.view(n, c)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the three stages of backward.

    Returns:
        The gradients of x, weight and bias.
    """
    n, c = x.shape[:2]
    rows, g = _rows(x), _rows(dy)
    if slope != 1:
        scale = (rstd * weight).flatten()
        shift = torch.addcmul(bias.repeat(n), mean.flatten(), scale, value=-1)
        nothing, one = torch.zeros_like(scale), torch.ones_like(scale)
        before = torch.native_batch_norm(rows, scale, shift, nothing, one, False, 0.0, 0.0)[0]
        # Into the memory of what is not needed any more.
        g = torch.ops.aten.leaky_relu_backward.grad_input(
            g, before, slope, False, grad_input=before
        )
    elif g.stride() != rows.stride():  # of two layouts PyTorch adds up the wrong voxels on a CPU
        g = torch.empty_like(rows).copy_(g)
    dx, sum_gx, sum_g = torch.ops.aten.native_batch_norm_backward(
        g, rows, weight.repeat(n), None, None, mean.flatten(), rstd.flatten(), True, 0.0, _ALL
    )
    return dx.reshape(x.shape), sum_gx.view(n, c).sum(0), sum_g.view(n, c).sum(0)


def _rows(x: Tensor) -> Tensor:
    n, c, *space = x.shape
    return x.reshape(1, n * c, *space)
