"""Work on many items in worker processes, which end with the process that started them.

Nothing heavy is imported here: a worker imports this first, and from then on dies with its parent.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import TypeVar

from unet3d.errors import DatasetError
from unet3d.processes import die_with_parent, end_children, shielded_children

Item = TypeVar("Item")
Result = TypeVar("Result")

CLEANING_SECONDS = 2.0
"""Time in which workers that are asked to stop delete what is half written."""

GRACE_SECONDS = 0.2
"""How long after a worker was killed a signal to all processes may still reach this one."""


def map_items(
    work: Callable[[Item], Result], items: Sequence[Item], num_workers: int
) -> list[Result]:
    """Return the results of work on each item, in the order of the items.

    Args:
        work: A function of a module.
        items: What it is called with.
        num_workers: Number of processes; below 2: this one alone.

    Raises:
        DatasetError: A worker was killed.
    """
    num_workers = min(num_workers, len(items))
    if num_workers < 2:
        return [work(item) for item in items]
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
        futures = [pool.submit(_work_on, work, item) for item in items]
    with pool:
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            time.sleep(GRACE_SECONDS)
            raise DatasetError(
                "a process that prepares cases was killed, probably because memory ran out; use "
                f"fewer than {num_workers} with data.num_workers"
            ) from error
        except Exception:
            pool.shutdown(cancel_futures=True)  # what is under way is kept
            raise
        except BaseException:  # somebody asked to stop
            end_children(set(multiprocessing.active_children()) - others, CLEANING_SECONDS)
            raise


def _start_worker() -> None:
    die_with_parent()

    import torch

    torch.set_num_threads(1)


def _work_on(work: Callable[[Item], Result], item: Item) -> Result:
    before = signal.signal(signal.SIGTERM, _stop_work)
    try:
        return work(item)
    except _Stopped:  # what was half written is deleted; the pool would go on with another item
        os._exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


class _Stopped(BaseException):
    """The parent ends this worker."""


def _stop_work(number: int, frame: FrameType | None) -> None:
    raise _Stopped
