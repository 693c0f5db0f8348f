"""What workers do that are interrupted: ``python -m tests.volumes.unfinished_work FOLDER``."""

import sys
import time
from pathlib import Path

from unet3d.atomic import replacing
from unet3d.interruption import Interrupted, interruptible, stop_on_signals
from unet3d.volumes.workers import map_items


def write_slowly(path: Path) -> None:
    with replacing(path) as unfinished:
        unfinished.touch()
        time.sleep(60)


if __name__ == "__main__":
    from tests.volumes.unfinished_work import write_slowly as work  # workers know no __main__

    stop_on_signals(is_rank=False)
    try:
        with interruptible():
            map_items(work, [Path(sys.argv[1], str(number)) for number in range(6)], 2)
    except Interrupted as interruption:
        sys.exit(interruption.exit_status)
