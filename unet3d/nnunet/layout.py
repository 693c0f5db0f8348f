"""The names of files in a model of nnU-Net, and of those that are unpacked from an archive.

A checkpoint in an archive becomes a file in a temporary folder::

    TEMPORARY/unet3d-archive-1a2b3c4d/
        archive -> weights/Task.zip                 a link to what the user has named
        files/nnUNetTrainer__.../fold_0/checkpoint_final.pth

and is known as ``weights/Task.zip/nnUNetTrainer__.../fold_0/checkpoint_final.pth``, also in the
ranks that are started with the path of the file.
"""

import os
import re
from pathlib import Path

PLANS = "plans.json"
DATASET = "dataset.json"

SUFFIX = ".pth"
"""Ends the names that nnU-Net gives to checkpoints, and we do not."""

FINAL = f"checkpoint_final{SUFFIX}"
"""What a training of nnU-Net ends with, and what it predicts with."""

ALL = "all"
"""The fold that is trained on every case."""

UNPACKED = "unet3d-archive-"
"""How the name of a folder begins that an archive is unpacked to."""

LINK = "archive"
"""In it, the link to the archive."""

FILES = "files"
"""In it, the folder of the files."""


def fold_named(name: str) -> int | str | None:
    """Return the fold that a name such as ``fold_0``, or ``fold0``, is of; None: it is of none."""
    match = re.fullmatch(f"fold_?([0-9]{{1,4}}|{ALL})", name)
    if match is None:
        return None
    return ALL if match[1] == ALL else int(match[1])


def known_as(path: Path) -> Path:
    """Return what a user knows a checkpoint by: of one from an archive, its place there."""
    for folder in path.parents:
        if folder.name.startswith(UNPACKED) and path.is_relative_to(folder / FILES):
            try:
                archive = Path(os.readlink(folder / LINK))
            except OSError:  # another folder of such a name
                return path
            return archive / path.relative_to(folder / FILES)
    return path
