"""The planes of an image that windows read: prepared just before, and dropped afterwards."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.config import Shape
from unet3d.distributed.group import Group
from unet3d.images.image import Box
from unet3d.inference.windows import Windows
from unet3d.inputs.ahead import ahead
from unet3d.memory.fake_devices import is_gpu
from unet3d.preparation.prepared_image import CPU

PIECE_VOXELS = {"cpu": 2**24, "cuda": 2**25}
"""Most voxels to prepare at once for each kind of device, unless a plane has more."""


Make = Callable[[int, int, int, torch.device], Tensor]
"""Takes an axis, the first plane, the end and a device; returns the planes, (C, X, Y, Z). They are
complete, are computed on that device if possible, and may be on any device."""

Share = Callable[[Callable[[], Tensor] | None, list[int]], Tensor]
"""Takes a function that returns the planes (None in all ranks but the first), and the shape of the
planes; returns the planes in every rank."""


@dataclass(frozen=True, kw_only=True)
class Planes:
    """A prepared image, which is read plane by plane."""

    shape: Shape
    """Voxels along X, Y, Z."""
    num_channels: int
    make: Make | None
    """Returns planes; None: another rank has the image."""
    within: "Callable[[Box], Planes] | None" = None
    """Returns a part of the image; None: only the whole is read."""
    share: Share | None = None
    """Sends planes from the first rank to the others; None: no other rank needs them."""

    @classmethod
    def of(cls, image: Tensor) -> "Planes":
        """Return the planes of a tensor (C, X, Y, Z), on any device."""
        x, y, z = image.shape[1:]

        def make(axis: int, begin: int, end: int, device: torch.device) -> Tensor:
            return image.narrow(1 + axis, begin, end - begin)

        return cls(shape=(x, y, z), num_channels=len(image), make=make)

    def begin(self, axis: int, begin: int, end: int, device: torch.device) -> Callable[[], Tensor]:
        """Begin to make some planes in a thread, and return a function that waits for them."""
        made, make, share = None, self.make, self.share
        if make is not None:
            made = ahead(lambda: make(axis, begin, end, device)).result
        if share is not None:
            size = [self.num_channels, *self.shape]
            size[1 + axis] = end - begin
            return lambda: share(made, size)
        assert made is not None
        return made


def sharing(group: Group, messages: dist.ProcessGroup, device: torch.device) -> Share:
    """Return a function that sends planes from the first rank to all, to ``device`` in this rank.

    Only the first rank reads and prepares the image. All ranks request the same planes in the same
    order. The main thread sends them between windows, because messages of several threads could
    have a different order in each rank.
    """

    def share(made: Callable[[], Tensor] | None, size: list[int]) -> Tensor:
        planes = torch.empty(size, device=device)
        if made is not None:
            own = made()
            _keep_until_read(own)
            planes.copy_(own)
        with group.translate_dist_errors(), group.watching(device):
            dist.broadcast(planes, 0, group=messages)
        return planes

    return share


class ImageSlab:
    """Cuts windows, in order, from the planes of an image that they cover.

    The next planes are prepared while windows of the current ones are computed.
    """

    def __init__(
        self,
        image: Planes,
        windows: Windows,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        """Begin before the first window, with the network's ``dtype``.

        Windows are cut on ``device``, ideally the one that computes them: then each voxel is sent
        once, although it is in several windows.
        """
        self.dtype = dtype
        self._image = image
        self._windows = windows
        self._first = 0
        """Index in the padded volume of the first plane in memory."""
        size = (image.num_channels, *windows.slab)
        self._planes = torch.zeros(size, dtype=dtype, device=device)
        self._missing = deque(_pieces(windows, PIECE_VOXELS["cuda" if is_gpu(device) else "cpu"]))
        """Ranges of planes of the padded volume that are still to be made, in order."""
        self._ahead: Callable[[], Tensor] | None = self._begun()
        """Waits for the first range, which is being made; None: all are made."""

    def cut(self, starts: list[tuple[int, ...]]) -> Tensor:
        """Return the windows (N, C, X, Y, Z) with the given first voxels.

        Outside the image, voxels are 0, the mean of a prepared image. Calls must not go backward
        along the axis.
        """
        windows = self._windows
        axis = windows.axis
        begin, end = starts[0][axis], starts[-1][axis] + windows.shape[axis]
        if begin > self._first:
            drop_planes(self._planes, 1 + axis, begin - self._first)
            self._first = begin
        self._fill(end)
        cut = [self._planes[(slice(None), *windows.place(start, self._first))] for start in starts]
        # A single window is the whole volume, and needs no copy.
        return torch.stack(cut) if len(windows.starts) > 1 else cut[0].unsqueeze(0)

    def _fill(self, end: int) -> None:
        """Make the planes before ``end`` that are missing."""
        axis = self._windows.axis
        place = list(self._windows.inside)
        while self._missing and self._missing[0][0] < end:
            begun, self._ahead = self._ahead, None
            assert begun is not None  # ranges are missing
            first, behind = self._missing.popleft()
            place[axis] = slice(first - self._first, behind - self._first)
            made = begun()
            _keep_until_read(made)
            self._planes[(slice(None), *place)] = made
            del begun, made
            if self._missing:
                self._ahead = self._begun()

    def _begun(self) -> Callable[[], Tensor]:
        """Begin to make the next planes."""
        axis = self._windows.axis
        start = self._windows.inside[axis].start
        first, behind = (plane - start for plane in self._missing[0])
        return self._image.begin(axis, first, behind, self._planes.device)


def _keep_until_read(planes: Tensor) -> None:
    """Keep the memory of planes until the current stream has read them."""
    if planes.is_cuda:
        planes.record_stream(torch.cuda.current_stream(planes.device))


def _pieces(windows: Windows, most_voxels: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of planes of the padded volume to make at once; together they are the image."""
    axis = windows.axis
    along, reach = windows.inside[axis], windows.shape[axis]
    most = max(1, most_voxels * windows.size[axis] // math.prod(windows.size))
    first = along.start
    for batch in windows.batches():
        end = min(batch[-1][axis] + reach, along.stop)
        while first < end:
            behind = min(first + most, end)
            yield first, behind
            first = behind


def drop_planes(tensor: Tensor, dim: int, number: int) -> None:
    """Move the planes after the first ``number`` along ``dim`` to the front; set the last to 0."""
    kept = tensor.shape[dim] - number
    for first in range(0, kept, number):  # in pieces that do not overlap their target
        length = min(number, kept - first)
        moved = tensor.narrow(dim, first + number, length)
        tensor.narrow(dim, first, length).copy_(moved)
    tensor.narrow(dim, kept, number).zero_()
