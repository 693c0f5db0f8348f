"""Logits of a volume from its windows, slab after slab: each as soon as no window reaches it.

Windows come in the order of their starts along the volume's longest axis, so what lies before the
next one is finished::

    |--- finished, and gone ---|--- logits are added up here ---|   no logits yet
                               |-----next window-----|

Only the logits of as many planes as a batch of windows reaches are in memory, however long the
volume is.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from unet3d.errors import VolumeError
from unet3d.images.files import times
from unet3d.images.memory_limits import refuse_beyond_memory
from unet3d.inference.image_slab import ImageSlab, drop_planes
from unet3d.inference.window_network import WindowNetwork, naming_devices
from unet3d.inference.windows import Windows, gaussian_weight

logger = logging.getLogger(__name__)

PIECE_NUMBERS = {"cpu": 2**24, "cuda": 2**26}
"""Means that are made at a time on each kind of device, unless a single plane has more."""

WindowsDone = Callable[[int, int], object]
"""Is told how many windows are done, and of how many. A GPU may still compute the last of them."""


class NonFiniteLogitsError(VolumeError):
    """The network answers with NaN or infinity, which are no reason to prefer a class."""


def logit_slabs(
    networks: Sequence[WindowNetwork],
    image: ImageSlab,
    windows: Windows,
    num_classes: int,
    windows_done: WindowsDone = lambda done, total: None,
    empty_logits: Sequence[float] | None = None,
) -> Iterator[Tensor]:
    """Yield the logits (K, X, Y, Z) of one volume, slab after slab along the axis of its windows.

    The networks, on the same devices, compute only while the next slab is asked for. Of several it
    is the mean of their logits, which are added up together: that takes no more memory than one of
    them. Where ``empty_logits`` are given, one for each class, windows in which each channel is one
    number are skipped, and these stand where no other window is.

    Logits are in float32 (float64 for a float64 network) on the networks' output device, or on the
    CPU if what is added up would take more than half of that device's free memory. The receiver may
    change them. Ranks that compute slabs of the windows together all yield the same.

    Raises:
        DoesNotFitError: A device has too little memory for windows of this size.
        VolumeError: The host has too little memory to add up logits.
        NonFiniteLogitsError: A logit is NaN or infinite.
    """
    total = len(networks) * len(windows.starts)
    with naming_devices(networks[0].devices, windows.shape):
        windows_done(0, total)
        if len(windows.starts) > 1:
            blending = _Blending(networks, image, windows, num_classes, empty_logits)
            yield from blending.slabs(lambda done: windows_done(done, total))
            return
        whole, mean = image.cut(windows.starts), None
        for done, network in enumerate(networks, start=1):
            logits = network.predict(whole.to(network.input_device))
            _refuse_non_finite(logits)
            dtype = torch.promote_types(logits.dtype, torch.float32)
            # What a network returns may be its own, and the next one may have the same memory.
            logits = logits[0].to(dtype, copy=True)
            mean = logits if mean is None else mean.add_(logits)
            del logits  # while others are computed
            windows_done(done, total)
        if mean is not None:
            mean = mean if len(networks) == 1 else mean.div_(len(networks))
            yield mean[(slice(None), *windows.inside)]


class _Blending:
    """Computes windows, and adds them up."""

    def __init__(
        self,
        networks: Sequence[WindowNetwork],
        image: ImageSlab,
        windows: Windows,
        num_classes: int,
        empty_logits: Sequence[float] | None,
    ) -> None:
        self._networks = networks
        self._image = image
        self._windows = windows
        self._num_classes = num_classes
        self._empty_logits = empty_logits
        self._sums: _Sums | None = None
        self._checked: set[int] = set()
        """Numbers of the networks whose first logits are finite."""

    def slabs(self, windows_done: Callable[[int], object]) -> Iterator[Tensor]:
        axis = self._windows.axis
        done = num_skipped = 0
        # One network after the other for all windows that begin at one plane, not for each batch,
        # because the next one's weights have to be brought.
        for begin, row in itertools.groupby(self._windows.batches(), lambda one: one[0][axis]):
            if self._sums is not None:
                # Before the forward pass: the receiver may use the network for something else.
                yield from self._sums.finish(begin)
            batches = list(row)
            for number in range(len(self._networks)):
                for batch in batches:
                    num_skipped += len(batch) - self._add(number, batch)
                    done += len(batch)
                    windows_done(done)
        if self._sums is not None:
            yield from self._sums.finish(self._windows.size[axis])
        if self._empty_logits is not None:
            logger.info("skipped %d of %d windows, which are empty", num_skipped, done)

    def _add(self, number: int, batch: list[tuple[int, ...]]) -> int:
        """Compute the windows of a batch, or those that are not empty; return how many."""
        network, cut = self._networks[number], self._image.cut(batch)
        if self._empty_logits is not None:
            lowest, highest = torch.aminmax(cut.flatten(2), dim=2)
            is_full = (lowest != highest).any(dim=1).tolist()
            batch = [start for start, full in zip(batch, is_full, strict=True) if full]
            cut = cut[torch.tensor(is_full, device=cut.device)]
        if batch:
            logits = network.predict(cut.to(network.input_device))
            if number not in self._checked:
                # Looking at each batch would keep a GPU waiting; a bad network shows in the first.
                _refuse_non_finite(logits)
                self._checked.add(number)
        if self._sums is None:
            computed = logits.dtype if batch else cut.dtype
            dtype = torch.promote_types(computed, torch.float32)
            device = network.output_device
            self._sums = _Sums(self._windows, self._num_classes, device, dtype, self._empty_logits)
        if batch:
            self._sums.add(batch, logits, 1 / len(self._networks))
            if number == 0:
                self._sums.weigh(batch)
        return len(batch)


class _Sums:
    """Weighted logits of the planes that windows still reach."""

    def __init__(
        self,
        windows: Windows,
        num_classes: int,
        device: torch.device,
        dtype: torch.dtype,
        empty_logits: Sequence[float] | None,
    ) -> None:
        size = windows.slab
        voxels = math.prod(size)
        device = _accumulation_device(device, num_classes * voxels)
        if device.type == "cpu":
            refuse_beyond_memory(
                voxels * num_classes * dtype.itemsize,
                f"adding up the logits of {times(size)} voxels and {num_classes} classes",
                "use a machine with more, a smaller inference.window, or cut the scan into pieces",
            )
        self._windows = windows
        self._first = 0
        """The plane of the padded volume with which the sums begin."""
        self._weight = gaussian_weight(windows.shape).to(device)
        self._rows: dict[int, list[tuple[int, ...]]] = {}
        """Windows whose weights count, by the plane with which they begin."""
        self._logits = torch.zeros(num_classes, *size, device=device, dtype=dtype)
        self._empty: Tensor | None = None
        if empty_logits is not None:
            empty = torch.tensor(empty_logits, dtype=dtype, device=device)
            self._empty = empty.reshape(-1, 1, 1, 1)

    def add(self, starts: list[tuple[int, ...]], logits: Tensor, share: float) -> None:
        for start, logit in zip(starts, logits.to(self._logits.device), strict=True):
            place = (slice(None), *self._windows.place(start, self._first))
            # One by one: of many classes, several in float32 are more than the network takes.
            logit = logit.to(self._logits.dtype).contiguous()
            self._logits[place].addcmul_(logit, self._weight, value=share)

    def weigh(self, starts: list[tuple[int, ...]]) -> None:
        """Count the weights of windows, once for all networks."""
        for start in starts:
            self._rows.setdefault(start[self._windows.axis], []).append(start)

    def finish(self, end: int) -> Iterator[Tensor]:
        """Yield the means of the planes before ``end``, if there are any, and forget them.

        In several pieces, where many classes make one large.
        """
        dim, inside = 1 + self._windows.axis, list(self._windows.inside)
        begin, num_planes = self._first, end - self._first
        along = inside[self._windows.axis]
        low, high = max(begin, along.start), min(end, along.stop)
        of_plane = math.prod(self._logits.shape) // self._logits.shape[dim]
        most = max(1, PIECE_NUMBERS[self._logits.device.type] // of_plane)
        for first in range(low, high, most):
            inside[self._windows.axis] = slice(first - begin, min(first + most, high) - begin)
            place = (slice(None), *inside)
            weights = self._weights(inside, begin)
            means = self._logits[place] / weights
            if self._empty is not None:
                means = torch.where(weights > 0, means, self._empty)
            _refuse_non_finite(means)
            yield means
        if num_planes > 0:
            drop_planes(self._logits, dim, num_planes)
            self._first = end
            reach = self._windows.shape[self._windows.axis]
            self._rows = {row: starts for row, starts in self._rows.items() if row + reach > end}

    def _weights(self, place: Sequence[slice], begin: int) -> Tensor:
        """Return the sums of the weights of some finished planes, shape (X, Y, Z).

        They are added up only here, because beside the logits of two classes they would take half
        as much memory again.
        """
        windows, axis = self._windows, self._windows.axis
        low, high = place[axis].start + begin, place[axis].stop + begin
        size = [high - low if one == axis else n for one, n in enumerate(windows.size)]
        sums = torch.zeros(size, device=self._weight.device)
        reach = windows.shape[axis]
        for row, starts in self._rows.items():
            first, behind = max(row, low), min(row + reach, high)
            if first >= behind:
                continue
            weight = self._weight.narrow(axis, first - row, behind - first)
            for start in starts:
                target = list(windows.place(start, row))
                target[axis] = slice(first - low, behind - low)
                sums[tuple(target)] += weight
        within = list(windows.inside)
        within[axis] = slice(0, high - low)
        return sums[tuple(within)]


def _refuse_non_finite(logits: Tensor) -> None:
    # One pass that makes no second tensor; NaN anywhere is the least and the largest.
    if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(logits)):
        raise NonFiniteLogitsError("the network's output is NaN or infinite")


def _accumulation_device(device: torch.device, num_logits: int) -> torch.device:
    if device.type != "cuda":
        return device
    free, _ = torch.cuda.mem_get_info(device)
    return device if 4 * num_logits <= free // 2 else torch.device("cpu")
