"""``unet3d predict`` on a slow disk, or with a slow network, which says what it does."""

import os
import time
from types import SimpleNamespace

from isal import isal_zlib

from tests.warm import run_command
from unet3d.images import inflating
from unet3d.inference import windows
from unet3d.inference.image_slab import ImageSlab

WINDOWS, READING = "windows\n", "reading\n"


def predict(words, reading_s, window_s):
    """Run ``unet3d WORDS``, with seconds for each 4 KB unpacked, and for each few windows."""
    cut = ImageSlab.cut

    class SlowInflater:
        def __init__(self, *options):
            self._actual = isal_zlib.decompressobj(*options)

        def __getattr__(self, name):
            return getattr(self._actual, name)

        def decompress(self, packed, max_length):
            os.write(1, READING.encode())
            time.sleep(reading_s)
            return self._actual.decompress(packed, max_length)

    def slow_cut(self, starts):
        os.write(1, WINDOWS.encode())
        time.sleep(window_s)
        return cut(self, starts)

    windows.CPU_VOXELS = 4 * 8**3  # computed at a time
    inflating.PIECE_BYTES = 4096
    inflating.isal_zlib = SimpleNamespace(decompressobj=SlowInflater)
    ImageSlab.cut = slow_cut
    run_command(words)
