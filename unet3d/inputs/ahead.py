"""Work that is done in a thread while something else goes on."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def ahead(work: Callable[[], Result]) -> "Future[Result]":
    """Begin with some work now.

    A process that ends, such as after Ctrl-C, does not wait for it, as it would for a pool's.

    Args:
        work: What is done.

    Returns:
        Its result, or what it raised.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name="ahead", daemon=True).start()
    return future
