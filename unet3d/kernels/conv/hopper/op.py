"""The hand-written convolutions as PyTorch operations on CUDA; plain versions run elsewhere.

All have 3x3x3 kernels and stride 1. Maps (N, C, X, Y, Z) are in channels-last memory, may have room
around Z (:mod:`unet3d.kernels.maps`), and have multiples of 32 channels::

    convolve         convolves a map, which may be normalised first, with LeakyReLU; the normalised
                     map is not written; returns the result and its moments
    add_convolution  adds a convolution to a map, in its memory, and returns the moments of the sum
    input_gradient   returns the gradient of the convolved map; if it was normalised first, also the
                     sums that the gradient of the normalisation needs
    weight_gradient  returns the gradient (O, I, 3, 3, 3) in float32

Moments and sums are those of the stages of a normalisation (:mod:`unet3d.kernels.norm.op`), one
part per warp that multiplies. An ``affine`` has the tensors that the stages take: weight (C,), bias
(C,), mean (N, C, M) and 1 / deviation (N, C). Zeros around a map are not normalised. ``before`` and
``after`` are the planes of zeros before and behind X. If a map that is normalised is a slab, its
neighbours' planes (N, C, 1, Y, Z), in the layout of the map, replace the zeros next to it.

A program of either kernel moves along X over a column of 16 x 16 voxels. The planes of all columns
are divided equally over the programs; each program computes which planes are its own.
"""

import ctypes
import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.conv.hopper import reference
from unet3d.kernels.conv.hopper.driver import Kernel, TensorMap, tensor_map
from unet3d.kernels.maps import empty_result
from unet3d.kernels.operations import operation

GROUP = 32
"""Channels that a program loads at a time."""
COLUMN = 16
"""Voxels of a column along Y and Z."""
WARPS = 8
"""Warps of a program that multiply; each makes a part of the moments or sums."""
PROCESSORS = 132
"""Number of multiprocessors to assume if there is no GPU."""
PAIRS = 5
"""Pairs of taps (ky, kz) in the sums of the weights' gradient; see ``weights.cu``."""

_SLOT = 21 * 1024
"""Bytes of a plane of 18 x 18 voxels in shared memory, rounded up."""
_WEIGHTS = 9 * 4 * 160 * 16
_NOTHING, _MOMENTS, _MOMENTS_OF_SUM, _SUMS = range(4)
_NO_MAP = TensorMap()

_Pointer = ctypes.c_void_p


class _Map(ctypes.Structure):
    _fields_ = (
        ("data", _Pointer),
        ("sample", ctypes.c_longlong),
        ("x", ctypes.c_longlong),
        ("y", ctypes.c_int),
        ("z", ctypes.c_int),
    )


class _Halo(ctypes.Structure):
    _fields_ = (("before", _Pointer), ("behind", _Pointer), ("sample", ctypes.c_longlong))


_NO_HALO = _Halo()


class _Affine(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("weight", "bias", "mean", "rstd")),
        ("channels", ctypes.c_int),
        ("slope", ctypes.c_float),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("x", _Map),
        ("halo", _Halo),
        ("affine", _Affine),
        ("weights", _Pointer),
        ("y", _Map),
        ("other", _Map),
        ("rows", _Pointer),
        *((name, ctypes.c_int) for name in ("N", "X", "Y", "Z", "made", "before")),
    )


class _Weights(ctypes.Structure):
    _fields_ = (
        ("x", _Map),
        ("halo", _Halo),
        ("affine", _Affine),
        ("sums", _Pointer),
        *((name, ctypes.c_int) for name in ("N", "X", "Y", "Z", "before", "around")),
    )


