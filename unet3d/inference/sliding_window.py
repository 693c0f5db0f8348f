"""Logits of a volume from its windows, slab by slab, each as soon as no later window covers it.

Windows are ordered by their starts along the volume's longest axis, so planes before the next start
are finished::

    |--- finished, and gone ---|--- logits are added up here ---|   no logits yet
                               |-----next window-----|

Memory holds only the logits of the planes that a batch of windows covers, however long the volume
is.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import FLOAT32_BYTES, refuse_beyond_memory
from unet3d.inference.image_slab import ImageSlab, drop_planes
from unet3d.inference.window_network import WindowNetwork, naming_devices
from unet3d.inference.windows import Windows, gaussian_weight, product, with_room

logger = logging.getLogger(__name__)

PIECE_NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Most mean logits to compute at once on each kind of device, unless a single plane has more."""

SUMS_SHARE = 1 / 2
"""Share of the free memory of a GPU that sums of logits may take."""

WindowsDone = Callable[[int, int], object]
"""Receives the number of windows that are done, or queued on a GPU, and the total."""


class NonFiniteLogitsError(VolumeError):
    """The output of the network is NaN or infinite, so no class can be chosen."""


def logit_slabs(
    networks: Sequence[WindowNetwork],
    image: ImageSlab,
    windows: Windows,
    num_classes: int,
    windows_done: WindowsDone = lambda done, total: None,
    empty_logits: Sequence[float] | None = None,
) -> Iterator[Tensor]:
    """Yield the logits (K, X, Y, Z) of one volume, slab after slab along the axis of its windows.

    The networks, on the same devices, compute only when the next slab is requested. The logits of
    several are averaged in one sum, which takes no more memory than one network. If
    ``empty_logits`` are given, one for each class, windows of constant intensity are skipped, and
    voxels in no other window get these logits.

    Logits are in float32 (float64 for a float64 image) on the networks' output device, or on the
    CPU if the sums would take more than half of that device's free memory. The receiver may change
    them. Ranks that compute slabs of the windows together all yield the same logits.

    Raises:
        DoesNotFitError: A device has too little memory for windows of this size.
        VolumeError: The host has too little memory to add up logits.
        NonFiniteLogitsError: A logit is NaN or infinite.
    """
    dtype = torch.promote_types(image.dtype, torch.float32)
    with naming_devices(networks[0].devices, windows.shape):
        windows_done(0, len(networks) * len(windows.starts))
        if len(windows.starts) == 1 and not windows.is_block:
            yield _logits_of_one(networks, image, windows, dtype, windows_done)
            return
        device = networks[0].output_device
        sums = _Sums(windows, num_classes, device, dtype, empty_logits)
        yield from _blended(networks, image, windows, sums, windows_done)


def _logits_of_one(
    networks: Sequence[WindowNetwork],
    image: ImageSlab,
    windows: Windows,
    dtype: torch.dtype,
    windows_done: WindowsDone,
) -> Tensor:
    """Return the logits of a volume that is one window, without allocating sums and weights."""
    whole, mean = image.cut(windows.starts), None
    for done, network in enumerate(networks, start=1):
        logits = network.predict(whole.to(network.input_device))
        _refuse_non_finite(logits)
        # A copy, because the next call may overwrite the memory that a network returns.
        logits = logits[0].to(dtype, copy=True)
        mean = logits if mean is None else mean.add_(logits)
        del logits  # frees memory for the next network
        windows_done(done, len(networks))
    assert mean is not None  # there is at least one network
    mean = mean if len(networks) == 1 else mean.div_(len(networks))
    return mean[(slice(None), *windows.inside)]


def _blended(
    networks: Sequence[WindowNetwork],
    image: ImageSlab,
    windows: Windows,
    sums: "_Sums",
    windows_done: WindowsDone,
) -> Iterator[Tensor]:
    """Compute windows, add up their logits, and yield the means of finished planes."""
    axis, total = windows.axis, len(networks) * len(windows.starts)
    done = num_skipped = 0
    checked: set[int] = set()
    # Networks take turns for all windows that begin at one plane, not for each batch, because each
    # turn loads weights.
    for begin, row in itertools.groupby(windows.batches(), lambda one: one[0][axis]):
        # Before the forward pass: the receiver may use the network for something else.
        yield from sums.finish(begin)
        batches = list(row)
        for number, network in enumerate(networks):
            for batch in batches:
                cut, computed = image.cut(batch), batch
                if sums.empty is not None:
                    lowest, highest = torch.aminmax(cut.flatten(2), dim=2)
                    is_full = (lowest != highest).any(dim=1)
                    computed = list(itertools.compress(batch, is_full.tolist()))
                    num_skipped += len(batch) - len(computed)
                    cut = cut[is_full]
                if computed:
                    logits = network.predict(cut.to(network.input_device))
                    if number not in checked:
                        # Checking every batch would make a GPU wait; a network that has diverged
                        # shows it in the first.
                        _refuse_non_finite(logits)
                        checked.add(number)
                    sums.add(computed, logits, 1 / len(networks))
                done += len(batch)
                windows_done(done, total)
    yield from sums.finish(windows.size[axis])
    if sums.empty is not None:
        logger.info("windows of constant intensity: skipped %d of %d", num_skipped, done)


