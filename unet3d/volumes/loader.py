"""Batches of patches, cut in this process or in worker processes.

Every worker can cut any patch of any epoch, so the main process sends it nothing but the number of
a batch. Several ranks each take a share of the same batch.
"""

import math
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from unet3d.config import PatchSettings, Shape
from unet3d.errors import DatasetError, Unet3dError
from unet3d.processes import die_with_parent, shielded_children
from unet3d.volumes.cache import PreparedCase
from unet3d.volumes.patches import Batch, PatchSampler, collate

_FIRST_IN_SERVER = "unet3d.volumes.loading_server"

Step = tuple[int, int]
"""An epoch and a step in it."""


class PatchLoader:
    """Yields batches, cut in this process or in workers that live as long as the loader."""

    def __init__(
        self,
        *,
        cases: Sequence[PreparedCase],
        settings: PatchSettings,
        size: Shape | None,
        stride: Shape,
        batch_size: int,
        seed: int,
        num_workers: int,
        pin_memory: bool,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Set up the loader; workers start with the first epoch.

        Args:
            cases: The training cases.
            settings: See :class:`PatchSampler`.
            size: Voxels of a patch along X, Y, Z; None: whole volumes.
            stride: The shape of a patch is a multiple of it.
            batch_size: Patches in a batch; the last batch of an epoch holds the rest.
            seed: Seed of every random choice.
            num_workers: Processes that cut patches; 0: this one.
            pin_memory: Whether batches lie in page-locked memory, for copies to a GPU.
            rank: The rank whose shares of the batches are yielded.
            num_ranks: Number of ranks that share each batch.

        Raises:
            ConfigError: ``size`` is not a multiple of ``stride``.
            DatasetError: There are no cases.
        """
        sampler = PatchSampler(cases=cases, settings=settings, size=size, stride=stride, seed=seed)
        self.num_steps = math.ceil(sampler.num_patches / batch_size)
        self._steps = _Steps(self.num_steps)
        context = None
        if num_workers:
            # A fork of a process that uses CUDA or threads can hang; a fork of this server cannot,
            # and the server has imported MONAI already.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([_FIRST_IN_SERVER, __name__])
            _start_fork_server()
        self._loader: DataLoader[Batch | Unet3dError] = DataLoader(
            _Batches(sampler, batch_size, rank, num_ranks),
            batch_size=None,
            sampler=self._steps,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=_die_with_server,
            multiprocessing_context=context,
            # The loader draws a seed at every epoch. The global generator, whose state checkpoints
            # save and restore, must not be where it draws from.
            generator=torch.Generator(),
        )

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch.

        Args:
            epoch: From 0.
            first_step: The batch to begin with, where a run resumes within an epoch.

        Raises:
            DatasetError: A worker died.
            CacheError: A prepared case is gone.
        """
        self._steps.epoch, self._steps.first_step = epoch, first_step
        try:
            for batch in self._loader:
                if isinstance(batch, Unet3dError):
                    raise type(batch)(*batch.args)  # its own traceback would keep the workers
                yield batch
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DatasetError(
                "a process that cuts patches died; give the container more shared memory "
                f"(--shm-size) or set data.num_workers=0 ({' '.join(str(error).split())})"
            ) from error


def _die_with_server(worker: int) -> None:
    """Have a worker end with the server that it was forked from, which ends with its own parent.

    PyTorch's own watch observes the server alone, which would live as long as its workers do.
    """
    die_with_parent()


def _start_fork_server() -> None:
    """Start the server that workers are forked from, which inherit what it inherits.

    Terminals and launchers send signals to workers too, but the parent saves first.
    """
    with shielded_children(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        forkserver.ensure_running()


class _Steps(Sampler[Step]):
    """The steps that are left; the main process holds them, so workers need not know the epoch."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.epoch = 0
        self.first_step = 0

    def __iter__(self) -> Iterator[Step]:
        return iter([(self.epoch, step) for step in range(self.first_step, self.num_steps)])

    def __len__(self) -> int:
        return self.num_steps - self.first_step


class _Batches(Dataset[Batch | Unet3dError]):
    """The batches, or why one cannot be made: an error that is raised gets a worker's traceback."""

    def __init__(self, sampler: PatchSampler, batch_size: int, rank: int, num_ranks: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.rank = rank
        self.num_ranks = num_ranks

    def __getitem__(self, step: Step) -> Batch | Unet3dError:
        try:
            return self._batch(*step)
        except Unet3dError as error:
            return error

    def _batch(self, epoch: int, number: int) -> Batch:
        first = number * self.batch_size
        batch = range(first, min(first + self.batch_size, self.sampler.num_patches))
        mine = share_of(batch, self.rank, self.num_ranks)
        weight = len(mine) * self.num_ranks / len(batch)
        # A rank without a share repeats a patch with no weight: all ranks take part in a step.
        mine = mine or batch[:1]
        shape = None
        if self.num_ranks > 1:
            shapes = [self.sampler.patch_shape(epoch, index) for index in batch]
            shape = [max(sizes) for sizes in zip(*shapes, strict=True)]
        batched = collate([self.sampler.patch(epoch, index) for index in mine], shape)
        return replace(batched, weight=weight)


def share_of(items: range, rank: int, num_ranks: int) -> range:
    """Return one rank's share: consecutive items, as many as the others have, or one more.

    Args:
        items: The items to divide.
        rank: The rank that takes the share.
        num_ranks: Number of ranks.
    """
    size, rest = divmod(len(items), num_ranks)
    start = rank * size + min(rank, rest)
    return items[start : start + size + (rank < rest)]
