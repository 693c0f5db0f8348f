"""The voxels of a volume as its file stores them: mapped, unpacked, or in memory already."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from unet3d.images.inflating import unpack
from unet3d.images.scratch import Scratch

Order = Literal["C", "F"]

Unpacked = Callable[[npt.NDArray[Any]], object]
"""Is shown the voxels of a file as they come, in their order."""


class StoredVoxels(Protocol):
    """Voxels that can be had."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along each axis, in Python's integers, which do not overflow."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their type."""
        ...

    @property
    def slope(self) -> float:
        """What stored numbers are multiplied with."""
        ...

    @property
    def inter(self) -> float:
        """What is added then."""
        ...

    @property
    def offset(self) -> int:
        """The byte with which they begin, in the file or in what is unpacked."""
        ...

    @property
    def is_mapped(self) -> bool:
        """Whether they stay in their file until they are looked at."""
        ...

    def read(self, scratch: Scratch, what: str) -> npt.NDArray[Any]:
        """Return them as they are stored, not scaled; nobody may change them.

        Args:
            scratch: Where they go, unless they are there.
            what: What is done; begins messages.

        Raises:
            VolumeError: They have no place, or are not what the header claims.
            OSError: The file cannot be read.
            Exception: Whatever a damaged file raises.
        """
        ...


class HeldVoxels:
    """Voxels in memory."""

    slope, inter, offset, is_mapped = 1.0, 0.0, 0, True

    def __init__(self, voxels: npt.NDArray[Any]) -> None:
        """Take them."""
        self._voxels = voxels
        self.shape = voxels.shape
        self.dtype = voxels.dtype

    def read(self, scratch: Scratch, what: str) -> npt.NDArray[Any]:
        """Return them."""
        return self._voxels


class FileVoxels:
    """Voxels in a part of a file, whole or packed by gzip or zlib."""

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        *,
        offset: int = 0,
        order: Order = "F",
        slope: float = 1.0,
        inter: float = 0.0,
        is_packed: bool = False,
        packed_from: int = 0,
        max_tail_bytes: int = 0,
    ) -> None:
        """Say where they are.

        Args:
            path: The file.
            shape: Voxels along each axis.
            dtype: Their type.
            offset: The byte with which they begin, in the file or in what is unpacked.
            order: Whether the first axis runs fastest (``F``) or the last one.
            slope: What stored numbers are multiplied with.
            inter: What is added then.
            is_packed: Whether they are packed.
            packed_from: The byte of the file with which packed data begins.
            max_tail_bytes: What may follow packed voxels.
        """
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self.offset = offset
        self.order: Order = order
        self.slope = slope
        self.inter = inter
        self.is_packed = is_packed
        self._packed_from = packed_from
        self._max_tail_bytes = max_tail_bytes

    @property
    def is_mapped(self) -> bool:
        """Whether they stay in their file until they are looked at."""
        return not self.is_packed

    def read(self, scratch: Scratch, what: str) -> npt.NDArray[Any]:
        """Map or unpack them."""
        if not self.is_packed:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, self.order)
        voxels = scratch.empty(self.shape, self.dtype, what, self.order)
        flat = voxels.reshape(math.prod(self.shape), order=self.order)
        unpack(
            self.path,
            memoryview(flat.view(np.uint8).data),
            start=self._packed_from,
            skip=self.offset,
            max_tail_bytes=self._max_tail_bytes,
        )
        return voxels
