"""The common context of a training run, and the division of validation cases among its ranks.

Replicas take cases in turn. If the ranks of a replica have slabs of each volume, they work on its
cases together, and the first of these ranks has the result::

    rank          0         1         2         3
    replica       0         0         1         1
    cases         0, 2, 4   0, 2, 4   1, 3      1, 3
    results       0, 2, 4             1, 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from unet3d.distributed.group import Group
from unet3d.interruption import InterruptionRequest
from unet3d.parallel import Executor, ParallelDims
from unet3d.planning.experiment import Experiment
from unet3d.runs.run_folder import RunFolder

Case = TypeVar("Case")

Progress = Callable[[int, int, int, int], object]
"""Called with a rank's finished and total cases, then the finished and total windows of the case in
progress."""

WindowsDone = Callable[[int, int], None]
"""Called with the finished and total windows of a case."""


class Stopped(Exception):
    """A signal to one of the ranks has ended the work of all ranks early."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One training run, or one rank's share of it."""

    experiment: Experiment
    """Cases, preparation, network and settings."""
    executor: Executor
    """The placed network."""
    folder: RunFolder
    """Folder of the run's files."""
    group: Group
    """The ranks that train together; the first one writes files and shows progress."""
    dims: ParallelDims
    """Replica and slab of this rank."""
    precision: str
    """Number type of the network's computation, such as ``bfloat16``."""
    slabs: dist.ProcessGroup | None = None
    """The ranks with the slabs of this replica's volumes; None: this rank has whole volumes."""

    @property
    def has_results(self) -> bool:
        """Whether this rank is the first one of its replica."""
        return self.group.ranks.rank % self.dims.num_shards == 0

    def share(self, num_cases: int, num_replicas: int | None = None) -> range:
        """Return the indices of this replica's cases; only the first ``num_replicas`` have any."""
        num_replicas = num_replicas or self.group.size // self.dims.num_shards
        replica = self.group.ranks.rank // self.dims.num_shards
        return range(replica, num_cases if replica < num_replicas else 0, num_replicas)


@dataclass(frozen=True, kw_only=True)
class Watcher:
    """Callbacks that follow the work on cases, and may end it."""

    num_steps: int
    """Training steps since the start of the run, which tell the other ranks how far this one is."""
    interruption: InterruptionRequest
    """Ends the work before the next case of this rank."""
    progress: Progress


def over_cases(
    context: RunContext,
    cases: Sequence[Case],
    work: Callable[[Case, WindowsDone], Any],
    watcher: Watcher,
    what: str,
    *,
    num_replicas: int | None = None,
    with_slabs: bool = False,
) -> list[Any]:
    """Return the result of ``work`` for each case, a plain value, in all ranks; a collective call.

    ``with_slabs``: all ranks of a replica work on each of its cases together, else only its first
    rank. Raises Stopped in all ranks if one of them was asked to stop.
    """
    group, request = context.group, watcher.interruption
    share = context.share(len(cases), num_replicas)
    if not with_slabs and not context.has_results:
        share = range(0)
    own: list[tuple[int, Any]] = []
    for number, index in enumerate(share):
        if group.agree(request.signal_number or 0, context.slabs if with_slabs else None):
            break
        title = f"{what}, case {getattr(cases[index], 'name', index)}"

        def windows_done(done: int, total: int, number: int = number, title: str = title) -> None:
            group.note(watcher.num_steps, f"{title}, window {done} of {total}")
            watcher.progress(number, len(share), done, total)

        group.note(watcher.num_steps, title)
        result = work(cases[index], windows_done)
        if context.has_results:
            own.append((index, result))
    watcher.progress(len(share), len(share), 0, 1)
    answers = group.exchange([request.signal_number or 0, own])
    stop = max(number for number, _ in answers)
    if stop:
        raise Stopped(stop)
    found = {index: result for _, results in answers for index, result in results}
    return [found[index] for index in range(len(cases))]
