"""Work in processes that tests interrupt."""

import multiprocessing
import sys
import time

from unet3d.atomic import replacing
from unet3d.distributed.workers import map_items
from unet3d.interruption import Interrupted, interruptible, stop_on_signals


def write_slowly(path):
    with replacing(path) as unfinished:
        unfinished.touch()
        time.sleep(60)


def work_in_workers(folder, start):
    """Write files slowly in two workers; ``start`` is a start method of ``multiprocessing``."""
    context = multiprocessing.get_context(start)
    vars(multiprocessing)["get_context"] = lambda kind: context
    stop_on_signals(is_rank=False)
    try:
        with interruptible():
            map_items(write_slowly, [folder / str(number) for number in range(6)], 2)
    except Interrupted as interruption:
        sys.exit(interruption.exit_status)
