"""Sampling of image and labels, against SciPy in float64 and interpolation of each class."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import ndimage
from scipy.spatial.transform import Rotation
from torch import Tensor

from unet3d.kernels.affine.api import sample_affine

Array = npt.NDArray[np.float64]
Shape = tuple[int, int, int]

IDENTITY = np.eye(3)
TURNED = Rotation.from_euler("xyz", [20, -15, 25], degrees=True).as_matrix()
THICK = np.array([[0.9, 0.4, 0.0], [-0.35, 1.1, 0.0], [0.0, 0.0, 1.0]])
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
    dtype = torch.float64 if image.dtype == torch.float64 else torch.float32
    image_out = torch.full((len(image), *size), math.nan, dtype=dtype, device=image.device)
    label_out = torch.full(size, 77, dtype=label.dtype, device=label.device)
    rows = [tuple(row) for row in matrix.tolist()]
    sample_affine(
        image,
        label,
        matrix=(rows[0], rows[1], rows[2]),
        offset=tuple(offset.tolist()),
        image_out=image_out,
        label_out=label_out,
    )
    return image_out, label_out


def linear(volume: Array, matrix: Array, offset: Array, size: Shape) -> Array:
    """Return what SciPy samples, with zeros around the volume."""
    sampled: Array = ndimage.affine_transform(
        volume, matrix, offset, size, order=1, mode="grid-constant", cval=0.0
    )
    return sampled


def shares(label: Tensor, matrix: Array, offset: Array, size: Shape) -> tuple[Array, Array]:
    """Return the classes, 0 first, and how much each has of every voxel."""
    classes = np.union1d([0], label.numpy())
    found = [linear((label.numpy() == k).astype(float), matrix, offset, size) for k in classes]
    found[0] += 1 - np.sum(found, 0)  # around the box
    return classes, np.stack(found)


def check(
    image: Tensor, label: Tensor, matrix: Array, offset: Array, size: Shape, atol: float = 2e-6
) -> None:
    image_out, label_out = sampled(image, label, matrix, offset, size)
    for channel, out in zip(image.double().numpy(), image_out.numpy(), strict=True):
        np.testing.assert_allclose(out, linear(channel, matrix, offset, size), rtol=0, atol=atol)
    classes, parts = shares(label, matrix, offset, size)
    if len(classes) == 1:
        assert torch.equal(label_out, torch.zeros_like(label_out))
        return
    first, second = np.sort(parts, 0)[-2:][::-1]
    clear = first - second > 1e-5
    expected = classes[parts.argmax(0)]
    assert clear.mean() > 0.9 or not clear.any() or np.allclose(matrix.round(2), matrix)
    np.testing.assert_array_equal(label_out.numpy()[clear], expected[clear])


@pytest.mark.parametrize(("box", "size"), SIZES, ids=str)
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES.keys())
def test_image_and_labels_are_interpolated(matrix: Array, box: Shape, size: Shape) -> None:
    image, label = case(box, channels=2)
    check(image, label, matrix, centred(matrix, box, size) + [0.123, -0.2, 0.31], size)
