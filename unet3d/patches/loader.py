"""Batches of patches, cut in this process or in worker processes, and augmented there or on a GPU.

Every worker can cut any patch of any epoch, so the main process only sends it the number of a
batch. Each replica takes a share of the same batch; each rank of a divided replica makes a slab of
that share.
"""

import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from unet3d.config import Shape
from unet3d.distributed.processes import die_with_parent, shielded_children, without_main_module
from unet3d.errors import DatasetError, Unet3dError
from unet3d.patches.augment.cut import Slab
from unet3d.patches.augment.intensity import Gather
from unet3d.patches.device_batches import DeviceBatches
from unet3d.patches.patches import Batch, CutBatch, PackedBatch, PatchSampler

_FIRST_IN_SERVER = "unet3d.patches.loading_server"

_Loaded = Batch | CutBatch | PackedBatch | Unet3dError


class PatchLoader:
    """Yields batches, cut by this process or by workers, which live as long as the loader."""

    def __init__(
        self,
        sampler: PatchSampler,
        *,
        num_steps: int,
        num_workers: int,
        device: torch.device,
        augments_on_device: bool,
        rank: int = 0,
        num_ranks: int = 1,
        slab: Callable[[Shape], range] | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Set up the loader; workers, if there are any, start with the first epoch.

        An epoch has ``num_steps`` batches. For a GPU they are in page-locked memory, or are made on
        the GPU with ``augments_on_device``. The loader yields the share of replica ``rank``, and of
        this share only the planes along X that ``slab`` returns for the shape of a batch (None:
        all); ``slab`` must be picklable. ``gather`` gathers statistics of slabs that are made on
        the device, on the stream of the steps and between two steps. On the host, every rank makes
        a patch whole if it needs statistics.
        """
        self.num_steps = num_steps
        self._numbers = _Numbers()
        self._on_device = DeviceBatches(device, gather) if augments_on_device else None
        context = None
        if num_workers:
            # A fork of a process that uses CUDA or threads can hang; a fork of this server cannot.
            # The server has already imported the slow modules.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([_FIRST_IN_SERVER, __name__])
            # Terminals and launchers send signals to workers too, but the parent saves first.
            with shielded_children(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                forkserver.ensure_running()
        self._loader: DataLoader[_Loaded] = DataLoader(
            _Batches(
                sampler=sampler,
                num_steps=num_steps,
                rank=rank,
                num_ranks=num_ranks,
                slab=slab,
                augments=not augments_on_device,
            ),
            batch_size=None,
            sampler=self._numbers,
            num_workers=num_workers,
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
            worker_init_fn=_die_with_server,
            multiprocessing_context=context,
            # The loader draws a seed at every epoch. It must not draw from the global generator,
            # whose state checkpoints save and restore.
            generator=torch.Generator(),
        )
        self._loaded: Iterator[_Loaded] | None = None
        self._next: int | None = None
        self._waited_seconds = 0.0

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch, from ``first_step`` on if a run resumes within it.

        Queue all work on a batch that was made on a GPU before asking for the next one, because its
        memory is reused. DatasetError if a worker died.
        """
        first = epoch * self.num_steps + first_step
        if self._loaded is None or self._next != first:
            self._numbers.first = first
            with without_main_module():
                self._loaded = iter(self._loader)
        numbers = range(first, (epoch + 1) * self.num_steps)
        loaded = (self._load(number) for number in numbers)
        yield from loaded if self._on_device is None else self._on_device.made(loaded)

    def take_waited(self) -> float:
        """Return the seconds since the last call in which this process waited for patches.

        The first batch, for which the workers start, is not counted.
        """
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the workers.

        Workers ignore the signals with which Python ends them at exit, so Python would hang if an
        error kept the loader alive.
        """
        shut_down = getattr(self._loaded, "_shutdown_workers", None)  # only with worker processes
        if shut_down is not None:
            shut_down()
        self._loaded = self._next = None

    def _load(self, number: int) -> Any:
        """Return batch ``number``, which must be the next one, as cuts or as a complete batch."""
        assert self._loaded is not None
        began = time.monotonic()
        try:
            loaded = next(self._loaded)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DatasetError(
                "a process that cuts patches died; give the container more shared memory "
                f"(--shm-size) or set data.num_workers=0 ({' '.join(str(error).split())})"
            ) from error
        if self._next is not None:
            self._waited_seconds += time.monotonic() - began
        self._next = number + 1
        if isinstance(loaded, Unet3dError):
            raise type(loaded)(*loaded.args)  # its own traceback would keep the workers
        return loaded


def _die_with_server(worker: int) -> None:
    """End a worker when the server that forked it ends; the server ends with its own parent.

    PyTorch's own watchdog only observes the server, which would live as long as its workers.
    """
    die_with_parent()


class _Numbers:
    """The numbers of batches, from ``first`` on, in the main process.

    They continue across epochs, so that the first batches of the next epoch are cut during the end
    and the validation of the current one.
    """

    first = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


@dataclass(kw_only=True)
class _Batches(Dataset["_Loaded"]):
    """The batches; an error is returned, because a raised one would get a worker's traceback."""

    sampler: PatchSampler
    num_steps: int
    rank: int
    num_ranks: int
    slab: Callable[[Shape], range] | None
    augments: bool

    def __getitem__(self, number: int) -> "_Loaded":
        try:
            batch = self._batch(*divmod(number, self.num_steps))
            return batch.augmented() if self.augments else batch
        except Unet3dError as error:
            return error

    def _batch(self, epoch: int, step: int) -> CutBatch:
        batch_size = self.sampler.batch_size
        batch = range(step * batch_size, (step + 1) * batch_size)
        mine = share_of(batch, self.rank, self.num_ranks)
        weight = len(mine) * self.num_ranks / len(batch)
        # A replica without a share repeats a patch with weight 0, because all take part in a step.
        mine = mine or batch[:1]
        sizes = [self.sampler.patch_shape(epoch, index) for index in batch]
        x, y, z = (max(of_axis) for of_axis in zip(*sizes, strict=True))
        slab = self.slab and Slab(planes=self.slab((x, y, z)), num_planes=x)
        gathers = not self.augments
        cuts = tuple(self.sampler.cut(epoch, index, slab, gathers=gathers) for index in mine)
        return CutBatch(cuts=cuts, shape=(x, y, z), slab=slab, weight=weight)


def share_of(items: range, rank: int, num_ranks: int) -> range:
    """Return a rank's share: consecutive items, at most one more than any other rank has."""
    size, rest = divmod(len(items), num_ranks)
    start = rank * size + min(rank, rest)
    return items[start : start + size + (rank < rest)]
