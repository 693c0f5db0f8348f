"""The Triton convolution of few channels as PyTorch operations, with gradient and fake versions.

It may also return the moments of its result, as a normalisation takes them
(:mod:`unet3d.kernels.norm.op`). Then it has no gradient itself; the gradient of the weights may be
computed through the normalisation (:mod:`unet3d.kernels.norm.stem`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.kernels.maps import empty_result
from unet3d.kernels.operations import operation


class Launch(NamedTuple):
    """How a kernel is launched."""

    block_voxels: int
    """Voxels of a tile, consecutive in memory, of a plane along Y and Z."""
    programs: int
    """Target number of programs for all samples: as many as an H200 runs at a time."""
    warps: int
    """Warps of a program."""
    registers: int | None
    """Most registers of a thread."""


# By measurement on an H200: 256^3 voxels from one channel to 32 take 0.46 ms with moments, instead
# of 0.70 with a separate pass; 128^3 from four channels 0.17 instead of 0.22. The gradients of the
# weights take 1.02 and 0.25 ms. The first launch is for one channel to at most 32.
FORWARD = (
    Launch(block_voxels=128, programs=396, warps=4, registers=168),
    Launch(block_voxels=64, programs=528, warps=4, registers=None),
)
WEIGHTS = (
    Launch(block_voxels=64, programs=528, warps=4, registers=128),
    Launch(block_voxels=64, programs=264, warps=8, registers=128),
)


def launch_of(launches: tuple[Launch, Launch], weight: Tensor) -> Launch:
    """Choose how a kernel is launched for a weight (O, I, 3, 3, 3)."""
    outputs, inputs = weight.shape[:2]
    return launches[0 if inputs == 1 and outputs <= 32 else 1]


def division_of(
    launch: Launch, samples: int, planes: int, plane_voxels: int
) -> tuple[int, int, int]:
    """Return the division of a result's planes among programs.

    Returns the tiles of a plane; the planes of a program's run, each plane of each tile counted
    separately; and the programs of a sample. The last tile and the last run may be shorter.
    """
    tiles = -(-plane_voxels // launch.block_voxels)
    run = -(-tiles * planes * samples // launch.programs)
    return tiles, run, -(-tiles * planes // run)


def empty_moments(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Return memory for the moments of a result; each program computes a part."""
    n, _, planes, y, z = x.shape
    made = planes + 2 * padding - 2
    *_, parts = division_of(launch_of(FORWARD, weight), n, made, y * z)
    return x.new_empty((parts, 4, n, len(weight)), dtype=torch.float32)


def _fake(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return empty_result(x, len(weight), x.shape[2] + 2 * padding - 2)


_GIVEN = "(Tensor x, Tensor weight, int padding)"

stem = operation("stem", f"{_GIVEN} -> Tensor", "conv.stem_kernel.forward", _fake)
stem_with_moments = operation(
    "stem_with_moments",
    f"{_GIVEN} -> (Tensor, Tensor)",
    "conv.stem_kernel.forward_with_moments",
    lambda *given: (_fake(*given), empty_moments(*given)),
)
weight_gradient = operation(
    "stem_weights",
    "(Tensor dy, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, *,"
    " Tensor? total, int voxels, Tensor kernel, int padding, float slope) -> Tensor",
    "conv.stem_kernel.weight_gradient",
    lambda *maps, kernel, **options: torch.empty_like(
        kernel, memory_format=torch.contiguous_format
    ),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, kernel = ctx.saved_tensors
    options = {"total": None, "voxels": 0, "kernel": kernel, "padding": ctx.padding, "slope": 1.0}
    return None, weight_gradient(dy, x, *(None,) * 5, **options), None


torch.library.register_autograd("unet3d::stem", _differentiate, setup_context=_save)
