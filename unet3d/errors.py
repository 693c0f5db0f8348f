"""Every error that unet3d raises for a known cause.

A message is one line: what is wrong, which value, what to do. The command line prints it after
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
    """A result exists, and may not be replaced."""

    @classmethod
    def meanwhile(cls, path: Path) -> Self:
        """Return the error for a file that another process has made while this one wrote it."""
        return cls(
            f"{path} was made by another process meanwhile, and is kept; add --overwrite to "
            "replace it"
        )


class DatasetError(Unet3dError):
    """A data set cannot be read, or its parts do not belong together."""


class VolumeError(Unet3dError):
    """One volume cannot be read or used."""


class CacheError(Unet3dError):
    """The cache folder cannot be written, or lost files while they were in use."""


class DeviceError(Unet3dError):
    """A device does not exist, or the network cannot be placed as asked."""


class DoesNotFitError(DeviceError):
    """A device has too little memory for the requested work."""


class RankError(Unet3dError):
    """One of several ranks hangs or cannot be reached, so the others cannot continue."""


class LostRankError(RankError):
    """Another rank has ended; its error has the cause."""


class CheckpointError(Unet3dError):
    """A checkpoint is missing, damaged, or does not belong to this network."""


def reason_of(error: OSError) -> str:
    """Return why a file could not be used, for the end of a message: one line, never empty.

    Some libraries raise file errors without the system's text, such as NumPy on a full disk.
    """
    return " ".join(str(error.strerror or error).split()) or type(error).__name__


def naming(path: object, error: Exception) -> str:
    """Return the message of an error about a file, which it names first or anywhere."""
    text = str(error)  # with both slashes of a URL, which pathlib shortens
    return text if str(path) in text.replace("://", ":/") else f"{path}: {text}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural, such as ``1 case``."""
    plural = f"{noun}es" if noun.endswith("tch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def some(names: Sequence[object], most: int = 8) -> str:
    """Return names or values as messages list them: the first few, and how many more there are."""
    text = ", ".join(map(str, names[:most]))
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
