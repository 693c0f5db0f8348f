"""What outputs are sampled from, and how, in few tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unet3d.kernels.affine.cells import Matrix, Offset, Voxel


class Intensity(NamedTuple):
    """What is done to the sampled intensities of a channel."""

    noise_std: float = 0.0
    """Standard deviation of Gaussian noise that is added; 0: none."""
    noise_seed: tuple[int, int] = (0, 0)
    """Two numbers below 2^32 that the noise is made from."""
    factor: float = 1.0
    """What the sum is multiplied by."""


class Sample(NamedTuple):
    """How one output is sampled from its box: voxel o lies at ``matrix @ o + offset`` of it."""

    shape: Voxel
    """Voxels of the box along X, Y, Z."""
    matrix: Matrix
    offset: Offset
    channels: tuple[Intensity, ...]
    """One for each channel of the box."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Boxes:
    """Boxes that outputs of one size are sampled from, in few tensors, which are copied as one."""

    images: Tensor
    """float16, float32 or float64: (C, X, Y, Z) of each box, one after another, without axes."""
    labels: Tensor
    """uint8 or int64: (X, Y, Z) of each box, likewise; any number of classes."""
    samples: tuple[Sample, ...]
    table: Tensor
    """float64, a row for each output: all that a kernel has to know of it."""
    start: Voxel
    """The first voxel of the outputs, where they are parts of larger ones; a part is as in the
    whole."""
    size: Voxel
    """Voxels of whole outputs; those of the parts are their own."""

    @staticmethod
    def of(
        images: Sequence[Tensor],
        labels: Sequence[Tensor],
        samples: tuple[Sample, ...],
        start: Voxel,
        size: Voxel,
    ) -> "Boxes":
        """Lay boxes one after another, all of one type and with as many channels."""
        rows, first = [], 0
        for sample in samples:
            position = first_position(sample, start)
            placed = [(*row, at) for row, at in zip(sample.matrix, position, strict=True)]
            intensities = [(std, *seed, factor) for std, seed, factor in sample.channels]
            rows.append(sum(placed, ()) + (*sample.shape, first) + sum(intensities, ()))
            first += math.prod(sample.shape)
        return Boxes(
            images=_joined(images),
            labels=_joined(labels),
            samples=samples,
            table=torch.tensor(rows, dtype=torch.float64),
            start=start,
            size=size,
        )


TABLE_BOX = 12
"""Column of a table where shape and first voxel of the box are, behind matrix and offset."""
TABLE_CHANNELS = 16
"""First column of the four numbers of each channel."""


def first_position(sample: Sample, voxel: Voxel) -> Offset:
    """Return where a voxel of the outputs lies in the box."""
    x, y, z = (
        math.fsum([first, *(factor * at for factor, at in zip(row, voxel, strict=True))])
        for row, first in zip(sample.matrix, sample.offset, strict=True)
    )
    return (x, y, z)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
