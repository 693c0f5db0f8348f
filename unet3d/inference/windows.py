"""The windows of a volume: positions, number per forward pass, and memory.

Windows of one size cover the volume so that neighbours overlap and the last one ends at the
volume's edge. Their logits are averaged with a Gaussian weight, because a network is least certain
of the voxels at the edge of its window (nnU-Net, arXiv 1904.08128)::

    |-----window 0-----|
              |-----window 1-----|
                        |-----window 2-----|     starts are spread evenly
    |===============volume=================|
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.images.files import times
from unet3d.images.image import Box
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.memory.fake_devices import is_gpu
from unet3d.memory.host import shortage
from unet3d.model import Topology
from unet3d.preparation.prepared_image import whole_box
from unet3d.runs.checkpoint import Checkpoint

MOST_WINDOWS = 2**21
"""Most windows of a volume, enough for 4096^3 voxels in windows of 64^3, and few enough to list."""

Window = Shape | Literal["whole"]
"""Voxels along X, Y, Z of a window, or the whole volume at once."""

SIGMA = 1 / 8
"""Standard deviation of the Gaussian weight, in windows."""

CPU_VOXELS = 2**20
"""Voxels of the windows that a CPU computes at once. Small windows are slower one by one: with 4
and 8 channels, a window of 16^3 takes 2.7 ms alone and 0.4 ms in a batch of 64; with 32 to 320
channels, one of 64^3 takes 172 ms alone and 153 ms in a batch of 4. Larger batches gain nothing
(docs/results/training.md)."""

GPU_VOXELS = 2**23
"""Voxels of the windows that a GPU computes at once, if it has the memory. On an H200, 588 windows
of 128^3 took 5.1 s one by one, 3.3 s in pairs and 2.7 s four at a time."""

GPU_SHARE = 1 / 4
"""Share of the free memory of a GPU that a batch of windows may take."""

MAPS_OF_FINEST_LEVEL = 3
"""Feature maps of full resolution in memory at once: skip, upsampled map, and their result."""

BFLOAT16_BYTES = 2


def window_of(network: Checkpoint) -> Window:
    """Return the size of a network's windows: as set, as its patches, or the whole volume."""
    window = network.config.inference.window
    return (network.patch_size if window == "auto" else window) or "whole"


def computed_window(wanted: Sequence[int], strides: Shape) -> Shape:
    """Return a window's size, rounded up to multiples of the network's total strides."""
    x, y, z = (math.ceil(w / stride) * stride for w, stride in zip(wanted, strides, strict=True))
    # If the lowest level were one voxel, instance norm would not be defined.
    return (2 * x, 2 * y, 2 * z) if (x, y, z) == strides else (x, y, z)


def window_starts(size: int, window: int, overlap: float, evenly: bool = True) -> list[int]:
    """Return where windows start along one axis; the last one ends at the edge.

    Neighbours overlap by at least the share ``overlap`` of a window, minus a voxel for rounding.
    Windows are spread evenly, or in steps that do not depend on the size of the volume. Then steps
    of 64 voxels fit into blocks of 512, and fewer windows reach into two blocks.
    """
    num_steps = _num_windows(size, window, overlap) - 1
    if not evenly:
        step = max(1, int(window * (1 - overlap) + 1e-6))
        return [*range(0, size - window, step), size - window]
    spread = (size - window) / max(1, num_steps)
    return [round(i * spread) for i in range(num_steps + 1)]


def _num_windows(size: int, window: int, overlap: float) -> int:
    farthest = max(1.0, window * (1 - overlap))
    # In floating point, 20 * (1 - 0.9) is just below 2; that must not add a window.
    return 1 + math.ceil((size - window) / farthest - 1e-6)


def line_weight(voxels: int) -> Tensor:
    """Return the weights along one axis of a window, in float64: 1 at the centre and never 0.

    The centre is a voxel, as in nnU-Net: with an even number, the first of the upper half.
    """
    distance = torch.arange(voxels, dtype=torch.float64) - voxels // 2
    return torch.exp(-0.5 * (distance / (voxels * SIGMA)) ** 2)


def product(lines: Sequence[Tensor]) -> Tensor:
    """Return the outer product (X, Y, Z) of weights along each axis."""
    x, y, z = lines
    return x[:, None, None] * y[:, None] * z  # not einsum, which a GPU may compute in TF32


def gaussian_weight(window: Shape) -> Tensor:
    """Return the weight of each voxel of a window (X, Y, Z)."""
    # In a corner it is 4e-11, enough in float32 even if only one window covers the corner.
    return product([line_weight(voxels) for voxels in window]).float()


