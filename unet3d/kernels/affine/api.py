"""Sampling of images and their label maps through affine maps of voxels.

PyTorch's ``grid_sample`` needs a grid of three floats per voxel, rounds positions in a large box to
1e-5 voxels, and has no mode for labels. Here positions are exact to 5e-7 voxels. A label is the
argmax of the linearly interpolated classes: small objects keep their shape better than with the
nearest label (F. Isensee et al., nnU-Net, do the same where they resample labels).
"""

import math

import torch
from torch import Tensor

from unet3d.kernels.affine import plain
from unet3d.kernels.affine.boxes import Boxes
from unet3d.kernels.affine.noise import add_noise, independent_of_threads
from unet3d.kernels.affine.plain import Matrix, Offset, Voxel
from unet3d.kernels.triton_support import triton_available


def sample_affine(boxes: Boxes, *, image_out: Tensor, label_out: Tensor) -> None:
    """Sample images linearly, and labels by the largest share, into given memory on one device.

    ``image_out`` is (N, C, *size), float64 if the images are, else float32; ``label_out`` is (N,
    *size), of the labels' type. Both are contiguous. Outside of a box the image and the class are
    0; interpolation across its border is linear. If a matrix only mirrors or is the identity, and
    the offset is whole, voxels are copied exactly. The label is the class with the largest sum of
    linear weights over the eight voxels around the position; ties go to the smallest class.

    With Triton this is one launch, and the host does not wait for the GPU. Its results differ from
    a CPU's by rounding only.
    """
    if label_out.numel() == 0:
        return
    if triton_available(image_out):
        from unet3d.kernels.affine import kernel

        kernel.sample(boxes, image_out, label_out)
        return
    outputs = zip(boxes.each(image_out.shape[1]), image_out, label_out, strict=True)
    for (image, label, matrix, offset, intensities), out, labels in outputs:
        first = _position(matrix, offset, boxes.start)
        if (signs := _signs_of(matrix, first)) is not None:
            for box, copied in ((image, out), (label, labels)):
                _copy(box, signs, tuple(map(round, first)), copied)
        else:
            given = {"image_out": out, "label_out": labels, "start": boxes.start}
            plain.sample(image, label, matrix, offset, **given)
        with independent_of_threads(out.device):
            for channel, (std, *seed, factor) in zip(out, intensities, strict=True):
                if std > 0:
                    add_noise(channel, std, boxes.start, boxes.size, (int(seed[0]), int(seed[1])))
                if factor != 1:
                    channel.mul_(factor)


def _position(matrix: Matrix, offset: Offset, voxel: Voxel) -> Offset:
    """Return the position in the box of a voxel of the outputs."""
    x, y, z = (
        math.fsum([first, *(factor * at for factor, at in zip(row, voxel, strict=True))])
        for row, first in zip(matrix, offset, strict=True)
    )
    return (x, y, z)


def _signs_of(matrix: Matrix, offset: Offset) -> tuple[int, ...] | None:
    """Return 1 or -1 for each axis if voxels are only mirrored and moved by whole voxels."""
    signs = tuple(int(row[axis]) for axis, row in enumerate(matrix))
    mirrors = [
        [float(sign) if other == axis else 0.0 for other in range(3)]
        for axis, sign in enumerate(signs)
    ]
    copies = set(signs) <= {1, -1} and [list(row) for row in matrix] == mirrors
    return signs if copies and all(float(step).is_integer() for step in offset) else None


def _copy(box: Tensor, signs: tuple[int, ...], offset: tuple[int, ...], out: Tensor) -> None:
    """Copy voxel ``sign * o + offset`` of a box (..., X, Y, Z) to voxel o; 0 outside of the box.

    So mirrored patches are bit-exact.
    """
    part, inside = box, out
    flipped = []
    for axis, (sign, first) in enumerate(zip(signs, offset, strict=True), start=-3):
        voxels, size = box.shape[axis], out.shape[axis]
        last = first + sign * (size - 1)
        low, high = max(0, min(first, last)), min(voxels - 1, max(first, last))
        if low > high:
            out.zero_()
            return
        begin = low - first if sign > 0 else first - high
        part = part.narrow(axis, low, high + 1 - low)
        inside = inside.narrow(axis, begin, high + 1 - low)
        if sign < 0:
            flipped.append(axis)
    if inside.numel() < out.numel():
        out.zero_()
    inside.copy_(torch.flip(part, flipped) if flipped else part)
