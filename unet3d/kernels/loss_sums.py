"""The sums over voxels from which Dice and cross-entropy are computed.

Classes use the cross-entropy of their softmax; regions, which may overlap, each use binary
cross-entropy.

Autograd would keep several float32 tensors of the logits' size for backward; here only the logits
and the target are kept. The Triton version reads them once per direction and stores no
probabilities; PyTorch's own operations take a few passes over the probabilities each way, as rows
of voxels. ``torch.where`` is not used, because on a CPU it is not vectorised.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from unet3d.kernels.operations import operation
from unet3d.kernels.triton_support import FAST_TYPES, triton_available

MAX_CLASSES = 256
"""Most classes that fit into one program's registers."""


def dice_ce_sums(logits: Tensor, target: Tensor) -> Tensor:
    """Return the sums over voxels from which Dice and cross-entropy follow.

    Logits are (N, K, X, Y, Z), the target (N, X, Y, Z) class indices of any integer type. Voxels
    whose index is K or more are left out, and the gradient of their logits is 0. The sums are (4,
    N, K) in float32 at least. With p the softmax of the logits: -log p over the voxels of each
    class, p over these voxels, p over all voxels, and the number of voxels of each class.
    """
    fits = logits.dtype in FAST_TYPES and logits.shape[1] <= MAX_CLASSES
    if fits and triton_available(logits):
        return _summed(logits, target, sums, gradient_of)
    return _summed(logits, target, _plain_sums, _plain_gradient)


def region_sums(logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Return the sums over voxels from which Dice and binary cross-entropy of regions follow.

    Logits are (N, R, X, Y, Z), one for each region; the probability p is their sigmoid. The target
    is (N, X, Y, Z), class indices of any integer type; a region is a set of classes. Voxels whose
    index is above all classes of regions are left out, and the gradient of their logits is 0. The
    sums are (5, N, R) in float32 at least, over the other voxels: the binary cross-entropy, p over
    the region, p over all voxels, the number of the region's voxels, and the number of all voxels.
    """
    return _summed(
        logits,
        target,
        partial(_sums_of_regions, regions=regions),
        partial(_gradient_of_regions, regions=regions),
    )


def _summed(
    logits: Tensor, target: Tensor, sums: Callable[..., Any], gradient_of: Callable[..., Any]
) -> Tensor:
    """Return ``sums(logits, target)``, with ``gradient_of`` as the gradient of the logits."""
    made: Tensor = _Sums.apply(logits, target, sums, gradient_of)  # type: ignore[no-untyped-call]
    return made


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        sums: Callable[..., Any],
        gradient_of: Callable[..., Any],
    ) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.gradient_of = gradient_of
        made: Tensor = sums(logits, target)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient_of(gradient, *ctx.saved_tensors), None, None, None


def _plain_sums(logits: Tensor, target: Tensor) -> Tensor:
    logs = torch.log_softmax(_rows_of(logits), 1)
    is_truth = _is_truth(target, logs)
    surprise = -(is_truth * logs).sum(2)
    chance = logs.exp_().mul_(_is_counted(target, logs))
    common = (is_truth * chance).sum(2)
    return torch.stack((surprise, common, chance.sum(2), is_truth.sum(2)))


def _plain_gradient(gradient: Tensor, logits: Tensor, target: Tensor) -> Tensor:
    chance = torch.softmax(_rows_of(logits), 1)
    chance.mul_(_is_counted(target, chance))  # the rest below then ignores other voxels
    surprise, common, predicted, _ = gradient.unsqueeze(-1).unbind(0)
    # With c the chances and t = 1 at the true class, the derivative by logit j is
    # u_j - c_j * (sum of u), where u = predicted * c + t * (common * c - surprise).
    u = torch.addcmul(-surprise, chance, common).mul_(_is_truth(target, chance))
    u.addcmul_(chance, predicted)
    u.addcmul_(chance, u.sum(1, keepdim=True), value=-1)
    # One copy brings them to the type and layout of the logits.
    return torch.empty_like(logits).copy_(u.view(logits.shape))


def _rows_of(logits: Tensor) -> Tensor:
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


def _sums_of_regions(logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    values = _rows_of(logits)
    is_counted, is_truth = _masks(target, regions, values.dtype)
    surprise = functional.softplus(values).addcmul_(values, is_truth, value=-1)
    surprise = surprise.mul_(is_counted).sum(2)
    chance = torch.sigmoid(values).mul_(is_counted)
    common = (chance * is_truth).sum(2)
    num_voxels = is_counted.sum(2).expand_as(common)
    return torch.stack((surprise, common, chance.sum(2), is_truth.sum(2), num_voxels))


def _gradient_of_regions(
    gradient: Tensor, logits: Tensor, target: Tensor, regions: Sequence[Sequence[int]]
) -> Tensor:
    chance = torch.sigmoid(_rows_of(logits))
    is_counted, is_truth = _masks(target, regions, chance.dtype)
    surprise, common, predicted, *_ = gradient.unsqueeze(-1).unbind(0)
    # With t = 1 in the region, the derivatives by a logit are c * (1 - c) for its chance c, and
    # c - t for the binary cross-entropy.
    wanted = torch.addcmul(predicted, is_truth, common).mul_(chance).mul_(1 - chance)
    wanted.addcmul_(chance.sub_(is_truth), surprise).mul_(is_counted)
    # One copy brings them to the type and layout of the logits.
    return torch.empty_like(logits).copy_(wanted.view(logits.shape))


def _masks(
    target: Tensor, regions: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return 1 at each voxel that counts (N, 1, V), and 1 in each region (N, R, V); else 0."""
    classes = target.flatten(1)
    is_counted = (classes <= max(map(max, regions))).to(dtype).unsqueeze(1)
    is_truth = is_counted.new_zeros((len(classes), len(regions), classes.shape[1]))
    for index, region in enumerate(regions):
        for label in region:
            is_truth[:, index] += classes == label
    return is_counted, is_truth


sums = operation(
    "dice_ce_sums",
    "(Tensor logits, Tensor target) -> Tensor",
    "loss_kernel.forward",
    lambda logits, target: logits.new_empty((4, *logits.shape[:2]), dtype=torch.float32),
)
gradient_of = operation(
    "dice_ce_gradient",
    "(Tensor gradient, Tensor logits, Tensor target) -> Tensor",
    "loss_kernel.backward",
    lambda gradient, logits, target: torch.empty_like(logits, memory_format=torch.channels_last_3d),
)
