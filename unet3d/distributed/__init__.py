"""The processes of one training: their places, their messages, starting and stopping them.

Here is what a command tells the ranks, or the other commands, that it starts, in their environment.
Nothing else is imported, because ``unet3d`` reads it before it handles signals.
"""

import os

LAUNCHED = "UNET3D_LAUNCHED"
"""Holds the process id of the command that started the ranks and reports for them."""

STORE_PORT = "UNET3D_STORE_PORT"
"""Holds the port on the loopback interface of the store in which the ranks meet."""

MEETING_FOLDER = "UNET3D_MEETING_FOLDER"
"""Holds a folder, open to this user alone, for files of the ranks."""

PARENT = "UNET3D_PARENT"
"""Holds the process id of the command that has started this one, and other ones beside it."""

SHARED_BY = "UNET3D_SHARED_BY"
"""Holds how many such commands share the cores of this machine at a time."""


def is_launched() -> bool:
    """Return whether a command has started this process as one of its ranks."""
    return LAUNCHED in os.environ


def is_one_of_several() -> bool:
    """Return whether a command has started this one, and says itself when both are stopped."""
    return PARENT in os.environ
