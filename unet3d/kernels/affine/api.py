"""Sampling of an image and its label map through an affine map of voxels.

PyTorch's ``grid_sample`` wants a grid of three floats for each voxel, rounds positions to 1e-5
voxels of a large box, and knows no labels. Here they are exact to 5e-7, and a label is what
linear interpolation of each class, then argmax, gives: small objects keep their shape better than
with the nearest label (F. Isensee et al., nnU-Net, do the same where they resample labels).
"""

import math

import torch
from torch import Tensor

from unet3d.kernels.affine import plain
from unet3d.kernels.affine.cells import Matrix, Offset, Voxel
from unet3d.kernels.triton_support import triton_available

IMAGE_TYPES = (torch.float16, torch.float32, torch.float64)
LABEL_TYPES = (torch.uint8, torch.int64)


def sample_affine(
    image: Tensor,
    label: Tensor,
    *,
    matrix: Matrix,
    offset: Offset,
    image_out: Tensor,
    label_out: Tensor,
    start: Voxel = (0, 0, 0),
) -> None:
    """Sample an image linearly, and its labels by the largest share, into given memory.

    Voxel o of the outputs, counted from ``start`` along X, Y and Z, is sampled at ``matrix @ o +
    offset`` in voxels of the box, whose centres are at integers. Around the box the image is 0 and
    the class is 0; between a voxel at its border and the outside is interpolated as between two
    voxels. Where the matrix mirrors or changes nothing and the offset is whole, voxels are copied
    as they are.

    With Triton nothing waits for a GPU. Its results differ from a CPU's by rounding only.

    ``image`` is (C, X, Y, Z) of float16, float32 or float64, ``label`` (X, Y, Z) of uint8 or int64,
    with any number of classes; ``image_out`` (C, *size) is float64 if the image is, else float32,
    and ``label_out`` (*size) of the label's type: of the eight voxels around the position the class
    with the largest sum of linear weights, of equal ones the smallest. All are contiguous and on
    one device. Where the outputs are a part of larger ones that begins at voxel ``start``, they are
    as they would be in these.
    """
    _check(image, label, image_out, label_out)
    if label_out.numel() == 0:
        return
    first = _position(matrix, offset, start)
    if triton_available(image):
        from unet3d.kernels.affine import kernel

        kernel.sample(image, label, matrix, first, image_out=image_out, label_out=label_out)
    elif (signs := _signs_of(matrix, first)) is not None:
        for box, out in ((image, image_out), (label, label_out)):
            _copy(box, signs, tuple(map(round, first)), out)
    else:
        outputs = {"image_out": image_out, "label_out": label_out}
        plain.sample(image, label, matrix, offset, **outputs, start=start)


def _position(matrix: Matrix, offset: Offset, voxel: Voxel) -> Offset:
    """Return where a voxel of the outputs lies in the box."""
    x, y, z = (
        math.fsum([first, *(factor * at for factor, at in zip(row, voxel, strict=True))])
        for row, first in zip(matrix, offset, strict=True)
    )
    return (x, y, z)


def _signs_of(matrix: Matrix, offset: Offset) -> tuple[int, ...] | None:
    """Return 1 or -1 for each axis if voxels are only mirrored and moved by whole steps."""
    signs = tuple(int(row[axis]) for axis, row in enumerate(matrix))
    mirrors = [
        [float(sign) if other == axis else 0.0 for other in range(3)]
        for axis, sign in enumerate(signs)
    ]
    copies = set(signs) <= {1, -1} and [list(row) for row in matrix] == mirrors
    return signs if copies and all(float(step).is_integer() for step in offset) else None


def _copy(box: Tensor, signs: tuple[int, ...], offset: tuple[int, ...], out: Tensor) -> None:
    """Copy voxel ``sign * o + offset`` of a box (..., X, Y, Z) to voxel o, 0 where there is none.

    So mirrored patches are exact to the bit.
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


def _check(image: Tensor, label: Tensor, image_out: Tensor, label_out: Tensor) -> None:
    if image.dtype not in IMAGE_TYPES or label.dtype not in LABEL_TYPES:
        raise ValueError(f"cannot sample {image.dtype} with labels of {label.dtype}")
    wide = torch.float64 if image.dtype == torch.float64 else torch.float32
    if (image_out.dtype, label_out.dtype) != (wide, label.dtype):
        raise ValueError(f"cannot sample into {image_out.dtype} and {label_out.dtype}")
    if image.shape[1:] != label.shape or label.dim() != 3:
        raise ValueError(f"an image {tuple(image.shape)} has no labels {tuple(label.shape)}")
    if image_out.shape != (len(image), *label_out.shape) or label_out.dim() != 3:
        raise ValueError(f"cannot sample {len(image)} channels into {tuple(image_out.shape)}")
    given = (image, label, image_out, label_out)
    if len({x.device for x in given}) > 1 or not all(x.is_contiguous() for x in given):
        raise ValueError("image, labels and outputs are contiguous and on one device")
