"""Boxes of a case, matrices, and sampling into new memory."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from unet3d.kernels import sample_affine

Array = npt.NDArray[np.float64]
Shape = tuple[int, int, int]

IDENTITY = np.eye(3)
TURNED = Rotation.from_euler("xyz", [20, -15, 25], degrees=True).as_matrix()
THICK = np.array([[0.9, 0.4, 0.0], [-0.35, 1.1, 0.0], [0.0, 0.0, 1.0]])
FLIPS = [(1, 1, 1), (-1, 1, 1), (1, -1, -1), (-1, -1, -1)]
MATRICES = {
    "turned": TURNED,
    "turned and larger": TURNED * 0.7,
    "turned and smaller": TURNED @ np.diag([1.4, -1.4, 1.4]),
    "turned in a plane of thick slices": THICK,
    "scaled": np.diag([0.8, 1.25, 1.1]),
    "scaled and mirrored": np.diag([-0.8, 1.25, -1.1]),
    "spacing that differs": np.array([[0.9, 0.3, 1.5], [-0.3, 0.95, 0.2], [-0.1, 0.05, 0.9]]),
    "axes exchanged": np.array([[0.0, 1.0, 0.0], [0.0, 0.0, -1.0], [1.0, 0.0, 0.0]]),
}
SHIFT = np.array([0.123, -0.2, 0.31])
SIZES = [
    ((13, 11, 17), (9, 14, 12)),
    ((1, 9, 8), (7, 9, 1)),
    ((40, 45, 37), (35, 33, 34)),
    ((3, 2, 4), (33, 20, 37)),
]


def case(
    shape: Shape,
    channels: int = 1,
    num_classes: int = 4,
    dtype: torch.dtype = torch.float32,
    label_dtype: torch.dtype = torch.uint8,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(channels, *shape, generator=generator, dtype=torch.float64).to(dtype)
    coarse = torch.randint(num_classes, [-(-size // 2) for size in shape], generator=generator)
    for axis in range(3):
        coarse = coarse.repeat_interleave(2, axis)
    return image, coarse[: shape[0], : shape[1], : shape[2]].contiguous().to(label_dtype)


def centred(matrix: Array, box: Shape, size: Shape) -> Array:
    """Return the offset with which the centres of box and output meet."""
    offset: Array = (np.array(box) - 1) / 2 - matrix @ ((np.array(size) - 1) / 2)
    return offset


def sampled(
    image: Tensor, label: Tensor, matrix: Array, offset: Array, size: Shape
) -> tuple[Tensor, Tensor]:
    return sampled_with(sample_affine, image, label, matrix, offset, size)


def sampled_with(
    function: Callable[..., None],
    image: Tensor,
    label: Tensor,
    matrix: Array,
    offset: Array,
    size: Shape,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(image.dtype, torch.float32)
    image_out = torch.full((len(image), *size), math.nan, dtype=dtype, device=image.device)
    label_out = torch.full(size, 77, dtype=label.dtype, device=label.device)
    call(function, image, label, matrix, offset, image_out, label_out)
    return image_out, label_out


def call(
    function: Callable[..., None],
    image: Tensor,
    label: Tensor,
    matrix: Array,
    offset: Array,
    *outputs: Tensor,
) -> None:
    rows = tuple(tuple(row) for row in matrix.tolist())
    given = {"matrix": rows, "offset": tuple(offset.tolist())}
    function(image, label, **given, image_out=outputs[0], label_out=outputs[1])
