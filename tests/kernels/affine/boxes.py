"""Boxes of a case, matrices, and functions that sample into new memory."""

import math

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from unet3d.kernels import Boxes, sample_affine
from unet3d.kernels.affine import plain

UNCHANGED = (0, 0, 0, 1)
TURNED = Rotation.from_euler("xyz", [20, -15, 25], degrees=True).as_matrix()
THICK = np.array([[0.9, 0.4, 0.0], [-0.35, 1.1, 0.0], [0.0, 0.0, 1.0]])
MATRICES = {
    "turned": TURNED,
    "turned and larger": TURNED * 0.7,
    "turned and smaller": TURNED @ np.diag([1.4, -1.4, 1.4]),
    "turned in a plane of thick slices": THICK,
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


def case(shape, channels=1, num_classes=4, dtype=torch.float32, label_dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(channels, *shape, generator=generator, dtype=torch.float64).to(dtype)
    coarse = torch.randint(num_classes, [-(-size // 2) for size in shape], generator=generator)
    for axis in range(3):
        coarse = coarse.repeat_interleave(2, axis)
    return image, coarse[: shape[0], : shape[1], : shape[2]].contiguous().to(label_dtype)


def centred(matrix, box, size):
    """Return the offset with which the centres of box and output coincide."""
    return (np.array(box) - 1) / 2 - matrix @ ((np.array(size) - 1) / 2)


def sampled(image, label, matrix, offset, size, function=sample_affine):
    dtype = torch.promote_types(image.dtype, torch.float32)
    image_out = torch.full((len(image), *size), math.nan, dtype=dtype, device=image.device)
    label_out = torch.full(size, 77, dtype=label.dtype, device=label.device)
    call(function, image, label, matrix, offset, image_out, label_out)
    return image_out, label_out


def call(function, image, label, matrix, offset, *outputs, start=(0, 0, 0)):
    """Sample one box, with the function for many boxes or with the function for one."""
    image_out, label_out = outputs
    if function is plain.sample:
        given = rows_of(matrix), tuple(offset.tolist())
        function(image, label, *given, image_out=image_out, label_out=label_out, start=start)
        return
    boxes = boxes_of([(image, label, matrix, offset, [UNCHANGED] * len(image))], start)
    function(boxes, image_out=image_out[None], label_out=label_out[None])


def boxes_of(given, start=(0, 0, 0)):
    """Return boxes of images, labels, matrices, offsets and channels, on the images' device."""
    images, labels, matrices, offsets, channels = zip(*given, strict=True)
    maps = [(rows_of(m), tuple(at.tolist())) for m, at in zip(matrices, offsets, strict=True)]
    boxes = Boxes.of(images, labels, maps, channels, start, (50, 60, 70))
    return boxes._replace(table=boxes.table.to(boxes.images.device))


def rows_of(matrix):
    return tuple(map(tuple, matrix.tolist()))
