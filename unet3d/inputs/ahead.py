"""Background work in daemon threads, which delay the end of the process by a few seconds at most.

With the pools of ``concurrent.futures``, Python would wait until all work is done. A short wait is
needed, because a daemon thread that returns from PyTorch while Python shuts down aborts the
process.
"""

import atexit
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

END_SECONDS = 5.0
"""Longest wait for background work at the end of the process."""

_working: "dict[Thread, list[Future[Any]]]" = {}


def ahead(work: Callable[[], Result]) -> "Future[Result]":
    """Start work in a thread, and return its future result."""
    (future,) = each_ahead(lambda _: work(), [None])
    return future


def each_ahead(
    work: Callable[[Item], Result], items: Sequence[Item], num_threads: int = 1
) -> "list[Future[Result]]":
    """Start work on items, in their order; items that have not started can be cancelled."""
    futures: list[Future[Result]] = [Future() for _ in items]
    waiting: SimpleQueue[tuple[Future[Result], Item]] = SimpleQueue()
    for pair in zip(futures, items, strict=True):
        waiting.put(pair)

    def run() -> None:
        with suppress(Empty):
            while True:
                _fulfil(*waiting.get_nowait(), work)
        _working.pop(current_thread(), None)

    for _ in range(min(num_threads, len(items))):
        thread = Thread(target=run, name="ahead", daemon=True)
        _working[thread] = futures
        thread.start()
    return futures


def in_threads(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    num_threads: int,
    watch: Callable[[int], object] = lambda num_done: None,
) -> list[Result]:
    """Return the results of work on each item; raise the first error without waiting for others.

    ``watch`` gets the number of finished items, after each.
    """
    futures = each_ahead(work, items, num_threads)
    results: list[Result] = []
    try:
        for future in futures:
            results.append(future.result())
            watch(len(results))
        return results
    finally:  # also after an error or an interruption
        for future in futures:
            future.cancel()


@atexit.register
def _end_work() -> None:
    """Cancel waiting work, and wait for the running work."""
    threads = [one for one in list(_working) if one.is_alive()]  # others did not start
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        for future in _working.get(thread, ()):
            future.cancel()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _fulfil(future: "Future[Result]", item: Item, work: Callable[[Item], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(item)
    except BaseException as error:  # raised when the result is requested
        future.set_exception(error)
    else:
        future.set_result(result)
