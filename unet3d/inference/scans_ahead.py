"""Scans that are read while the ones before them are segmented."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from unet3d.images.image import Image, open_image
from unet3d.images.scratch import Scratch
from unet3d.inference.scans import Scan, read_scan, stamps
from unet3d.inputs.ahead import ahead
from unet3d.memory.host import available_bytes

MEMORY_SHARE = 1 / 4
"""Of what is available, the part that a scan may take that is not needed yet."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ReadScan:
    """A scan that was read."""

    image: Image
    stamps: Any
    """What its files were stamped with before."""


class ScansAhead:
    """Reads scans in their order, each of them while the one before is in use."""

    def __init__(self, scans: Sequence[Scan], scratch: Scratch) -> None:
        """Take them; nothing is read yet, and packed voxels will go to ``scratch``."""
        self._scans = tuple(scans)
        self._scratch = scratch
        self._begun: dict[int, Future[ReadScan | None]] = {}

    def begin(self, number: int = 0) -> None:
        """Begin with a scan now, by default with the first one."""
        if number < len(self._scans):
            scan = self._scans[number]
            self._begun[number] = ahead(lambda: self._read_small(scan))

    def take(self, number: int) -> ReadScan:
        """Return a scan by its place among all, or raise why not, and begin with the next one."""
        begun = self._begun.pop(number, None)
        self._begun.clear()  # of one that nobody took
        found = begun.result() if begun is not None else None
        if found is None:
            found = self._read(self._scans[number])
        self.begin(number + 1)
        return found

    def _read_small(self, scan: Scan) -> ReadScan | None:
        """Read a scan, unless it takes much of the memory that others may need before it."""
        needed = open_image(scan.images).unpacked_bytes if self._scratch.is_memory else 0
        return self._read(scan) if needed <= MEMORY_SHARE * available_bytes() else None

    def _read(self, scan: Scan) -> ReadScan:
        before = stamps(scan)
        return ReadScan(image=read_scan(scan, self._scratch), stamps=before)
