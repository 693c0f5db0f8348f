"""Work on many items in worker processes, which end with the process that started them.

Nothing heavy is imported here: a worker imports this first, and from then on dies with its parent.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from unet3d.distributed.processes import die_with_parent, end_children, shielded_children
from unet3d.errors import DatasetError
from unet3d.terminal import bar

Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

LOG_SECONDS = 20.0
"""How often work on many cases that goes on says how far it is."""

CLEANING_SECONDS = 2.0
"""Time in which workers that are asked to stop delete what is half written."""

GRACE_SECONDS = 0.2
"""How long after a worker was killed a signal to all processes may still reach this one."""


def map_items(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    num_workers: int,
    watch: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    """Return the results of work on each item, in the order of the items.

    The work is a function of a module, and done in this process for fewer than two workers. The
    watch is told how many items are done. Raises DatasetError where a worker was killed.
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
        futures = [pool.submit(_work_on, work, item) for item in items]
    with pool:
        try:
            return _counted((future.result() for future in futures), watch)
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


@contextmanager
def counting(doing: str, num_cases: int) -> Iterator[Callable[[int], object]]:
    """Show how many cases are done: in a bar on a terminal, else in a line now and then.

    Yields what takes how many are done.
    """
    if num_cases > 1 and logger.isEnabledFor(logging.INFO):
        with bar(f"{doing} cases", num_cases) as show:
            yield _logging(doing, num_cases) if show is None else show
    else:
        yield lambda num_done: None


def _logging(doing: str, num_cases: int) -> Callable[[int], None]:
    next_line = time.monotonic() + LOG_SECONDS

    def watch(num_done: int) -> None:
        nonlocal next_line
        if num_done < num_cases and time.monotonic() >= next_line:
            next_line = time.monotonic() + LOG_SECONDS
            logger.info("%s %d cases: %d done", doing, num_cases, num_done)

    return watch


def _counted(results: Iterable[Result], watch: Callable[[int], object]) -> list[Result]:
    done = []
    for result in results:
        done.append(result)
        watch(len(done))
    return done


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
