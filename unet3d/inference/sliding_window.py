"""Logits of a whole volume, from overlapping windows or in one piece: tensor in, tensor out.

Windows of one size cover the volume so that neighbours overlap and the last one ends at the
volume's edge. Their logits are averaged with a Gaussian weight, because a network is least certain
of the voxels at the edge of its window (nnU-Net, arXiv 1904.08128)::

    |-----window 0-----|
              |-----window 1-----|
                        |-----window 2-----|     starts are spread evenly
    |===============volume=================|
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unet3d.config import Shape
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.memory.fake_devices import is_gpu
from unet3d.memory.host import is_out_of_memory, shortage_reason
from unet3d.model import Topology
from unet3d.parallel import Slot

logger = logging.getLogger(__name__)

WindowsDone = Callable[[int, int], object]
"""Is told how many windows are done, and of how many. A GPU may still compute the last of them."""

SIGMA = 1 / 8
"""Standard deviation of the Gaussian weight, in windows."""

CPU_VOXELS = 2**20
"""Voxels of the windows that a CPU computes at a time. Small windows alone take longer: of channels
4 and 8, one of 16^3 takes 2.7 ms, with 63 others 0.4; of 32 to 320 channels, one of 64^3 172 ms,
with three others 153. Beyond so many voxels there is nothing to gain (docs/benchmarks.md)."""


class Predicting(Protocol):
    """What windows need of an :class:`~unet3d.parallel.Executor`."""

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected."""
        ...

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        ...

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of this process."""
        ...

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z) of windows (N, C, X, Y, Z).

        Args:
            image: The windows, on the input device.
        """
        ...


class NonFiniteLogitsError(VolumeError):
    """The network answers with NaN or infinity, which are no reason to prefer a class."""


def predict_logits(
    executor: Predicting,
    image: Tensor,
    topology: Topology,
    window: Shape | Literal["whole"],
    overlap: float,
    batch_size: int | Literal["auto"],
    *,
    windows_done: WindowsDone = lambda done, total: None,
) -> Tensor:
    """Return the logits of one volume.

    Args:
        executor: A placed network, in evaluation mode.
        image: Prepared, shape (C, X, Y, Z), on the CPU or the executor's input device.
        topology: The network's.
        window: Voxels along X, Y, Z, or the whole volume at once.
        overlap: Least share of a window that its neighbour covers too, from 0 to below 1.
        batch_size: Windows in one forward pass, or :func:`windows_at_a_time`.
        windows_done: Called before the first window and after each forward pass.

    Returns:
        Shape (K, X, Y, Z) in float32 (float64 for a float64 network), on the executor's output
        device, or on the CPU if they would take more than half of that device's free memory.

    Raises:
        DoesNotFitError: A device has too little memory for windows of this size.
        NonFiniteLogitsError: A logit is NaN or infinite.
    """
    windows = _Windows.of(executor, image, topology, window, overlap, batch_size)
    with _explaining_memory(executor, windows.shape):
        logits = _blend(executor, windows, topology.num_classes, windows_done)
    return logits[(slice(None), *windows.inside)]


def join_windows(
    executor: Predicting,
    image: Tensor,
    topology: Topology,
    window: Shape | Literal["whole"],
    overlap: float,
    batch_size: int | Literal["auto"],
) -> None:
    """Compute with other ranks what :func:`predict_logits` returns in one of them; keep nothing.

    Args:
        executor: As there.
        image: As there.
        topology: As there.
        window: As there.
        overlap: As there.
        batch_size: As there.

    Raises:
        DoesNotFitError: A device has too little memory for windows of this size.
    """
    windows = _Windows.of(executor, image, topology, window, overlap, batch_size)
    with _explaining_memory(executor, windows.shape):
        for batch in windows.batches():
            executor.predict(windows.cut(batch).to(executor.input_device))


@contextmanager
def _explaining_memory(executor: Predicting, window: Shape) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        x, y, z = window
        raise DoesNotFitError(
            f"windows of {x}x{y}x{z} voxels do not fit on "
            f"{', '.join(dict.fromkeys(str(slot.device) for slot in executor.slots))} "
            f"({shortage_reason(error)}); use a smaller inference.window or more devices"
        ) from error


def computed_window(wanted: Sequence[int], strides: Shape) -> Shape:
    """Return the voxels of a window that a network can halve.

    Args:
        wanted: Voxels along X, Y, Z.
        strides: The network's total stride.
    """
    x, y, z = (math.ceil(w / stride) * stride for w, stride in zip(wanted, strides, strict=True))
    # If the lowest level were one voxel, instance norm would not be defined.
    return (2 * x, 2 * y, 2 * z) if (x, y, z) == strides else (x, y, z)