def num_programs(x: Tensor, planes: int, groups: int, processors: int = PROCESSORS) -> int:
    """Return the programs for each of ``groups``: at most one per multiprocessor in all."""
    n, _, _, y, z = x.shape
    work = n * -(-y // COLUMN) * -(-z // COLUMN) * planes
    return min(processors // groups, work)


def _run_convolve(
    x: Tensor,
    kernel: Tensor,
    *given: Tensor | None,
    slope: float,
    before: int,
    after: int,
    moments: bool,
) -> tuple[Tensor, Tensor]:
    """Convolve x, normalised first if an affine is given; return the result and its moments."""
    affine, halo = _affine(given[:4], slope), _halo(*given[4:])
    y = empty_result(x, kernel.shape[0], x.shape[2] + before + after - 2)
    epilogue = _MOMENTS if moments else _NOTHING
    rows = _convolve(y, x, kernel, affine, None, epilogue, before, turned=False, halo=halo)
    return y, rows


def _run_add_convolution(
    y: Tensor, x: Tensor, kernel: Tensor, *, before: int, after: int
) -> Tensor:
    """Add the convolution of x to y in place, and return the moments of the sum."""
    return _convolve(y, x, kernel, None, y, _MOMENTS_OF_SUM, before, turned=False)


def _run_input_gradient(
    dy: Tensor,
    kernel: Tensor,
    x: Tensor | None,
    *affine: Tensor | None,
    slope: float,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor]:
    """Return the convolved map's gradient and, if that map is x normalised, the gradient's sums."""
    dx = empty_result(dy, kernel.shape[1], dy.shape[2] - before - after + 2)
    epilogue, given = _NOTHING if x is None else _SUMS, _affine(affine, slope)
    sums = _convolve(dx, dy, kernel, given, x, epilogue, 2 - before, turned=True)
    return dx, sums


def _convolve(
    y: Tensor,
    x: Tensor,
    kernel: Tensor,
    affine: _Affine | None,
    other: Tensor | None,
    epilogue: int,
    before: int,
    *,
    turned: bool,
    halo: _Halo = _NO_HALO,
) -> Tensor:
    """Write a convolution to y, and return its moments or sums, one part for each warp."""
    n, inputs, *size = x.shape
    outputs, made = y.shape[1:3]
    parts = outputs // GROUP
    programs = num_programs(x, made, parts, _processors(x.device))
    # Zeros, because a warp only writes its samples.
    num_rows = 0 if epilogue == _NOTHING else programs * WARPS
    shape = (num_rows, 2 if turned else 4, n, outputs)
    rows = torch.zeros(shape, dtype=torch.float32, device=x.device)
    is_last = kernel.is_contiguous(memory_format=torch.channels_last_3d)
    flat = kernel.permute(0, 2, 3, 4, 1).flatten() if is_last else kernel.flatten()
    weights = flat[_places(outputs, inputs, turned, is_last, x.device)]
    arguments = _Convolution(
        x=_map(x),
        halo=halo,
        affine=affine or _Affine(),
        weights=weights.data_ptr(),
        y=_map(y),
        other=_Map() if other is None else _map(other),
        rows=rows.data_ptr(),
        N=n,
        X=size[0],
        Y=size[1],
        Z=size[2],
        made=made,
        before=before,
    )
    normalizes = affine is not None and epilogue != _SUMS
    box = _NO_MAP if normalizes else tensor_map(x, (COLUMN + 2, COLUMN + 2))
    begin_building(float16=x.dtype == torch.float16)
    function = _convolution(inputs // GROUP, normalizes, epilogue, x.dtype == torch.float16)
    function.launch(x.device, programs * parts, box, arguments, ctypes.c_int(parts))
    return rows


def _run_weight_gradient(
    dy: Tensor, x: Tensor, *given: Tensor | None, slope: float, before: int
) -> Tensor:
    """Return the gradient of the kernel (O, I, 3, 3, 3)."""
    affine, halo = _affine(given[:4], slope), _halo(*given[4:])
    around = int(any(plane is not None for plane in given[4:]))
    n, channels, planes, *size = x.shape
    planes += 2 * around
    inputs, outputs = channels // GROUP, dy.shape[1] // GROUP
    programs = num_programs(x, planes, inputs * outputs, _processors(x.device))
    sums = x.new_empty((programs, inputs * outputs, PAIRS * 64 * 96), dtype=torch.float32)
    arguments = _Weights(
        x=_map(x),
        halo=halo,
        affine=affine or _Affine(),
        sums=sums.data_ptr(),
        N=n,
        X=planes,
        Y=size[0],
        Z=size[1],
        before=before - around,
        around=around,
    )
    x_box = _NO_MAP if affine else tensor_map(x, (COLUMN + 2, COLUMN + 2))
    boxes = x_box, tensor_map(dy, (COLUMN, COLUMN))
    counts = ctypes.c_int(inputs), ctypes.c_int(outputs)
    function = _weights(affine is not None, x.dtype == torch.float16)
    function.launch(x.device, programs * inputs * outputs, *boxes, arguments, *counts)
    places = _gradient_places(outputs, inputs, x.device)
    return sums.sum(0).reshape(-1)[places].view(dy.shape[1], channels, 3, 3, 3)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _map(x: Tensor) -> _Map:
    sample, _, *space = x.stride()
    return _Map(x.data_ptr(), sample, *space)


def _halo(before: Tensor | None, behind: Tensor | None) -> _Halo:
    """Return the planes beside a map, (N, C, 1, Y, Z) in the map's layout; None: zeros."""
    sample = next((plane.stride(0) for plane in (before, behind) if plane is not None), 0)
    pointers = (None if plane is None else plane.data_ptr() for plane in (before, behind))
    return _Halo(*pointers, sample)


def _affine(affine: tuple[Tensor | None, ...], slope: float) -> _Affine | None:
    weight = affine[0]
    if weight is None:
        return None
    values = [value.float().contiguous() for value in affine if value is not None]
    made = _Affine(*(value.data_ptr() for value in values), weight.numel(), slope)
    made.values = values  # keeps copies alive until the launch
    return made


@functools.cache
def _places(outputs: int, inputs: int, turned: bool, is_last: bool, device: torch.device) -> Tensor:
    """Return indices into a kernel (O, I, 3, 3, 3), in the order in which programs load weights.

    For each group of 32 outputs and group of 32 inputs: (9 taps (ky, kz), 4 chunks of inputs, kx =
    2 1 0 2 1, 32 columns, 8 inputs of the chunk). Column 8 j + 2 q + e is output 8 q + 2 j + e, so
    a thread sums eight neighbouring outputs. ``turned``: for the gradient of the input; the kernel
    is then (inputs, outputs, 3, 3, 3). ``is_last``: the kernel is in channels-last memory.
    """
    ranges = (outputs // GROUP, inputs // GROUP, 3, 3, 4, 5, 4, 4, 2, 8)
    many = torch.meshgrid(*map(torch.arange, ranges), indexing="ij")
    to, of, ky, kz, chunk, block, j, q, e, within = many
    kx = torch.tensor((2, 1, 0, 2, 1))[block]
    out, into = GROUP * to + 8 * q + 2 * j + e, GROUP * of + 8 * chunk + within
    if turned:
        kx, ky, kz, out, into, inputs = 2 - kx, 2 - ky, 2 - kz, into, out, outputs
    tap = (kx * 3 + ky) * 3 + kz
    place = (out * 27 + tap) * inputs + into if is_last else (out * inputs + into) * 27 + tap
    return place.flatten().to(device)


@functools.cache
def _gradient_places(outputs: int, inputs: int, device: torch.device) -> Tensor:
    """Return the index of each weight's gradient in the sums (parts, pairs of taps, 64, 96)."""
    size = (outputs, GROUP, inputs, GROUP, 3, 3, 3)
    to, o, of, i, kx, ky, kz = torch.meshgrid(*map(torch.arange, size), indexing="ij")
    pair = torch.where(kz < 2, ky, torch.where(ky < 2, 3, 4))
    half = torch.where(kz < 2, kz, torch.where(ky < 2, ky, 0))
    row = ((to * inputs + of) * PAIRS + pair) * 64 + half * GROUP + i
    return (row * 96 + (2 - kx) * GROUP + o).flatten().to(device)


@functools.cache
def _convolution(halves: int, normalizes: bool, epilogue: int, float16: bool) -> Kernel:
    slots = 5 if halves == 1 else 2
    shared = slots * _SLOT + halves * _WEIGHTS + 16 * slots + 16 + halves * GROUP * 8
    return Kernel(
        "convolution",
        ("common.cu", "convolution.cu"),
        {"HALVES": halves, "NORM": int(normalizes), "EPILOGUE": epilogue, "FLOAT16": int(float16)},
        threads=512 if normalizes else 384,
        shared_bytes=shared + 1024,  # aligns the ring to 1024 bytes
    )


@functools.cache
def _weights(normalizes: bool, float16: bool) -> Kernel:
    shared = 4 * _SLOT + 7 * COLUMN * COLUMN * 64 + 16 * 9 + GROUP * 8
    return Kernel(
        "weights",
        ("common.cu", "weights.cu"),
        {"NORM": int(normalizes), "FLOAT16": int(float16)},
        threads=384,
        shared_bytes=shared + 1024,
    )


@functools.cache
def begin_building(float16: bool) -> None:
    """Begin to compile all variants that are not cached, first the ones that forward needs."""
    for halves, normalizes, epilogue in itertools.product((1, 2), (False, True), range(3)):
        if not (normalizes and epilogue == _MOMENTS_OF_SUM):
            _convolution(halves, normalizes, epilogue, float16).build()
    for chosen in (False, True):
        _weights(chosen, float16).build()
        _convolution(2 if chosen else 1, False, _SUMS, float16).build()


CHECKED = _convolution(1, False, _NOTHING, False)
"""The variant by which :func:`unet3d.kernels.conv.hopper.api.available` checks the machine."""


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


_MAY_BE_AFFINE = "Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd"
_MAY_BE_HALO = "Tensor? preceding, Tensor? following"


convolve = operation(
    "hopper_convolve",
    f"(Tensor x, Tensor kernel, {_MAY_BE_AFFINE}, {_MAY_BE_HALO}, *, float slope, int before,"
    " int after, bool moments) -> (Tensor, Tensor)",
    _run_convolve,
    _fake_convolve,
)
add_convolution = operation(
    "hopper_add_convolution",
    "(Tensor(a!) y, Tensor x, Tensor kernel, *, int before, int after) -> Tensor",
    _run_add_convolution,
    lambda y, x, kernel, **sides: _empty_parts(y, 4, True),
)
input_gradient = operation(
    "hopper_input_gradient",
    f"(Tensor dy, Tensor kernel, Tensor? x, {_MAY_BE_AFFINE}, *, float slope, int before,"
    " int after) -> (Tensor, Tensor)",
    _run_input_gradient,
    _fake_input_gradient,
)
weight_gradient = operation(
    "hopper_weight_gradient",
    f"(Tensor dy, Tensor x, {_MAY_BE_AFFINE}, {_MAY_BE_HALO}, *, float slope, int before)"
    " -> Tensor",
    _run_weight_gradient,
    lambda dy, x, *given, slope, before: x.new_empty(
        (dy.shape[1], x.shape[1], 3, 3, 3), dtype=torch.float32
    ),
)
for _name in ("convolve", "add_convolution", "input_gradient", "weight_gradient"):
    torch.library.impl(f"unet3d::hopper_{_name}", "cpu")(getattr(reference, _name))
