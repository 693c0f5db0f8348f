"""The orders and directions of a file's axes."""

import itertools

import nibabel as nib
import numpy as np
import numpy.typing as npt

ORIENTATIONS = [
    "".join(codes)
    for axes in itertools.permutations(("RL", "AP", "SI"))
    for codes in itertools.product(*axes)
]


def turn_to(codes: str, affine: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
    """Return the argument of nibabel's ``as_reoriented`` or ``apply_orientation`` for new axes.

    Args:
        codes: Directions of the new stored axes, such as RAS.
        affine: The affine of the image to reorient; None: its axes are RAS.
    """
    wanted = nib.orientations.axcodes2ornt(tuple(codes))
    now = nib.io_orientation(np.eye(4) if affine is None else affine)
    turn: npt.NDArray[np.float64] = nib.orientations.ornt_transform(now, wanted)
    return turn
