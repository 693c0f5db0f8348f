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
        self._next: tuple[Scan, Future[ReadScan | None]] | None = None

    def begin(self) -> None:
        """Begin with the first one now."""
        if self._scans:
            self._begin(0)

    def take(self, number: int) -> ReadScan:
        """Return a scan by its place among all, or raise why not, and begin with the next one."""
        scan = self._scans[number]
        begun, self._next = self._next, None
        found = begun[1].result() if begun is not None and begun[0] is scan else None
        del begun
        if found is None:
            found = self._read(scan)
        if number + 1 < len(self._scans):
            self._begin(number + 1)
        return found

    def _begin(self, number: int) -> None:
        scan = self._scans[number]
        self._next = scan, ahead(lambda: self._read_small(scan))

    def _read_small(self, scan: Scan) -> ReadScan | None:
        """Read a scan, unless it takes much of the memory that others may need before it."""
        needed = open_image(scan.images).unpacked_bytes if self._scratch.is_memory else 0
        return self._read(scan) if needed <= MEMORY_SHARE * available_bytes() else None

    def _read(self, scan: Scan) -> ReadScan:
        before = stamps(scan)
        return ReadScan(image=read_scan(scan, self._scratch), stamps=before)
