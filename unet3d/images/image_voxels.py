"""The voxels of an image, which stay as they are stored until some of them are asked for.

A scan of 16-bit numbers takes half of what it would take in float32, and one that is mapped takes
nothing. What depends on the whole image is found piece by piece.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nibabel.volumeutils import apply_read_scaling

from unet3d.config import Shape
from unet3d.images.scratch import forget_pages

PIECE_VOXELS = 2**20
"""Voxels that a thread looks at together."""

SENT_AS_STORED = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int16))
"""Types that are smaller than float32 and known to every device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredChannels:
    """Channels as one file stores them."""

    voxels: npt.NDArray[Any]
    """(C, X, Y, Z) in RAS: a view of what is stored, which nobody may change."""
    slope: float = 1.0
    inter: float = 0.0

    def values(self, index: Any) -> npt.NDArray[np.float32]:
        """Return a part of the voxels, scaled.

        What float32 cannot hold becomes infinite.

        Args:
            index: Of the part, such as slices.
        """
        with np.errstate(all="ignore"):
            values = _scaled(self.voxels[index], self.slope, self.inter)
        forget_pages(self.voxels)
        return values

    def on_device(self, index: Any, device: torch.device) -> torch.Tensor:
        """Return a copy of a part of the voxels, scaled, in float32 on a device.

        Args:
            index: Of the part.
            device: Any.
        """
        if self.voxels.dtype in SENT_AS_STORED and (self.slope, self.inter) == (1.0, 0.0):
            stored = self.voxels[index].copy("K")
            forget_pages(self.voxels)
            return torch.from_numpy(stored).to(device).float()
        values = self.values(index)
        if np.may_share_memory(values, self.voxels):
            values = values.copy("K")
        return torch.from_numpy(values).to(device)


class ImageVoxels:
    """Voxels of all channels, on one grid."""

    def __init__(self, files: Sequence[StoredChannels]) -> None:
        """Take the channels of one or more files.

        Args:
            files: The channels in their order, on one grid.
        """
        self._files = tuple(files)
        self._channels = [
            (file, channel) for file in self._files for channel in range(len(file.voxels))
        ]
        x, y, z = self._files[0].voxels.shape[1:]
        self.shape: Shape = (x, y, z)
        """Voxels along X, Y, Z."""

    @classmethod
    def of(cls, array: npt.NDArray[np.float32]) -> "ImageVoxels":
        """Return the voxels of an array (C, X, Y, Z)."""
        return cls([StoredChannels(voxels=array)])

    @property
    def num_channels(self) -> int:
        """Channels."""
        return len(self._channels)

    @property
    def slowest_axis(self) -> int:
        """Of X, Y, Z, counted from 0, the one along which voxels lie furthest apart in memory."""
        strides = np.abs(self._files[0].voxels.strides[1:])
        return int(np.argmax(np.where(np.array(self.shape) > 1, strides, -1)))

    def cut(self, box: tuple[slice, slice, slice]) -> "ImageVoxels":
        """Return the part in a box, without a copy.

        Args:
            box: What is cut out along X, Y, Z.
        """
        if all(one.indices(n) == (0, n, 1) for one, n in zip(box, self.shape, strict=True)):
            return self
        return ImageVoxels(
            [
                StoredChannels(voxels=one.voxels[:, *box], slope=one.slope, inter=one.inter)
                for one in self._files
            ]
        )

    def viewed(self, view: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "ImageVoxels":
        """Return the same voxels, seen otherwise.

        Args:
            view: Returns a view (C, X', Y', Z') of an array (C, X, Y, Z).
        """
        return ImageVoxels([replace(one, voxels=view(one.voxels)) for one in self._files])

    def on_device(self, axis: int, planes: slice, device: torch.device) -> torch.Tensor:
        """Return some planes of all channels in float32 on a device, to be changed there.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            planes: Which.
            device: It is sent what takes least.

        Returns:
            Shape (C, X, Y, Z), in the order of memory in which they are stored.
        """
        index = (slice(None),) * (1 + axis) + (planes,)
        parts = [file.on_device(index, device) for file in self._files]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def channel(self, number: int) -> "Channel":
        """Return one channel, of which planes are read when they are asked for."""
        return Channel(*self._channels[number])

    def read(self, box: tuple[slice, slice, slice]) -> npt.NDArray[np.float32]:
        """Return a box of all channels, scaled, (C, X, Y, Z), which nobody may change."""
        parts = [file.values((slice(None), *box)) for file in self._files]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def whole(self) -> npt.NDArray[np.float32]:
        """Return all voxels in memory, shape (C, X, Y, Z) and C-contiguous."""
        first = self._files[0]
        if len(self._files) == 1 and _is_ready(first.voxels, first.slope, first.inter):
            return np.ascontiguousarray(first.voxels)
        array = np.empty((self.num_channels, *self.shape), np.float32)
        for piece in self.pieces():
            done = 0
            for file in self._files:
                channels = slice(done, done + len(file.voxels))
                array[(channels, *piece)] = file.values((slice(None), *piece))
                done = channels.stop
        return array

    def pieces(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield the places of pieces that cover the volume, in the order in which it is stored."""
        axis = self.slowest_axis
        of_plane = max(1, math.prod(self.shape) // self.shape[axis])
        num_planes = max(1, PIECE_VOXELS // of_plane)
        for first in range(0, self.shape[axis], num_planes):
            x, y, z = (
                slice(first, min(first + num_planes, n)) if one == axis else slice(0, n)
                for one, n in enumerate(self.shape)
            )
            yield x, y, z


class Channel:
    """One channel of an image, whose planes are read when they are asked for as in an array."""

    def __init__(self, file: StoredChannels, number: int) -> None:
        """Take a channel of a file."""
        self._file = file
        self._number = number
        self.shape = file.voxels.shape[1:]

    def __getitem__(self, index: Any) -> npt.NDArray[np.float32]:
        """Return a part, as an array (X, Y, Z) does."""
        index = index if isinstance(index, tuple) else (index,)
        return self._file.values((self._number, *index))


def _scaled(stored: npt.NDArray[Any], slope: float, inter: float) -> npt.NDArray[np.float32]:
    if _is_ready(stored, slope, inter) and min(stored.strides, default=0) >= 0:
        return stored  # as PyTorch can take it
    if (slope, inter) != (1.0, 0.0):
        stored = apply_read_scaling(np.asarray(stored), slope, inter)
    return np.asarray(stored).astype(np.float32, order="K")


def _is_ready(stored: npt.NDArray[Any], slope: float, inter: float) -> bool:
    is_plain = stored.dtype == np.float32 and (slope, inter) == (1.0, 0.0)
    return is_plain and bool(stored.flags.writeable)
