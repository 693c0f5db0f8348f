"""Intensities that cannot be trained on: not finite, or so large that nothing else counts.

Nothing is repaired here: which number should stand in such a voxel is the user's to say. Images are
refused with the number of their voxels, whatever their scale: one in units of 1e-30 or 1e30 is as
good as any other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.errors import VolumeError

HUGE_RATIO = 1e5
"""Beside a voxel so many times larger, the others look alike. No 16-bit image holds both."""

MAX_HUGE_SHARE = 1e-3
"""A larger share of the voxels that differ from 0 is taken for a part of the picture."""

MIN_OTHERS_SHARE = 0.01
"""Fewer small voxels for each large one are noise around the picture, not the picture."""


def refuse_non_finite(path: Path, array: npt.NDArray[Any]) -> None:
    """Refuse NaN and infinity.

    Args:
        path: The file, for the message.
        array: Its voxels.

    Raises:
        VolumeError: There are some.
    """
    num_wrong = array.size - np.count_nonzero(np.isfinite(array))
    if num_wrong:
        raise VolumeError(
            f"{path} has {num_wrong} voxels of {array.size} that are NaN or infinite; "
            "replace them, for example by 0"
        )


def refuse_huge(path: Path, array: npt.NDArray[np.float32]) -> None:
    """Refuse a channel in which a few voxels, or one value, dwarf all others.

    Such are marks for "no data" (-1e30, the largest float) and damaged bytes: normalised by mean
    and deviation, everything else would become one number. Two kinds of voxels are not taken for
    it: those that are a larger share of the picture and differ among themselves, and others than
    these that are all alike, as in a mask.

    Args:
        path: The file, for the message.
        array: Finite voxels, shape (C, X, Y, Z).

    Raises:
        VolumeError: There are some.
    """
    for channel in array:
        largest = max(float(channel.max()), -float(channel.min()))
        limit = np.float32(largest / HUGE_RATIO)
        magnitudes = np.abs(channel)
        is_small = magnitudes < limit
        num_others = np.count_nonzero(is_small) - np.count_nonzero(channel == 0)
        num_huge = channel.size - np.count_nonzero(is_small)
        if num_others <= num_huge * MIN_OTHERS_SHARE:
            continue
        others = magnitudes[is_small & (channel != 0)]
        if others.min() == others.max():
            continue
        huge = magnitudes[~is_small]
        if num_huge <= MAX_HUGE_SHARE * (num_huge + num_others) or huge.min() == huge.max():
            raise VolumeError(
                f"{path} has {num_huge} voxels of {channel.size} with values up to {largest:.3g}, "
                f"beside which the others, up to {float(others.max()):.3g}, would all look alike; "
                "replace them, for example by 0"
            )
