"""Choice of the hand-written convolutions, with their gradients.

They need no zeros around a map: a normalisation pads neither its result for them nor its gradient
(:func:`wants_padding`). The moments of a result cost nothing, and are attached to it as a mark
(:mod:`unet3d.kernels.maps`). A normalised map that only one convolution reads is never written: the
convolution takes the input of the normalisation and normalises while it loads. In backward it
returns, with the gradient, the sums that the normalisation needs::

    convolve ─ y, moments ─ merge ─ y, affine ─ convolve             forward
    ... ─ gradient of y ─ total ─ dx, sums ─ input_gradient ─ ...    backward

A convolution that normalises a slab gets it without halo and exchanges the planes itself. The
planes need not be normalised before, because the neighbours have the same statistics. In backward
it sends the neighbours the gradients of their planes.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unet3d.kernels.conv.hopper import op
from unet3d.kernels.maps import (
    MOMENTS,
    SUMS,
    Deferred,
    can_fold,
    deferred_of,
    is_laid_out,
    laid_out,
    mark,
    with_marks,
)
from unet3d.kernels.norm.volume import stages_for
from unet3d.kernels.recompute import normalized_from
from unet3d.kernels.sharding import (
    Shard,
    current_shard,
    end_plane,
    number_of_largest,
    planes_beside,
)
from unet3d.kernels.triton_support import all_ranks_can, triton_available
from unet3d.memory.fake_devices import is_fake_device, is_gpu

logger = logging.getLogger(__name__)

TYPES = (torch.bfloat16, torch.float16)
CHANNELS = (32, 64)
MIN_VOXELS = 32**3
"""Fewest voxels of a batch, per 32 channels of the input or output, whichever has more. cuDNN is
faster for fewer voxels: on an H200 a convolution of 32 to 32 channels and its gradients take 54 us
at 24^3 voxels (cuDNN: 39) and 56 us at 32^3 (69). With 64 channels they take 142 us at 40^3 (126)
and 169 us at 48^3 (186)."""

_NO_AFFINE = (None, None, None, None)

SWITCH = "UNET3D_HOPPER"
"""Environment variable: 0 leaves all convolutions to cuDNN."""
CAPABILITY = (9, 0)

_checking = threading.Lock()
_all_slabs_can = True


@functools.cache
def available(device: torch.device) -> bool:
    """Return whether the hand-written convolutions can be used on a device.

    The first call compiles a kernel, or finds it in the cache, and loads it. A fake device stands
    for the GPU with its index, or else for the first; without GPUs it has the convolutions.
    """
    is_fake = is_fake_device(device)
    if not is_fake and device.type != "cuda":
        return False
    with _checking:
        if is_fake and not torch.cuda.is_available():
            return os.environ.get(SWITCH) != "0"
        index = device.index or 0
        gpu = torch.device("cuda", index if index < torch.cuda.device_count() else 0)
        # ROCm reports the same capability for the MI200.
        is_amd, capability = torch.version.hip is not None, torch.cuda.get_device_capability(gpu)
        if is_amd or capability != CAPABILITY:
            name = torch.cuda.get_device_name(gpu)
            _say(logging.INFO, f"the hand-written convolutions need a Hopper GPU, not {name}")
            return False
        if os.environ.get(SWITCH) == "0":
            _say(logging.INFO, f"{SWITCH}=0 switches the hand-written convolutions off")
            return False
        return _works(None if is_fake else gpu)


def _works(gpu: torch.device | None) -> bool:
    """Return whether a kernel can be compiled, and loaded if there is a GPU for it."""
    try:
        if gpu is None:
            op.CHECKED.build().result()
        else:
            # The other kernels are compiled while networks and data are loaded.
            op.begin_building(float16=False)
            op.CHECKED.load(gpu)
    # AttributeError: a function is missing in a library.
    except (OSError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        _say(logging.WARNING, f"so training takes about a third longer: {reason}")
        return False
    return True


@functools.cache
def _say(level: int, reason: str) -> None:
    logger.log(level, "convolutions use cuDNN, %s", reason)


def are_on(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Return whether any convolution in a type could be done here on a device."""
    return dtype in TYPES and _can(device)


def agree(devices: Sequence[torch.device], exchange: Callable[[bool], Sequence[bool]]) -> None:
    """Use these kernels for all slabs of a volume, or for none.

    A collective call with this rank's devices. A convolution that normalises exchanges planes that
    are not normalised yet, so ranks that disagree would compute wrong values from messages of the
    right size. ``exchange`` maps this rank's answer to the answers of all ranks.
    """
    global _all_slabs_can
    own = all(available(device) for device in devices)
    _all_slabs_can = all_ranks_can(
        own,
        exchange,
        "rank %d does not have the hand-written convolutions, so all ranks use cuDNN",
    )


def _can(device: torch.device) -> bool:
    return available(device) and (_all_slabs_can or is_fake_device(device))


