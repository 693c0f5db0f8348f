"""``unet3d predict`` on a slow disk, or with a slow network, which says what it does."""

import os
import time
from types import SimpleNamespace
from typing import Any

from isal import isal_zlib

from tests.warm import run_command
from unet3d.inference import windows
from unet3d.inference.image_slab import ImageSlab
from unet3d.volumes import inflating

WINDOWS, READING = "windows\n", "reading\n"


def predict(words: list[str], reading_s: float, window_s: float) -> None:
    """Run ``unet3d WORDS``.

    Args:
        words: Arguments.
        reading_s: Seconds for each 4 KB that are unpacked.
        window_s: Seconds for each few windows.
    """
    cut = ImageSlab.cut

    class SlowInflater:
        """What unpacks, but slowly."""

        def __init__(self, *options: int) -> None:
            self._actual = isal_zlib.decompressobj(*options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._actual, name)

        def decompress(self, packed: bytes, max_length: int) -> bytes:
            os.write(1, READING.encode())
            time.sleep(reading_s)
            part: bytes = self._actual.decompress(packed, max_length)
            return part

    def slow_cut(self: ImageSlab, starts: Any) -> Any:
        os.write(1, WINDOWS.encode())
        time.sleep(window_s)
        return cut(self, starts)

    windows.CPU_VOXELS = 4 * 8**3  # computed at a time
    inflating.PIECE_BYTES = 4096
    vars(inflating)["isal_zlib"] = SimpleNamespace(decompressobj=SlowInflater)
    ImageSlab.cut = slow_cut  # type: ignore[method-assign]
    run_command(words)