class _Sums:
    """Sums of weighted logits in the planes that windows still cover."""

    def __init__(
        self,
        windows: Windows,
        num_classes: int,
        device: torch.device,
        dtype: torch.dtype,
        empty_logits: Sequence[float] | None,
    ) -> None:
        size = windows.slab
        # If windows are skipped, the last channel is the sum of the weights.
        num_channels = num_classes + (empty_logits is not None)
        numbers = num_channels * math.prod(size)
        device = with_room(device, FLOAT32_BYTES * numbers, SUMS_SHARE)
        if device.type == "cpu":
            refuse_beyond_memory(
                numbers * dtype.itemsize,
                f"adding up the logits of {times(size)} voxels and {num_classes} classes",
                "use a machine with more, a smaller inference.window, or cut the scan into pieces",
            )
        self._windows = windows
        self._first = 0
        """First plane of the sums, as an index in the padded volume."""
        self._weight = gaussian_weight(windows.shape).to(device)
        self._weights = [line.to(device, dtype) for line in windows.summed_weights()]
        """Sums of the weights of all windows, along each axis."""
        self._sums = torch.zeros(num_channels, *size, device=device, dtype=dtype)
        self.empty: Tensor | None = None
        """The logits (K, 1, 1, 1) of voxels without a window; None: no window is skipped."""
        if empty_logits is not None:
            empty = torch.tensor(empty_logits, dtype=dtype, device=device)
            self.empty = empty.reshape(-1, 1, 1, 1)

    def add(self, starts: list[tuple[int, ...]], logits: Tensor, share: float) -> None:
        """Add the logits of windows from one network, whose share in the mean is ``share``."""
        num_classes = logits.shape[1]
        for start, logit in zip(starts, logits.to(self._sums.device), strict=True):
            sums = self._sums[(slice(None), *self._windows.place(start, self._first))]
            # One by one: with many classes, several in float32 would take more memory than the
            # network.
            logit = logit.to(self._sums.dtype).contiguous()
            sums[:num_classes].addcmul_(logit, self._weight, value=share)
            if self.empty is not None:
                sums[num_classes].add_(self._weight, alpha=share)

    def finish(self, end: int) -> Iterator[Tensor]:
        """Yield the means of the planes before ``end``, if there are any, and drop them.

        They come in several pieces if many classes would make one piece too large.
        """
        axis, inside = self._windows.axis, list(self._windows.inside)
        along, dim = inside[axis], 1 + self._windows.axis
        low, high = max(self._first, along.start), min(end, along.stop)
        of_plane = math.prod(self._sums.shape) // self._sums.shape[dim]
        most = max(1, PIECE_NUMBERS[self._sums.device.type] // of_plane)
        for first in range(low, high, most):
            inside[axis] = slice(first, min(first + most, high))
            means = self._means(inside)
            _refuse_non_finite(means)
            yield means
        if end > self._first:
            drop_planes(self._sums, dim, end - self._first)
            self._first = end

    def _means(self, place: Sequence[slice]) -> Tensor:
        """Return the means of some finished planes, given their box in the padded volume."""
        within = list(place)
        along = place[self._windows.axis]
        within[self._windows.axis] = slice(along.start - self._first, along.stop - self._first)
        sums = self._sums[(slice(None), *within)]
        if self.empty is None:
            lines = zip(self._weights, place, strict=True)
            return sums / product([line[one] for line, one in lines])
        return torch.where(sums[-1] > 0, sums[:-1] / sums[-1], self.empty)


def _refuse_non_finite(logits: Tensor) -> None:
    # One pass without a temporary tensor; with NaN anywhere, both extremes are NaN.
    if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(logits)):
        raise NonFiniteLogitsError("the network's output is NaN or infinite")
