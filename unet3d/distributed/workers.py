"""Work on many items in worker processes, which end with the process that started them.

Nothing heavy is imported here: a worker imports this first, and from then on dies with its parent.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import TypeVar

from unet3d.distributed.processes import die_with_parent, shielded_children
from unet3d.errors import DatasetError
from unet3d.interruption import end_at_once

Item = TypeVar("Item")
Result = TypeVar("Result")

CLEANING_SECONDS = 2.0
"""Time in which workers that are asked to stop delete half-written files."""

GRACE_SECONDS = 0.2
"""Wait after a worker was killed: a signal to all processes may still reach this one."""


def map_items(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    num_workers: int,
    watch: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    """Return the results of work on each item, in the order of the items.

    ``work`` must be a function of a module; with fewer than two workers this process does it.
    ``watch`` gets the number of finished items. Raises DatasetError if a worker was killed.
    """
    num_workers = min(num_workers, len(items))
    if num_workers < 2:
        return _counted(map(work, items), watch)
    others = set(multiprocessing.active_children())
    # Ctrl-C and SIGHUP of a terminal are for this process alone. SIGTERM must get through: with it
    # a pool ends its workers when one of them is gone.
    with shielded_children(signal.SIGINT, signal.SIGHUP):
        # Workers are spawned, because a fork of a process that has used CUDA or threads can hang.
        pool = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
        futures = [pool.submit(work, item) for item in items]
    with pool:
        try:
            return _counted((future.result() for future in futures), watch)
        except BrokenProcessPool as error:
            time.sleep(GRACE_SECONDS)
            raise DatasetError(
                "a process that prepares cases was killed, probably because memory ran out; set "
                f"data.num_workers below {num_workers}"
            ) from error
        except Exception:
            pool.shutdown(cancel_futures=True)  # items in progress are finished
            raise
        except BaseException:  # a requested stop
            end_workers(set(multiprocessing.active_children()) - others)
            raise


def _counted(results: Iterable[Result], watch: Callable[[int], object]) -> list[Result]:
    done = []
    for result in results:
        done.append(result)
        watch(len(done))
    return done


def end_workers(workers: Iterable[BaseProcess]) -> None:
    """Ask processes to end, and kill those that do not."""
    workers = list(workers)
    for worker in workers:
        worker.terminate()
    deadline = time.monotonic() + CLEANING_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        worker.kill()


def _start_worker() -> None:
    die_with_parent()
    # End at once, deleting half-written files, so that the pool's next item does not begin.
    signal.signal(signal.SIGTERM, lambda number, frame: end_at_once(128 + number))

    import torch

    torch.set_num_threads(1)
