"""Instance normalisation with LeakyReLU behind it, as one operation.

PyTorch normalises each (sample, channel) in one thread block: a single sample of 32 channels keeps
32 of a GPU's processors busy. Here the voxels are divided over all of them.

The work is done in stages, which divide at the point where parts of a volume have something to
exchange (:mod:`unet3d.kernels.norm.stages`). :func:`stages_for` picks Triton's version for large
CUDA tensors of at most 32 bits, and the reference, PyTorch's own operations, for everything else.
Both give the same values and gradients. Where a volume that is whole takes the reference, several
stages are one operation (:mod:`unet3d.kernels.norm.rows`, :mod:`unet3d.kernels.norm.columns`).
Where a map is a slab of a volume (:mod:`unet3d.kernels.sharding`), the slabs exchange moments and
sums, so that each is normalised as a part of the whole.
"""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.halo import empty_with_halo, fill_halo, gradient_of_own, inner, put_halo
from unet3d.kernels.norm import columns, op, reference, rows
from unet3d.kernels.norm.stages import Stages
from unet3d.kernels.padding import can_fold, has_room, is_channels_last, mark_padded, was_folded
from unet3d.kernels.recompute import offer
from unet3d.kernels.sharding import Halo, Shard, current_shard, number_of_largest, voxels_of_volume
from unet3d.kernels.triton_support import triton_available
from unet3d.memory.fake_devices import is_gpu
from unet3d.torch_private import is_view

MIN_ELEMENTS = 2**14
"""Smaller maps take the reference. The statistics of 320 channels of 8^3, 2^17 elements, take
PyTorch 36 us on an H200, and Triton's two kernels 8."""

_FAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def instance_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    negative_slope: float,
    *,
    added: Tensor | None = None,
    pads_output: bool = False,
    has_halo: bool = False,
) -> Tensor:
    """Normalise each channel of each sample over its voxels, then apply LeakyReLU.

    ``y = leaky_relu((x - mean) / sqrt(var + eps) * weight + bias)`` (Ulyanov et al., arXiv
    1607.08022), with the biased variance, and statistics in float32 at least.

    Args:
        x: (N, C, X, Y, Z) of any floating type.
        weight: (C,).
        bias: (C,).
        eps: Added to the variance.
        negative_slope: Negative slope of LeakyReLU; 1 leaves the activation out.
        added: A map of the same shape and type that is added to x first, or None. Where there is
            one, x must be a convolution's result that nobody else reads: it may be overwritten.
        pads_output: Store the result with zeros around Z, for a folded convolution that reads it.
            The gradient of x is stored so where a folded convolution made x.
        has_halo: Return the halo too where x is a slab.

    Returns:
        (N, C, X, Y, Z), of x's type; with its halo (N, C, X + 2, Y, Z).
    """
    shard = current_shard()
    stages = stages_for(x)
    if stages is reference and added is not None:
        x, added = sum_of(x, added), None
    largest = number_of_largest(x.numel(), shard)
    folds = stages is not reference and can_fold(x, x.shape[1], largest)
    options = _Options(
        stages=stages,
        whole=_whole_for(x) if stages is reference and shard is None else None,
        eps=eps,
        slope=negative_slope,
        pads_output=pads_output and folds,
        pads_gradient=folds and was_folded(x),
        shard=shard,
        has_halo=has_halo and shard is not None,
    )
    if stages is not reference:
        x, added = laid_out(x), None if added is None else channels_last(added)
    y, mean, rstd, *planes = _InstanceNorm.apply(x, added, weight, bias, options)  # type: ignore[no-untyped-call]
    if options.pads_output:
        mark_padded(y)
    x, weight, bias = (value.detach() for value in (x, weight, bias))

    def recompute() -> Tensor:
        if options.whole is rows:  # the statistics are in the same operation
            return rows.forward(x, weight, bias, eps, negative_slope)[0]
        given = (x, weight, bias, mean, rstd)
        if options.whole is columns:
            return columns.normalize(*given, slope=negative_slope)
        halo = (planes[0], planes[1]) if options.has_halo else None
        return normalized_again(*given, stages=stages, slope=negative_slope, halo=halo)

    offer(y, recompute, x)
    return y  # type: ignore[no-any-return]


def sum_of(x: Tensor, added: Tensor) -> Tensor:
    """Add a map to another, in its memory where autograd allows that.

    Args:
        x: A convolution's result, (N, C, X, Y, Z), that nobody else reads.
        added: Of the same shape.
    """
    # A view that an autograd function returned cannot become another tensor.
    return x + added if is_view(x) else x.add_(added)


def stages_for(x: Tensor, channels: int | None = None) -> Stages:
    """Return the version of the stages that suits a map, the same for all slabs of a volume.

    Args:
        x: (N, C, X, Y, Z); for Triton's version it must be channels-last where a stage takes it.
        channels: Of the map, where x is only of its size; None: those of x.
    """
    elements = x.numel() // x.shape[1] * (x.shape[1] if channels is None else channels)
    # What the two versions exchange differs in size.
    elements = number_of_largest(elements, current_shard())
    if elements >= MIN_ELEMENTS and x.dtype in _FAST_TYPES and triton_available(x):
        return op
    return reference


