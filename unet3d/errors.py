"""Every error that unet3d raises for a reason it can explain.

The message is one line: what is wrong, which value, what to do. The command line prints it after
``Error:`` and exits with status 1, without a traceback.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self


class Unet3dError(Exception):
    """Base of every error that a user can cause and can fix."""


class ConfigError(Unet3dError):
    """A setting is unknown, out of range, or contradicts another."""


class ResultExistsError(ConfigError):
    """A result is there already, and nobody has allowed to replace it."""

    @classmethod
    def meanwhile(cls, path: Path) -> Self:
        """Return the error for a file that somebody else has made while ours was written."""
        return cls(
            f"{path} was made by another process meanwhile, and is kept; add --overwrite to "
            "replace it"
        )


class DatasetError(Unet3dError):
    """A data set cannot be read, or its parts do not belong together."""


class VolumeError(Unet3dError):
    """One volume cannot be read, or cannot be used as it is."""


class CacheError(Unet3dError):
    """The cache folder cannot be written, or lost files while they were in use."""


class DeviceError(Unet3dError):
    """A device does not exist, or the network cannot be placed as asked."""


class DoesNotFitError(DeviceError):
    """A device has too little memory for what was asked of it."""


class RankError(Unet3dError):
    """One of the processes of a training hangs or cannot be reached, so the others cannot go on."""


class LostRankError(RankError):
    """Another process of the training has ended, and knows the reason better than this one."""


class CheckpointError(Unet3dError):
    """A checkpoint is missing, damaged, or does not belong to this network."""


def reason_of(error: OSError) -> str:
    """Return why a file could not be used, for the end of a message: one line, never empty.

    Libraries raise some errors of files without the system's text, such as NumPy on a full disk.
    """
    return " ".join(str(error.strerror or error).split()) or type(error).__name__


def some(names: Sequence[object], most: int = 8) -> str:
    """Return names or values as messages list them: the first few, and how many more there are."""
    text = ", ".join(map(str, names[:most]))
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
