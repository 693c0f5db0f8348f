"""The entry point of ``unet3d``, ``python -m unet3d`` and ``python cli.py``.

Signals are handled before slow imports, so nothing heavy is imported at the top.
"""

import sys

from unet3d.distributed import is_started
from unet3d.interruption import end_at_once, stop_on_signals


def main() -> None:
    """Run the command line and exit."""
    stop_on_signals(is_rank=is_started())

    from unet3d.cli.app import main as run
    from unet3d.distributed.ranks import leave

    try:
        run()
    except SystemExit as ending:
        status = int(ending.code or 0)
        if status > 128:  # after a signal; threads may wait for a server that does not answer
            sys.stdout.flush()
            sys.stderr.flush()
            end_at_once(status)
        # Also after success: a gloo thread that releases the last message once the interpreter has
        # shut down would abort the process.
        leave(status)


if __name__ == "__main__":
    main()
