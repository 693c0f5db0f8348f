"""The processes of one training run: ranks, messages, starting and stopping.

This module has the environment variables by which a command informs the ranks or commands that it
starts. It imports nothing else, because ``unet3d`` reads it before it handles signals.
"""

import os

PARENT = "UNET3D_PARENT"
"""Holds the id of the process that started this process, as a rank or as one of several
commands."""

STORE_PORT = "UNET3D_STORE_PORT"
"""Holds the port, on the loopback interface, of the store in which ranks of one command meet."""

SHARED_BY = "UNET3D_SHARED_BY"
"""Holds how many commands share the cores of this machine at a time."""


def is_started() -> bool:
    """Return whether another command started this one; that command reports a requested stop."""
    return PARENT in os.environ


def is_launched() -> bool:
    """Return whether a command started this process as its rank; that command reports for it."""
    return STORE_PORT in os.environ
