"""Freeing ranks that wait in a collective for one that will not come, without losing any of them.

A rank that runs out of memory in a forward pass leaves the others waiting in the next exchange of
that pass. So it breaks the groups that move tensors; the others then get an error, and all ranks
can agree in the default group, which stays, on what to do next. New groups are made for that.

How a group breaks depends on its backend::

    gloo    its connections close once nobody refers to the group, which the others notice
    NCCL    each rank aborts its own communicators; the kernels of another would wait on
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from unet3d.torch_private import Store, abort_group, groups_besides_default

POLL_SECONDS = 0.2


def break_groups() -> None:
    """Abort and forget all groups but the default one.

    Of gloo's, which cannot be aborted, no reference may be left elsewhere.
    """
    for group in groups_besides_default():
        if dist.get_backend(group) == "nccl":
            abort_group(group)
        else:
            dist.destroy_process_group(group)


@contextmanager
def aborted_with_others(store: Store, key: str) -> Iterator[None]:
    """Abort the groups of NCCL in this context as soon as another rank says that it will not come.

    The rank may hang in a call of CUDA meanwhile, such as one that frees memory, which waits for
    all kernels. So a thread looks.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if store.check([key]):
                for group in groups_besides_default():
                    group.abort()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
