"""The entry point of ``unet3d``, ``python -m unet3d`` and ``python cli.py``.

Signals are handled before slow imports, so nothing heavy is imported at the top.
"""

from unet3d.distributed import is_started
from unet3d.interruption import stop_on_signals


def main() -> None:
    """Run the command line and exit."""
    stop_on_signals(is_rank=is_started())

    from unet3d.cli.app import main as run
    from unet3d.distributed.ranks import leave

    try:
        run()
    except SystemExit as ending:
        # Also after success: a gloo thread that releases the last message once the interpreter has
        # shut down would abort the process.
        leave(int(ending.code or 0))


if __name__ == "__main__":
    main()