def windows_at_a_time(window: Shape, devices: Sequence[torch.device]) -> int:
    """Return how many windows are best computed in one forward pass.

    Args:
        window: Voxels along X, Y, Z.
        devices: The devices of the network's stages.
    """
    if any(is_gpu(device) for device in devices):
        return 1
    return max(1, CPU_VOXELS // math.prod(window))


def window_starts(size: int, window: int, overlap: float) -> list[int]:
    """Return where windows start along one axis: evenly spread, the last ending at the edge.

    Args:
        size: Voxels of the volume, at least those of the window.
        window: Voxels of a window.
        overlap: Least share of a window that its neighbour covers too.
    """
    step = max(1, math.floor(window * (1 - overlap) + 1e-6))  # 20 * (1 - 0.9) is just below 2
    num_windows = math.ceil((size - window) / step) + 1
    if num_windows == 1:
        return [0]
    return [round(i * (size - window) / (num_windows - 1)) for i in range(num_windows)]


def gaussian_weight(window: Shape) -> Tensor:
    """Return the weight of each voxel of a window, 1 at the centre and never 0.

    Args:
        window: Voxels along X, Y, Z.

    Returns:
        Shape (X, Y, Z) in float32, on the CPU.
    """
    axes = []
    for voxels in window:
        distance = torch.arange(voxels, dtype=torch.float32) - (voxels - 1) / 2
        axes.append(torch.exp(-0.5 * (distance / (voxels * SIGMA)) ** 2))
    weight = torch.einsum("x,y,z->xyz", *axes)
    weight /= weight.max()
    # Even so small a weight is enough in a corner that one window alone covers.
    return weight.clamp_min(1e-4)


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """The windows of one volume."""

    image: Tensor
    """The volume, padded to at least one window."""
    inside: tuple[slice, ...]
    """Where in it the volume is."""
    shape: Shape
    """Voxels of each window."""
    starts: list[tuple[int, ...]]
    """Where they start."""
    batch_size: int
    """How many are computed at a time."""

    @classmethod
    def of(
        cls,
        executor: Predicting,
        image: Tensor,
        topology: Topology,
        window: Shape | Literal["whole"],
        overlap: float,
        batch_size: int | Literal["auto"],
    ) -> "_Windows":
        size = tuple(image.shape[1:])
        shape = computed_window(size if window == "whole" else window, topology.total_stride)
        if batch_size == "auto":
            batch_size = windows_at_a_time(shape, [slot.device for slot in executor.slots])
        padded, corner = _pad_to(image, shape)
        each = zip(padded.shape[1:], shape, strict=True)
        return cls(
            image=padded,
            inside=tuple(slice(start, start + n) for start, n in zip(corner, size, strict=True)),
            shape=shape,
            starts=list(itertools.product(*(window_starts(n, w, overlap) for n, w in each))),
            batch_size=batch_size,
        )

    def batches(self) -> Iterator[list[tuple[int, ...]]]:
        for first in range(0, len(self.starts), self.batch_size):
            yield self.starts[first : first + self.batch_size]

    def cut(self, starts: list[tuple[int, ...]]) -> Tensor:
        if len(self.starts) == 1:  # the whole volume, of which no copy is needed
            return self.image.unsqueeze(0)
        return torch.stack([self.image[(slice(None), *self.place(start))] for start in starts])

    def place(self, start: tuple[int, ...]) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(start, self.shape, strict=True))


def _blend(
    executor: Predicting, windows: _Windows, num_classes: int, windows_done: WindowsDone
) -> Tensor:
    size, starts = tuple(windows.image.shape[1:]), windows.starts
    windows_done(0, len(starts))
    if len(starts) == 1:
        logits = executor.predict(windows.cut(starts).to(executor.input_device))
        _refuse_non_finite(logits)
        windows_done(1, 1)
        return logits[0].to(_accumulation_dtype(logits))
    device = _accumulation_device(executor.output_device, num_classes * math.prod(size))
    weight = gaussian_weight(windows.shape).to(device)
    total: Tensor | None = None
    weights = torch.zeros(size, device=device)
    done = 0
    for batch in windows.batches():
        logits = executor.predict(windows.cut(batch).to(executor.input_device))
        logits = logits.to(device, _accumulation_dtype(logits)).contiguous()
        if total is None:
            # Looking at each batch would keep a GPU waiting; a bad network shows in the first.
            _refuse_non_finite(logits)
            total = torch.zeros(num_classes, *size, device=device, dtype=logits.dtype)
        for start, logit in zip(batch, logits, strict=True):
            place = windows.place(start)
            total[(slice(None), *place)].addcmul_(logit, weight)
            weights[place] += weight
        done += len(batch)
        windows_done(done, len(starts))
    assert total is not None  # there is at least one window
    total.div_(weights)
    _refuse_non_finite(total)
    return total


def _refuse_non_finite(logits: Tensor) -> None:
    # One pass that makes no second tensor; NaN anywhere is the least and the largest.
    if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(logits)):
        raise NonFiniteLogitsError("the network's output is NaN or infinite")


def _pad_to(image: Tensor, window: Shape) -> tuple[Tensor, tuple[int, ...]]:
    """Pad an image to at least a window, with 0, which is the mean of a prepared image."""
    missing = [max(0, w - n) for w, n in zip(window, image.shape[1:], strict=True)]
    before = tuple(m // 2 for m in missing)
    pads = [pad for m, b in zip(missing, before, strict=True) for pad in (m - b, b)]
    return (F.pad(image, pads[::-1]) if any(missing) else image), before


def _accumulation_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _accumulation_device(device: torch.device, num_logits: int) -> torch.device:
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    return device if 4 * num_logits <= free // 2 else torch.device("cpu")
