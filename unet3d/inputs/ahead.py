"""Work in threads while something else goes on; a process that ends waits for none of them.

A pool of ``concurrent.futures`` is waited for at the end of the process, whatever was asked of it.
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
    """Begin with some work now."""
    (future,) = each_ahead(lambda _: work(), [None])
    return future


def each_ahead(
    work: Callable[[Item], Result], items: Sequence[Item], num_threads: int = 1
) -> "list[Future[Result]]":
    """Begin with work on items, in their order; what has not begun can be cancelled."""
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
    """Return the results of work on each item, or raise the first error without a wait for others.

    ``watch`` gets the number of finished items, after each.
    """
    futures = each_ahead(work, items, num_threads)
    results: list[Result] = []
    try:
        for future in futures:
            results.append(future.result())
            watch(len(results))
        return results
    finally:  # also where there is a fault, or somebody asked to stop
        for future in futures:
            future.cancel()


def _fulfil(future: "Future[Result]", item: Item, work: Callable[[Item], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work(item)
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)
    else:
        future.set_result(result)
