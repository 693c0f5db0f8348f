"""``unet3d predict`` on a slow disk or with a slow network, printing when it reads and computes."""

import os
import time
from types import SimpleNamespace

from isal import igzip

from tests.warm import run_command
from unet3d.images import source
from unet3d.inference import windows
from unet3d.inference.image_slab import ImageSlab

WINDOWS, READING = "windows\n", "reading\n"


def predict(words, reading_s, window_s):
    """Run ``unet3d WORDS``; reading 4 KiB and computing some windows take the given seconds."""
    cut = ImageSlab.cut

    class SlowFile(igzip.IGzipFile):
        def readinto(self, target):
            os.write(1, READING.encode())
            time.sleep(reading_s)
            return super().readinto(target)

    def slow_cut(self, starts):
        os.write(1, WINDOWS.encode())
        time.sleep(window_s)
        return cut(self, starts)

    windows.CPU_VOXELS = 4 * 8**3  # voxels of windows that are computed at a time
    source.PIECE_BYTES = 4096
    source.igzip = SimpleNamespace(open=lambda file, mode: SlowFile(fileobj=file, mode=mode))
    ImageSlab.cut = slow_cut
    run_command(words)
