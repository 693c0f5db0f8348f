"""Label maps on another voxel grid."""

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import Shape
from unet3d.preparation.interpolation import interpolated, line_matrix


def resample_classes(
    classes: npt.NDArray[np.unsignedinteger], shape: Shape
) -> npt.NDArray[np.unsignedinteger]:
    """Resample class indices: each class linearly as a mask of its own; the strongest one wins.

    No index arises that was not there. Interpolating the indices themselves would put class 2
    between classes 1 and 3; taking the nearest would leave stairs.

    Args:
        classes: Class indices, shape (X, Y, Z).
        shape: Voxels along X, Y, Z of the result.
    """
    if classes.shape == shape:
        return classes
    from scipy import ndimage

    matrices = [
        line_matrix(size, new_size, order=1)
        for size, new_size in zip(classes.shape, shape, strict=True)
    ]
    changed = [axis for axis in range(3) if classes.shape[axis] != shape[axis]]
    result = np.zeros(shape, classes.dtype)
    background = torch.from_numpy((classes == 0).astype(np.float32))
    strongest = interpolated(background, {axis: matrices[axis] for axis in changed}).numpy()
    for index, box in enumerate(ndimage.find_objects(classes), start=1):
        if box is None:
            continue
        # Only the box of the class, and the part of the new grid that it reaches, can change.
        inner = [matrix[:, axis] for matrix, axis in zip(matrices, box, strict=True)]
        rows = [torch.nonzero(matrix.any(dim=1)).flatten().tolist() for matrix in inner]
        if not all(rows):
            continue
        reach = tuple(slice(row[0], row[-1] + 1) for row in rows)
        mask = torch.from_numpy((classes[box] == index).astype(np.float32))
        strength = interpolated(mask, {axis: inner[axis][reach[axis]] for axis in changed}).numpy()
        wins = strength > strongest[reach]
        result[reach][wins] = index
        strongest[reach][wins] = strength[wins]
    return result
