"""The sums and their gradient in PyTorch's own operations, for any device and type.

A few passes over the probabilities each way, as rows of voxels. They are computed again in
backward, so only the logits and the target are kept. ``torch.where`` is not used, because on a CPU
it is not vectorised.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sums(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums (4, N, K); see :func:`unet3d.kernels.dice_ce_sums`."""
    made: Tensor = _Sums.apply(logits, target)  # type: ignore[no-untyped-call]
    return made


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        logs = torch.log_softmax(_rows(logits), 1)
        is_truth = _is_truth(target, logs)
        surprise = -(is_truth * logs).sum(2)
        chance = logs.exp_().mul_(_is_counted(target, logs))
        common = (is_truth * chance).sum(2)
        return torch.stack((surprise, common, chance.sum(2), is_truth.sum(2)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, target = ctx.saved_tensors
        chance = torch.softmax(_rows(logits), 1)
        chance.mul_(_is_counted(target, chance))  # so that nothing below is left of the others
        surprise, common, predicted, _ = gradient.unsqueeze(-1).unbind(0)
        # With c the chances and t = 1 at the true class, the derivative by logit j is
        # u_j - c_j * (sum of u), where u = predicted * c + t * (common * c - surprise).
        u = torch.addcmul(-surprise, chance, common).mul_(_is_truth(target, chance))
        u.addcmul_(chance, predicted)
        u.addcmul_(chance, u.sum(1, keepdim=True), value=-1)
        # One copy brings them to the type and layout of the logits.
        return torch.empty_like(logits).copy_(u.view(logits.shape)), None


def _rows(logits: Tensor) -> Tensor:
    """Return (N, K, V) in float32 at least."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(exact, memory_format=torch.contiguous_format).flatten(2)


def _is_counted(target: Tensor, like: Tensor) -> Tensor:
    """Return 1 at each voxel that has a class, else 0: (N, 1, V)."""
    return (target.flatten(1).unsqueeze(1) < like.shape[1]).to(like.dtype)


def _is_truth(target: Tensor, like: Tensor) -> Tensor:
    """Return 1 at the true class of each voxel, else 0: (N, K, V)."""
    labels = torch.arange(like.shape[1], dtype=target.dtype, device=target.device).view(1, -1, 1)
    return (target.flatten(1).unsqueeze(1) == labels).to(like.dtype)