def _whole_for(x: Tensor) -> ModuleType:
    """Return the module that does several of the reference's stages at once."""
    return columns if not is_gpu(x.device) and is_channels_last(x) else rows


_NO_HALO: Halo = (None, None)


class _Options(NamedTuple):
    """How a map is normalised."""

    stages: Stages
    whole: ModuleType | None
    """Does several of the stages at once; None: each is done by itself."""
    eps: float
    slope: float
    pads_output: bool
    pads_gradient: bool
    shard: Shard | None
    has_halo: bool


class _InstanceNorm(torch.autograd.Function):
    """Keeps its input and not its result, unlike PyTorch's LeakyReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        options: _Options,
    ) -> tuple[Tensor | None, ...]:
        stages, halo = options.stages, _NO_HALO
        if options.whole is not None:
            y, mean, rstd = options.whole.forward(x, weight, bias, options.eps, options.slope)
        else:
            parts = stages.moments(x) if added is None else stages.sum_moments(x, added)
            mean, rstd = merged(stages, parts, x, options.eps, options.shard)
            y, halo = normalized(
                *(x, weight, bias, mean, rstd),
                stages=stages,
                slope=options.slope,
                pads=options.pads_output,
                shard=options.shard if options.has_halo else None,
            )
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.options, ctx.adds = options, added is not None
        ctx.mark_non_differentiable(mean, rstd, *(plane for plane in halo if plane is not None))
        ctx.set_materialize_grads(False)  # these have none, and zeros would be launches
        return y, mean, rstd, *halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        x, *affine = ctx.saved_tensors
        options: _Options = ctx.options
        stages, slope, shard = options.stages, options.slope, options.shard
        if options.whole is not None:
            dx, *others = options.whole.backward(dy, x, *affine, slope=slope)
            return dx, None, *others, None
        if options.has_halo and shard is not None:
            dy = gradient_of_own(dy, shard)
        dy = channels_last(dy)
        own = stages.total(stages.sums(dy, x, *affine, slope=slope))
        dx = stages.gradient(
            dy,
            x,
            *affine,
            total=own if shard is None else stages.total(shard.gather(own)),
            voxels=num_voxels(x, shard),
            slope=slope,
            pads=options.pads_gradient,
        )
        weight, bias = affine[:2]
        dweight, dbias = own[1].sum(0).to(weight.dtype), own[0].sum(0).to(bias.dtype)
        dx = mark_padded(dx) if options.pads_gradient else dx
        return dx, dx if ctx.adds else None, dweight, dbias, None


def merged(
    stages: Stages, parts: Tensor, x: Tensor, eps: float, shard: Shard | None
) -> tuple[Tensor, Tensor]:
    """Return the mean (N, C, M) and 1 / deviation (N, C) of a volume.

    Args:
        stages: What made the moments.
        parts: The moments of the parts of a map.
        x: The map, (N, C, X, Y, Z).
        eps: Added to the variance.
        shard: The slab that it is; None: it is whole.
    """
    mean, rstd, own = stages.merge(parts, num_voxels(x), eps)
    if shard is not None:
        of_all = shard.gather(own.squeeze(0))
        mean, rstd, _ = stages.merge(of_all, num_voxels(x, shard), eps)
    return mean, rstd


def normalized(
    x: Tensor, *affine: Tensor, stages: Stages, slope: float, pads: bool, shard: Shard | None
) -> tuple[Tensor, Halo]:
    """Return a normalised map, and its halo where it has one.

    Args:
        x: (N, C, X, Y, Z).
        affine: As :class:`~unet3d.kernels.norm.stages.Stages` takes them.
        stages: What normalises.
        slope: Negative slope of LeakyReLU.
        pads: Whether the result is stored with zeros around Z.
        shard: The slab whose halo belongs to the result; None: it has none.
    """
    if shard is None:
        return stages.normalize(x, *affine, slope=slope, pads=pads), _NO_HALO
    y = empty_with_halo(x, pads)
    stages.normalize_into(inner(y), x, *affine, slope=slope, pads=pads)
    return y, fill_halo(y, shard, pads)


def normalized_again(
    x: Tensor, *affine: Tensor, stages: Stages, slope: float, halo: Halo | None
) -> Tensor:
    """Return what :func:`normalized` did, without zeros around Z, and without asking anyone."""
    if halo is None:
        return stages.normalize(x, *affine, slope=slope, pads=False)
    y = empty_with_halo(x)
    stages.normalize_into(inner(y), x, *affine, slope=slope, pads=False)
    put_halo(y, halo)
    return y


def laid_out(x: Tensor) -> Tensor:
    """Return a map as Triton's stages take it: channels-last, or with room around Z."""
    return x if has_room(x) else channels_last(x)


def channels_last(x: Tensor) -> Tensor:
    """Return a map in channels-last memory."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def num_voxels(x: Tensor, shard: Shard | None = None) -> int:
    """Return the voxels of a sample of a map (N, C, X, Y, Z), or of the volume it is a slab of."""
    return voxels_of_volume(x.shape[2] * x.shape[3] * x.shape[4], shard)
