"""The folder of the validation cases in that of a run: predictions, scores and pictures."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unet3d.atomic import publish_folder, write_atomically
from unet3d.inputs.reading import read_json

CASES = "cases.json"
"""The file of the scores; it is in every folder that is whole."""

WORST, BEST = "worst.png", "best.png"
"""The pictures of two cases; of one case only the first."""


class ValidationFolder:
    """What the final network of a run predicts of its validation cases."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is read or written.

        Args:
            path: The folder; it belongs to the run, so nobody else keeps anything there.
        """
        self.path = path

    def is_whole(self) -> bool:
        """Return whether the cases were predicted and scored."""
        try:
            return isinstance(read_json(self.path / CASES), dict)
        except (OSError, ValueError):
            return False

    def pictures(self) -> list[str]:
        """Return the names of the pictures that are there."""
        return [name for name in (WORST, BEST) if (self.path / name).is_file()]

    def publish(self, unfinished: Path, record: Mapping[str, Any]) -> None:
        """Give a folder of predictions the name of this one, which is deleted first.

        Args:
            unfinished: The folder, on the same file system.
            record: What ``cases.json`` holds, plain values.

        Raises:
            OSError: It cannot be written.
        """
        text = json.dumps(record, indent=2) + "\n"
        write_atomically(unfinished / CASES, lambda file: file.write(text.encode()))
        self.remove()
        publish_folder(unfinished, self.path)

    def remove(self) -> None:
        """Delete the folder, if it is there: its predictions are of a network that trains on.

        Raises:
            OSError: It cannot be deleted.
        """
        if self.path.is_dir():
            shutil.rmtree(self.path)
