"""Boxes of images and label maps, and the table of how outputs are sampled from them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unet3d.kernels.affine.plain import Matrix, Offset, Voxel

TABLE_CHANNELS = 16
"""First column of a table with the numbers of channels."""

Intensity = tuple[float, float, float, float]
"""For a channel: deviation of the noise that is added, seed of the noise (two numbers below 2^32),
and factor by which intensity plus noise is multiplied."""


class Boxes(NamedTuple):
    """Boxes from which outputs are sampled: output voxel o lies at ``matrix @ o + offset``."""

    images: Tensor
    """float16, float32 or float64: the (C, X, Y, Z) images of all boxes, flattened and
    concatenated."""
    labels: Tensor
    """uint8 or int64: the (X, Y, Z) labels of all boxes, flattened and concatenated."""
    table: Tensor
    """float64, one row per output: each row of the matrix followed by its offset; the shape of the
    box, and the number of voxels in the boxes before it; an :data:`Intensity` for each channel."""
    start: Voxel
    """First voxel of the outputs within whole outputs, if only parts are made; else (0, 0, 0)."""
    size: Voxel
    """Voxels of a whole output along each axis."""

    @staticmethod
    def of(
        images: Sequence[Tensor],
        labels: Sequence[Tensor],
        maps: Sequence[tuple[Matrix, Offset]],
        channels: Sequence[Sequence[Intensity]],
        start: Voxel,
        size: Voxel,
    ) -> "Boxes":
        """Concatenate boxes of one type and number of channels."""
        table, before = list[list[float]](), 0
        for label, (matrix, offset), intensities in zip(labels, maps, channels, strict=True):
            rows = [(*row, at) for row, at in zip(matrix, offset, strict=True)]
            parts = [*rows, (*label.shape, before), *intensities]
            table.append([number for part in parts for number in part])
            before += math.prod(label.shape)
        joined = (_joined(images), _joined(labels), torch.tensor(table, dtype=torch.float64))
        return Boxes(*joined, start, size)

    def each(self, num_channels: int) -> Iterator[tuple[Tensor, Tensor, Matrix, Offset, list[Any]]]:
        """Yield each output's image, label, matrix, offset, and four numbers of each channel."""
        end = 0
        for row in self.table.tolist():
            (a, b, c, x), (d, e, f, y), (g, h, i, z) = row[:4], row[4:8], row[8:12]
            shape = [int(voxels) for voxels in row[12:15]]
            begin, end = end, end + math.prod(shape)
            image = self.images[begin * num_channels : end * num_channels]
            yield (
                image.view(num_channels, *shape),
                self.labels[begin:end].view(shape),
                ((a, b, c), (d, e, f), (g, h, i)),
                (x, y, z),
                [row[first : first + 4] for first in range(TABLE_CHANNELS, len(row), 4)],
            )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)
