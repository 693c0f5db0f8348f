"""The hand-written convolutions as PyTorch operations, which run on CUDA; elsewhere the plain ones.

All are of 3x3x3 kernels with stride 1, of (N, C, X, Y, Z) maps in channels-last memory, which may
have room around Z (:mod:`unet3d.kernels.padding`), with multiples of 32 channels::

    convolve         the convolution of a map, or of what a normalisation with LeakyReLU makes of
                     it, which is never written; and the moments of the result
    add_convolution  the moments of a map to which a convolution is added, in its memory
    input_gradient   the gradient of the map that was convolved; where that was normalised, with the
                     sums that the gradient of the normalisation needs
    weight_gradient  (O, I, 3, 3, 3) in float32

Moments and sums are those of the stages of a normalisation (:mod:`unet3d.kernels.norm.op`), in as
many parts as there are warps that multiply. An ``affine`` is what those take: weight (C,), bias
(C,), mean (N, C, M) and 1 / deviation (N, C); all zeros around a map stay zeros. ``before`` and
``after`` are the planes of zeros around X. Where a map that is normalised is a slab, planes of its
neighbours (N, C, 1, Y, Z), stored as the map is, take the place of the zero planes next to it.
"""

from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.conv.hopper import reference
from unet3d.kernels.padding import empty_result
from unet3d.kernels.triton_support import operation

_MAY_BE_AFFINE = "Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd"
_MAY_BE_HALO = "Tensor? preceding, Tensor? following"

GROUP = 32
"""Channels that a program takes at a time."""
COLUMN = 16
"""Voxels of a column along Y and Z, along which a program goes."""
WARPS = 8
"""Warps of a program that multiply, each of which makes a part of moments or sums."""
PROCESSORS = 132
"""Of a Hopper GPU that is not here."""


def num_programs(x: Tensor, planes: int, groups: int, processors: int = PROCESSORS) -> int:
    """Return how many programs there are for each of so many groups, one a processor at most."""
    n, _, _, y, z = x.shape
    work = n * -(-y // COLUMN) * -(-z // COLUMN) * planes
    return min(processors // groups, work)


def _empty_parts(y: Tensor, numbers: int, wanted: bool) -> Tensor:
    n, channels, planes, *_ = y.shape
    parts = WARPS * num_programs(y, planes, channels // GROUP) if wanted else 0
    return y.new_empty((parts, numbers, n, channels), dtype=torch.float32)


def _fake_convolve(
    x: Tensor, kernel: Tensor, *given: Any, slope: float, before: int, after: int, moments: bool
) -> tuple[Tensor, Tensor]:
    y = empty_result(x, len(kernel), x.shape[2] + before + after - 2)
    return y, _empty_parts(y, 4, moments)


def _fake_input_gradient(
    dy: Tensor,
    kernel: Tensor,
    x: Tensor | None,
    *affine: Any,
    slope: float,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor]:
    dx = empty_result(dy, kernel.shape[1], dy.shape[2] - before - after + 2)
    return dx, _empty_parts(dx, 2, x is not None)


convolve = operation(
    "hopper_convolve",
    f"(Tensor x, Tensor kernel, {_MAY_BE_AFFINE}, {_MAY_BE_HALO}, *, float slope, int before,"
    " int after, bool moments) -> (Tensor, Tensor)",
    "conv.hopper.launch.convolve",
    _fake_convolve,
)
add_convolution = operation(
    "hopper_add_convolution",
    "(Tensor(a!) y, Tensor x, Tensor kernel, *, int before, int after) -> Tensor",
    "conv.hopper.launch.add_convolution",
    lambda y, x, kernel, **sides: _empty_parts(y, 4, True),
)
input_gradient = operation(
    "hopper_input_gradient",
    f"(Tensor dy, Tensor kernel, Tensor? x, {_MAY_BE_AFFINE}, *, float slope, int before,"
    " int after) -> (Tensor, Tensor)",
    "conv.hopper.launch.input_gradient",
    _fake_input_gradient,
)
weight_gradient = operation(
    "hopper_weight_gradient",
    f"(Tensor dy, Tensor x, {_MAY_BE_AFFINE}, {_MAY_BE_HALO}, *, float slope, int before)"
    " -> Tensor",
    "conv.hopper.launch.weight_gradient",
    lambda dy, x, *given, slope, before: x.new_empty(
        (dy.shape[1], x.shape[1], 3, 3, 3), dtype=torch.float32
    ),
)
for _name in ("convolve", "add_convolution", "input_gradient", "weight_gradient"):
    torch.library.impl(f"unet3d::hopper_{_name}", "cpu")(getattr(reference, _name))
