"""An image: a lazy array (C, X, Y, Z) with a geometry; its channels may be in several files.

Voxels keep their stored type until they are read. So a scan of 16-bit numbers takes half the memory
of float32, and a mapped file takes none.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.volumeutils import apply_read_scaling

from unet3d.config import Shape
from unet3d.errors import VolumeError
from unet3d.images.files import DICOM, SUFFIXES, format_of, module_of, times
from unet3d.images.geometry import (
    ONE_GRID,
    Geometry,
    Orientation,
    axes_between,
    same_grid,
    with_spacing_of,
)
from unet3d.images.memory_limits import KEPT_BYTES, explaining_memory
from unet3d.images.scratch import Scratch
from unet3d.images.source import AS_STATED, Reading, Source

if TYPE_CHECKING:
    import torch

Box = tuple[slice, slice, slice]
"""A part of an image along X, Y, Z, without negative ends or steps."""

PIECE_VOXELS = 2**20
"""About how many voxels of a channel :meth:`Image.pieces` puts into one box."""

SENT_AS_STORED = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.int16))
"""Types that are copied to a device unconverted: smaller than float32, and known to PyTorch."""


def open_source(path: Path, reading: Reading = AS_STATED) -> Source:
    """Open a file or a folder, such as of DICOM slices: its header is read, not its voxels."""
    format_ = format_of(path)
    if format_ is not None:
        source: Source = module_of(format_).open_file(path, reading)
        source.reading = reading
        return source
    if not os.path.exists(path):  # pathlib would raise for a long name
        raise VolumeError(f"there is no file or folder {path}; name a volume")
    if module_of(DICOM).is_dicom_file(path):
        raise VolumeError(
            f"{path} is one DICOM file; name the folder that holds all slices of its series"
        )
    raise VolumeError(
        f"{path} has no known file ending; known: {', '.join(SUFFIXES)}, and folders of DICOM or "
        "TIFF slices"
    )


def open_image(
    paths: Path | Sequence[Path], scratch: Scratch | None = None, reading: Reading = AS_STATED
) -> "Image":
    """Open an image whose channels are in one file or in several; voxels are read on demand.

    Compressed voxels are unpacked to ``scratch``, by default in memory. Raises VolumeError if a
    file is missing, damaged, of an unsupported kind, or not on the grid of the first.
    """
    files = [paths] if isinstance(paths, Path) else paths
    sources = [open_source(path, reading) for path in files]
    for source in sources:
        source.scratch = scratch or Scratch()
    return image_of(sources)


def image_of(sources: Sequence[Source], as_stored: bool = False) -> "Image":
    """Return the image with all channels of sources, in their order; they must share one grid.

    Its axes are in RAS or, with ``as_stored``, the axes of the first file.
    """
    first = sources[0].geometry
    for source in sources[1:]:
        first = with_spacing_of(first, source.geometry)
    target = first.as_stored() if as_stored else first
    channels = []
    for source in sources:
        disagreement = same_grid(first, source.geometry)
        if disagreement:
            where = f"not on the grid of {first.path}"
            raise VolumeError(f"{source.path} is {where}: {disagreement}; {ONE_GRID}")
        turn = axes_between(source.geometry.as_stored().affine, target.affine)
        numbers = range(source.geometry.num_channels)
        channels += [_Channel(source, number, turn) for number in numbers]
    return Image(channels, replace(target, num_channels=len(channels)), (0, 0, 0))


@dataclass(frozen=True, eq=False)
class _Channel:
    """A channel of a source, and how the axes of the file become those of the image."""

    source: Source
    number: int
    orientation: Orientation

    @property
    def chunk(self) -> Shape | None:
        """Voxels along X, Y, Z of the chunks of the file; None: it has none."""
        chunk = getattr(self.source.voxels(), "chunks", None)
        if chunk is None:
            return None
        x, y, z = (chunk[int(place)] for place in np.argsort(self.orientation[:, 0]))
        return x, y, z

    def stored(self, box: Box) -> npt.NDArray[Any]:
        """Return the stored, unscaled numbers in a box of the whole image, (X, Y, Z)."""
        voxels = self.source.voxels()
        index: list[slice] = []
        for (axis, sign), size in zip(self.orientation, voxels.shape, strict=False):
            part = box[int(axis)]
            index.append(part if sign > 0 else slice(size - part.stop, size - part.start))
        found = np.asarray(voxels[(*index, slice(self.number, self.number + 1))])[..., 0]
        view: npt.NDArray[Any] = nib.apply_orientation(found, self.orientation)
        return view

    def read(self, box: Box) -> npt.NDArray[np.float32]:
        """Return the intensities in a box of the whole image, (X, Y, Z)."""
        stored = values = self.stored(box)
        is_ready = stored.dtype == np.float32 and not self.source.is_scaled
        # PyTorch needs arrays that are writeable and have no negative strides.
        if not (is_ready and stored.flags.writeable and min(stored.strides) > 0):
            with np.errstate(all="ignore"):
                if self.source.is_scaled:
                    stored = apply_read_scaling(stored, self.source.slope, self.source.inter)
                values = stored.astype(np.float32, order="K")
        self.source.forget()
        return values


class Image:
    """A lazy array (C, X, Y, Z) of float32 in RAS, with a geometry.

    ``shape`` is the shape of the array, ``geometry`` has the affine and the spacing in mm.
    """

    def __init__(self, channels: Sequence[_Channel], geometry: Geometry, start: Shape) -> None:
        self._channels = tuple(channels)
        self._sources = tuple({one.source: None for one in channels})
        self._start = start  # first voxel of this part in the whole image
        self.geometry = geometry
        self.shape = (geometry.num_channels, *geometry.shape)

    def channels_in_other_order(self, wanted: Sequence[str]) -> list[str]:
        """Return the names of channels that files state, if only their order is not as wanted."""
        names = [name for source in self._sources for name in source.channel_names]
        return names if names != [*wanted] and sorted(names) == sorted(wanted) else []

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return self.shape[0]

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return [source.path for source in self._sources]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds the stored numbers of every channel."""
        return np.result_type(*[source.dtype for source in self._sources])

    @property
    def unpacked_bytes(self) -> int:
        """Size in bytes of voxels from compressed files, once unpacked."""
        return sum(source.unpacked_bytes for source in self._sources)

    def load(self) -> None:
        """Unpack compressed voxels now."""
        for source in self._sources:
            source.voxels()

    def read(self, box: Box | None = None, channel: int | None = None) -> npt.NDArray[np.float32]:
        """Return a box along X, Y, Z of all channels or of one, scaled, (C, X, Y, Z).

        The result has the memory order of the file, and must not be changed. Values beyond the
        range of float32 become infinite. Raises VolumeError if a file is damaged or memory is too
        small.
        """
        place = self._placed(box)
        channels = self._channels if channel is None else [self._channels[channel]]
        parts = [one.read(place) for one in channels]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    def stored(self, box: Box, channel: int | None = None) -> npt.NDArray[Any]:
        """Return a box of all channels or of one as the numbers that are stored, (X, Y, Z, C)."""
        place = self._placed(box)
        channels = self._channels if channel is None else [self._channels[channel]]
        parts = [one.stored(place) for one in channels]
        found = parts[0][..., None] if len(parts) == 1 else np.stack(parts, axis=-1)
        for source in self._sources:
            source.forget()
        return found

    def whole(self) -> npt.NDArray[np.float32]:
        """Return all voxels in memory, (C, X, Y, Z) and C-contiguous."""
        self.load()
        what = f"{self.geometry.path}: reading {times((*self.shape[1:], self.num_channels))} voxels"
        with explaining_memory(f"cannot read {self.geometry.path}"):
            array = Scratch().empty(self.shape, np.float32, what)
            for piece in self.pieces():
                array[:, *piece] = self.read(piece)
        return array

    def on_device(self, box: Box, device: "torch.device") -> "torch.Tensor":
        """Return a copy of a box on a device, float32 (C, X, Y, Z), in the file's memory order.

        Small stored types are converted on the device, so that fewer bytes are copied to it.
        """
        import torch  # not at the top, so that commands that only read headers start at once

        box = self._placed(box)
        parts = []
        for one in self._channels:
            if one.source.dtype in SENT_AS_STORED and not one.source.is_scaled:
                values = one.stored(box).copy("K")
                one.source.forget()
            else:
                values = one.read(box)
                values = values if values.base is None else values.copy("K")
            parts.append(torch.from_numpy(values).to(device).float())
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def cut(self, box: Box) -> "Image":
        """Return the part in a box as an image, with the same axes; no voxels are read."""
        placed = self._placed(box)
        if placed == self._placed(None):
            return self
        x, y, z = (part.start for part in placed)
        shape = tuple(part.stop - part.start for part in placed)
        affine = self.geometry.affine.copy()
        affine[:3, 3] += affine[:3, :3] @ np.subtract((x, y, z), self._start)
        geometry = replace(self.geometry, shape=shape, affine=affine)
        return Image(self._channels, geometry, (x, y, z))

    @property
    def levels(self) -> tuple[Shape, ...]:
        """Voxels along X, Y, Z of each level of a pyramid, the finest first; else empty."""
        first, *others = (source.levels for source in self._sources)
        return first if all(one == first for one in others) else ()

    def at_level(self, level: int) -> "Image":
        """Open another level of a pyramid, cut to the part that this image is."""
        readings = [one.reading.model_copy(update={"level": level}) for one in self._sources]
        found = image_of(list(map(open_source, self.paths, readings)))
        whole = self._sources[0].geometry.shape
        begins = zip(self._start, self.shape[1:], whole, found.shape[1:], strict=True)
        x, y, z = (
            slice(start * new // old, -((start + size) * new // -old))
            for start, size, old, new in begins
        )
        return found.cut((x, y, z))

    def as_stored(self) -> "Image":
        """Return the whole image, even if this is a part, with its first file's axes as X, Y, Z."""
        return image_of(self._sources, as_stored=True)

    @property
    def slowest_axis(self) -> int:
        """Axis (0, 1, 2) along which voxels lie furthest apart in memory."""
        sizes = zip(self._start, self.shape[1:], strict=True)
        # Two voxels along each axis, because a format may copy what is read.
        x, y, z = (slice(start, start + min(2, size)) for start, size in sizes)
        strides = np.abs(self._channels[0].stored((x, y, z)).strides)
        return int(np.argmax(np.where(np.array(self.shape[1:]) > 1, strides, -1)))

    def pieces(self) -> Iterator[Box]:
        """Yield boxes that cover the image: of whole planes in the memory order of its file.

        Of an image in chunks, they are whole chunks or, one after the other, the planes of a large
        chunk, so that each chunk is unpacked once. If files have chunks of different sizes, that
        holds for all of them unless boxes of whole chunks would be too large, else for the first.
        """
        chunks = [one.chunk for one in self._channels if one.chunk is not None]
        if chunks:
            x, y, z = (math.lcm(*sides) for sides in zip(*chunks, strict=True))
            num_bytes = math.prod(map(min, (x, y, z), self.shape[1:])) * self.dtype.itemsize
            yield from self._boxes_of_chunks((x, y, z) if num_bytes <= KEPT_BYTES else chunks[0])
            return
        axis, shape = self.slowest_axis, self.shape[1:]
        num_planes = max(1, PIECE_VOXELS // max(1, math.prod(shape) // shape[axis]))
        for first in range(0, shape[axis], num_planes):
            yield self.planes(axis, slice(first, min(first + num_planes, shape[axis])))

    def _boxes_of_chunks(self, chunk: Shape) -> Iterator[Box]:
        sides, parts = list(chunk), []
        for axis, (start, size) in enumerate(zip(self._start, self.shape[1:], strict=True)):
            # Several small chunks make one box.
            most = min(PIECE_VOXELS // math.prod(sides), -(-size // chunk[axis]))
            sides[axis] = side = chunk[axis] * max(1, most)
            ends = [0, *range(side - start % side, size, side), size]
            parts.append([slice(*pair) for pair in itertools.pairwise(ends)])
        num_planes = max(1, 2 * PIECE_VOXELS // (sides[0] * sides[1]))
        for z, y, x in itertools.product(*reversed(parts)):
            for first in range(z.start, z.stop, num_planes):
                yield x, y, slice(first, min(first + num_planes, z.stop))

    def layer_bytes(self, axis: int) -> int:
        """Return the bytes of unpacked chunks that stay in memory while planes are read."""
        found = 0
        for one in self._channels:
            if one.chunk is not None:
                sides = [*self.shape[1:]]
                sides[axis] = min(sides[axis], one.chunk[axis])
                num_bytes = math.prod(sides) * one.source.dtype.itemsize
                found += num_bytes if num_bytes <= KEPT_BYTES else 0
        return min(found, len(self._sources) * KEPT_BYTES)

    def planes(self, axis: int, planes: slice) -> Box:
        """Return the box of consecutive planes along an axis."""
        x, y, z = (
            planes if one == axis else slice(0, size) for one, size in enumerate(self.shape[1:])
        )
        return x, y, z

    def plane(self, axis: int, index: int) -> npt.NDArray[np.float32]:
        """Return one plane of the first channel, with the other two axes in order."""
        part = self.read(self.planes(axis, slice(index, index + 1)), 0)
        return part.squeeze((0, axis + 1))

    def _placed(self, box: Box | None) -> Box:
        """Return where a box of this part lies in the whole image."""
        parts = zip(box or (slice(None),) * 3, self.shape[1:], strict=True)
        ends = [part.indices(size) for part, size in parts]
        x, y, z = (
            slice(start + begin, start + end)
            for start, (begin, end, _) in zip(self._start, ends, strict=True)
        )
        return x, y, z