def min_voxels(inputs: int, outputs: int) -> int:
    """Return the fewest voxels of a batch for the hand-written convolutions."""
    return MIN_VOXELS * (max(inputs, outputs) // min(CHANNELS))


def suits(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether a 3x3x3 convolution of a map like x, with stride 1, is done here."""
    return (
        is_gpu(x.device)
        and x.dtype in TYPES
        and inputs in CHANNELS
        and outputs in CHANNELS
        # All slabs must decide alike, because readers may exchange planes.
        and number_of_largest(x.numel() // x.shape[1]) >= min_voxels(inputs, outputs)
        and is_laid_out(x)
        # Triton merges their moments.
        and triton_available(x)
        and _can(x.device)
    )


def wants_padding(x: Tensor) -> bool:
    """Return whether convolutions of a map fold pairs of voxels along Z and read zeros around Z."""
    channels = x.shape[1]
    return can_fold(x, channels) and not suits(x, channels, channels)


def normalizes(x: Tensor, outputs: int | None) -> bool:
    """Return whether the only reader of a normalised map like x will do the normalisation.

    ``outputs`` are the output channels of the only reader, a 3x3x3 convolution with stride 1; None
    if the map has other readers.
    """
    return outputs is not None and suits(x, x.shape[1], outputs)


def convolve(x: Tensor, weight: Tensor, x_padding: int, moments: bool) -> Tensor:
    """Convolve (N, I, X, Y, Z) with (O, I, 3, 3, 3), zeros around; differentiable.

    With ``moments`` the result is marked with its moments. If x has a deferred normalisation, it is
    done first; a slab then comes without its halo, and ``x_padding`` is 1, as for a whole map.
    """
    deferred = deferred_of(x)
    shard = None if deferred is None else current_shard()
    given = (x, weight, None, deferred, None, shard, x_padding, moments)
    y, parts = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
    return mark(y, MOMENTS, parts) if moments else y


def add_convolution(y: Tensor, x: Tensor, weight: Tensor, x_padding: int) -> Tensor:
    """Add the convolution of x to a map in place, and return the map, marked with its moments.

    The map must be a result without other readers. If x is a normalised map that backward would
    recompute, the gradient of the weight instead loads x's source and normalises it.
    """
    given = (x, weight, y, None, normalized_from(x), None, x_padding, True)
    made, parts = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
    return mark(with_marks(made, y), MOMENTS, parts)


class _Convolution(torch.autograd.Function):
    """A convolution on Hopper GPUs.

    Backward gets the kernel, the planes beside x from other slabs, and x itself, or the map that x
    was normalised from.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        added_to: Tensor | None,
        deferred: Deferred | None,
        source: tuple[Tensor, Deferred] | None,
        shard: Shard | None,
        x_padding: int,
        moments: bool,
    ) -> tuple[Tensor, Tensor]:
        kernel, sides = weight.to(x.dtype), {"before": x_padding, "after": x_padding}
        affine, slope = (_NO_AFFINE, 1.0) if deferred is None else deferred[:2]
        halo = (None, None) if shard is None else planes_beside(x, shard)
        if added_to is None:
            given = (x, kernel, *affine, *halo)
            y, parts = op.convolve(*given, slope=slope, **sides, moments=moments)
        else:
            parts, y = op.add_convolution(added_to, x, kernel, **sides), added_to.detach()
        ctx.before = x_padding
        if source is not None:  # which comes without the planes beside it
            x, (affine, slope, halo) = source
            ctx.before = 1
        ctx.save_for_backward(x, kernel, *affine, *halo)
        ctx.shard, ctx.sides, ctx.slope, ctx.weight_dtype = shard, sides, slope, weight.dtype
        ctx.is_deferred, ctx.adds = deferred is not None, added_to is not None
        ctx.mark_non_differentiable(parts)
        ctx.set_materialize_grads(False)  # no zeros for the moments: they would cost launches
        return y, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        x, kernel, *rest = ctx.saved_tensors
        affine, halo = rest[:4], rest[4:]
        given, dx, dweight = laid_out(dy), None, None
        if ctx.needs_input_grad[1]:
            sides = {"slope": ctx.slope, "before": ctx.before}
            dweight = op.weight_gradient(given, x, *affine, *halo, **sides)
            dweight = dweight.to(ctx.weight_dtype)
        if not ctx.is_deferred:
            x, affine = None, _NO_AFFINE  # x may have been recomputed only for this
        if ctx.needs_input_grad[0]:
            dx, sums = op.input_gradient(given, kernel, x, *affine, slope=ctx.slope, **ctx.sides)
            if ctx.shard is not None:
                more = _add_from_beside(
                    dx, given, kernel, x, *affine, slope=ctx.slope, shard=ctx.shard
                )
                sums = torch.cat((sums, *more))
            dx = mark(dx, SUMS, sums) if ctx.is_deferred else dx
        return dx, dweight, dy if ctx.adds else None, None, None, None, None, None


def _add_from_beside(
    dx: Tensor, dy: Tensor, kernel: Tensor, x: Tensor, *affine: Any, slope: float, shard: Shard
) -> list[Tensor]:
    """Add the neighbours' contributions to the first and last plane of a slab's gradient.

    Returns the normalisation's sums over the contributions, to be added to the sums over dx.
    """
    ends = ((0, {"before": 0, "after": 2}), (-1, {"before": 2, "after": 0}))
    sent = [
        op.input_gradient(end_plane(dy, end), kernel, None, *_NO_AFFINE, slope=1.0, **sides)[0]
        for end, sides in ends
    ]
    received = shard.exchange(*(plane.squeeze(2).permute(0, 2, 3, 1) for plane in sent))
    sums = []
    for (end, _), plane in zip(ends, received, strict=True):
        if plane is not None:
            more, of_x = plane.permute(0, 3, 1, 2).unsqueeze(2), laid_out(end_plane(x, end))
            end_plane(dx, end).add_(more)
            sums.append(stages_for(of_x).sums(more, of_x, *affine, slope=slope))
    return sums
