"""What a command tells the ranks that it starts, in their environment."""

import os

LAUNCHED = "UNET3D_LAUNCHED"
"""Holds the process id of the command that started the ranks and reports for them."""

MEETING_FOLDER = "UNET3D_MEETING_FOLDER"
"""Holds the folder, open to this user alone, in whose files the ranks meet."""


def is_launched() -> bool:
    """Return whether a command has started this process as one of its ranks."""
    return LAUNCHED in os.environ
