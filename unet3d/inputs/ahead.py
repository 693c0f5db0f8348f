"""Background work in daemon threads, which do not delay the end of the process.

With the pools of ``concurrent.futures``, Python would always wait for them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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

    for _ in range(min(num_threads, len(items))):
        Thread(target=run, name="ahead", daemon=True).start()
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


def _fulfil(future: "Future[Result]", item: Item, work: Callable[[Item], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(item)
    except BaseException as error:  # raised when the result is requested
        future.set_exception(error)
    else:
        future.set_result(result)
