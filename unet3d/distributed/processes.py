"""Child processes: none outlives the process that started it, and signals reach the parent alone.

Every child calls :func:`die_with_parent` before it does anything else.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Have Linux kill this process when its parent dies, whatever the cause.

    To Linux the parent is the *thread* that started this process, so threads that end early must
    not start processes. Processes that this process starts are not covered: each must call this
    function itself.
    """
    import multiprocessing  # not above: the command line would load it for every --help

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call.
    known = multiprocessing.parent_process()
    is_orphan = parent is not None and os.getppid() != parent
    if is_orphan or (known is not None and not known.is_alive()):
        os._exit(1)


@contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in this thread, and in processes that it starts, until the context ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def shielded_children(*signals: signal.Signals) -> Iterator[None]:
    """Start processes with multiprocessing that a terminal's or launcher's signals do not reach.

    Terminals and launchers send signals to all processes; this one receives them when the context
    ends, and handles them. The resource tracker starts here, too: it cleans up after a process that
    was killed, and its warnings about that are silenced.
    """
    from multiprocessing import resource_tracker

    sys.warnoptions.append("ignore:resource_tracker")  # new processes inherit these options
    try:
        with blocked(*signals), without_main_module():
            resource_tracker.ensure_running()  # this unblocks some signals
            with blocked(*signals):
                yield
    finally:
        sys.warnoptions.remove("ignore:resource_tracker")


@contextmanager
def without_main_module() -> Iterator[None]:
    """Keep children of multiprocessing from running the program's own file first.

    Children only need modules of unet3d. A script that trains without checking ``__name__`` would
    train again in each child.
    """
    main = vars(sys.modules["__main__"])
    origin: dict[str, Any] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main.update(dict.fromkeys(origin))  # children find neither a module name nor a file
    try:
        yield
    finally:
        main.update(origin)