def longest_axis(size: Sequence[int]) -> int:
    """Return the axis along which a volume is finished slab by slab: its slabs are smallest."""
    # Of equal axes the last: it is the slowest in most files, so its planes are contiguous.
    return max(range(3), key=lambda axis: (size[axis], axis))


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of one volume, in the order in which they are computed.

    For a block of a large volume, "the volume" is the part that all windows cover which reach into
    the block.
    """

    size: Shape
    """Voxels along X, Y, Z of the volume, padded to at least one window."""
    inside: tuple[slice, ...]
    """Where the volume is in the padded volume: centred."""
    part: Box
    """The volume as a part of the whole one."""
    axis: int
    """The volume's longest axis; windows are ordered by their starts along it."""
    shape: Shape
    """Voxels of each window."""
    starts: list[tuple[int, ...]]
    """First voxel of each window in the padded volume, along X, Y, Z."""
    batch_size: int
    """Windows per forward pass."""
    keeps_rows: bool = False
    """Whether all windows of a forward pass begin at one plane, if enough windows do. The slab that
    they cover is then no longer than a window."""
    is_block: bool = False
    """Whether there may be other windows outside, so that each needs its weights."""

    @classmethod
    def of(
        cls,
        size: Shape,
        topology: Topology,
        window: Window,
        overlap: float,
        batch_size: int | Literal["auto"],
        devices: Sequence[torch.device],
        voxel_bytes: int | None = None,
        free_bytes: int | None = None,
        block: Box | None = None,
    ) -> Self:
        """Return the windows that cover a prepared image; VolumeError if they are too many.

        Neighbours cover at least a share ``overlap`` of one another. :func:`windows_at_a_time`
        chooses a ``batch_size`` of ``auto`` for the network's devices. With a ``block``, only the
        windows that reach into it are returned, whose positions do not depend on the block.
        """
        shape = computed_window(size if window == "whole" else window, topology.total_stride)
        padded = [max(n, w) for n, w in zip(size, shape, strict=True)]
        before = [(most - n) // 2 for most, n in zip(padded, size, strict=True)]
        numbers = [_num_windows(n, w, overlap) for n, w in zip(padded, shape, strict=True)]
        number = max(numbers) if block else math.prod(numbers)
        if number > MOST_WINDOWS:
            raise VolumeError(
                f"{times(size)} voxels need {number:.3g} windows of {times(shape)}, but at most "
                f"{MOST_WINDOWS} are allowed; check the spacing in the header, or take larger "
                "windows (--window) or a smaller --overlap"
            )
        starts: list[list[int]] = []
        for n, w, first, wanted in zip(
            padded, shape, before, block or whole_box(size), strict=True
        ):
            begin, end = wanted.start + first, wanted.stop + first
            line = window_starts(n, w, overlap, evenly=block is None)
            starts.append([start for start in line if begin < start + w and start < end])
        axis = longest_axis(size)
        order = (axis, *(other for other in range(3) if other != axis))
        origin = [line[0] for line in starts]
        x, y, z = (line[-1] + w - line[0] for line, w in zip(starts, shape, strict=True))
        part = tuple(
            slice(max(0, start - first), min(n, start + reach - first))
            for start, reach, n, first in zip(origin, (x, y, z), size, before, strict=True)
        )
        return cls(
            size=(x, y, z),
            inside=tuple(
                slice(one.start + first - start, one.stop + first - start)
                for one, first, start in zip(part, before, origin, strict=True)
            ),
            part=(part[0], part[1], part[2]),
            axis=axis,
            shape=shape,
            starts=[
                tuple(start[order.index(one)] - origin[one] for one in range(3))
                for start in itertools.product(*(starts[one] for one in order))
            ],
            batch_size=windows_at_a_time(shape, devices, voxel_bytes, free_bytes)
            if batch_size == "auto"
            else batch_size,
            # A GPU has memory for a longer slab, and is less efficient with small batches.
            keeps_rows=not any(is_gpu(device) for device in devices),
            is_block=block is not None,
        )

    def summed_weights(self) -> list[Tensor]:
        """Return the sums of the weights of all windows along each axis, in float64.

        Windows lie on a grid and weights are products, so the sum in a voxel is the product of the
        sums along the three axes.
        """
        lines = []
        for axis, (size, voxels) in enumerate(zip(self.size, self.shape, strict=True)):
            line, weight = torch.zeros(size, dtype=torch.float64), line_weight(voxels)
            for first in sorted({start[axis] for start in self.starts}):
                line[first : first + voxels] += weight
            lines.append(line)
        return lines

    @property
    def slab(self) -> Shape:
        """Voxels along X, Y, Z of the largest slab that one batch of windows reaches."""
        reach = self.shape[self.axis] + max(
            batch[-1][self.axis] - batch[0][self.axis] for batch in self.batches()
        )
        x, y, z = (reach if axis == self.axis else n for axis, n in enumerate(self.size))
        return (x, y, z)

    def batches(self) -> Iterator[list[tuple[int, ...]]]:
        """Yield the starts of the windows of each forward pass."""
        rows = [list(row) for _, row in itertools.groupby(self.starts, lambda one: one[self.axis])]
        if not self.keeps_rows or len(rows[0]) < self.batch_size:
            rows = [self.starts]
        for row in rows:
            for first in range(0, len(row), self.batch_size):
                yield row[first : first + self.batch_size]

    def place(self, start: tuple[int, ...], first: int = 0) -> tuple[slice, ...]:
        """Return the box of a window with a given first voxel, relative to plane ``first``."""
        begins = (begin - first if axis == self.axis else begin for axis, begin in enumerate(start))
        return tuple(slice(a, a + n) for a, n in zip(begins, self.shape, strict=True))


def bytes_of_maps(topology: Topology) -> int:
    """Return the bytes of bfloat16 feature maps per voxel of a window in a forward pass."""
    return MAPS_OF_FINEST_LEVEL * topology.channels[0] * BFLOAT16_BYTES


def bytes_of_voxel(network: Checkpoint, num_replicas: int = 1) -> int:
    """Return the GPU bytes per voxel of a window in a forward pass: maps and logits.

    The logits of several replicas are joined; the logits of mirror images are added up.
    """
    topology = network.topology
    # The logits of all replicas, as they arrive and joined.
    num_logits = 2 * num_replicas if num_replicas > 1 else 1
    logits = num_logits * BFLOAT16_BYTES + network.dtype.itemsize
    if network.mirrored_axes:  # the sum, and the logits of a mirror image, flipped back
        logits += FLOAT32_BYTES + BFLOAT16_BYTES
    return bytes_of_maps(topology) + topology.num_classes * logits


def windows_at_a_time(
    window: Shape,
    devices: Sequence[torch.device],
    voxel_bytes: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Return the best number of windows per forward pass on a network's devices.

    On GPUs it is 1 if ``voxel_bytes``, the memory per voxel, is None, as when ranks do not know
    each other's free memory. ``free_bytes`` is the free memory of each GPU; None: it is measured.
    """
    voxels = math.prod(window)
    gpus = [device for device in devices if is_gpu(device)]
    if not gpus:
        return max(1, CPU_VOXELS // voxels)
    if voxel_bytes is None:
        return 1
    if free_bytes is None:
        free_bytes = min(torch.cuda.mem_get_info(device)[0] for device in gpus)
    return max(1, min(GPU_VOXELS, int(free_bytes * GPU_SHARE) // voxel_bytes) // voxels)


def with_room(device: torch.device, needed_bytes: int, share: float) -> torch.device:
    """Return a device, or the CPU if the bytes exceed a share of the free memory of a GPU."""
    if device.type == "cuda" and needed_bytes > share * torch.cuda.mem_get_info(device)[0]:
        return torch.device("cpu")
    return device


def bytes_of_image(network: Checkpoint, slab: Shape) -> int:
    """Return the bytes of a slab of a prepared image."""
    return network.topology.in_channels * math.prod(slab) * network.dtype.itemsize


def refuse_beyond_host(network: Checkpoint, windows: Windows, num_computing: int) -> None:
    """Raise DoesNotFitError if the host lacks memory for windows.

    Windows need a slab of the image and, if a CPU computes them, maps and logits. ``num_computing``
    ranks of this host compute each window together; 0: GPUs compute. Without this check, Linux
    would grant the memory, and kill this process once it is used.
    """
    needed = bytes_of_image(network, windows.slab)
    if num_computing:
        # Each rank has all logits for a moment, but only a slab of the maps.
        logits = network.topology.num_classes * network.dtype.itemsize * num_computing
        needed += (bytes_of_maps(network.topology) + logits) * math.prod(windows.shape)
    lacking = shortage(needed)
    if lacking is not None:
        raise DoesNotFitError(
            f"a window of {times(windows.shape)} voxels, with the image around it, {lacking}; use "
            "a smaller inference.window"
        )
