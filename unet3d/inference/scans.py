"""Scans to segment: reading the next one ahead, and writing results."""

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from isal import igzip
from pydantic import BaseModel, ConfigDict

from unet3d.atomic import make_folder, replacing
from unet3d.config import Reading
from unet3d.datasets.labels import class_indices
from unet3d.errors import ResultExistsError, VolumeError, reason_of
from unet3d.images.files import place_of, url_of, volume_stem
from unet3d.images.geometry import Geometry, shear_warning, voxel_mm3
from unet3d.images.image import Image, open_image
from unet3d.images.labels import write_label
from unet3d.images.scratch import Scratch, forget_pages
from unet3d.images.source import AS_STATED
from unet3d.inference.request import PredictionRequest
from unet3d.inputs.ahead import ahead
from unet3d.inputs.reading import open_regular, read_json
from unet3d.memory.host import available_bytes
from unet3d.preparation.normalization import Moments

if TYPE_CHECKING:  # it needs PyTorch
    from unet3d.inference.measuring import Measured

logger = logging.getLogger(__name__)

MEMORY_SHARE = 1 / 4
"""Share of the available memory that a scan may take if it is read ahead."""

PIECE_BYTES = 2**24
"""Bytes of a result to unpack at once, to check that it is complete."""

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
"""Last bytes of every PNG file."""

ENDING = "_seg"
"""End of the name of a segmentation beside its scan, before the suffix."""

ENDINGS = {"statistics": ".json", "preview": ".png", "probabilities": ".npy"}
"""Endings of the files beside a segmentation, by the option that requests each."""


class Scan(BaseModel):
    """One image to segment, and where its segmentation goes."""

    model_config = ConfigDict(frozen=True)

    images: tuple[Path, ...]
    """One file, or one for each channel."""
    output: Path
    """The file of the segmentation."""
    reading: Reading = AS_STATED
    """What the user states about the images, and the spacing of the network."""
    in_blocks: bool = False
    """Whether any number of processes segment the image block by block."""

    @property
    def name(self) -> str:
        """The path or URL of the first image, for messages."""
        return place_of(self.images[0])

    def beside(self, option: str) -> Path:
        """Return the file that an option of :class:`PredictionRequest` asks for."""
        return self.output.with_name(volume_stem(self.output) + ENDINGS[option])

    def results(self, request: PredictionRequest) -> list[Path]:
        """Return the files to be written."""
        return [self.output, *(self.beside(one) for one in ENDINGS if getattr(request, one))]


def is_whole(result: Path) -> bool:
    """Return whether a result can be read to its end."""
    with suppress(OSError, EOFError, ValueError, VolumeError):
        if result.suffix == ".json":
            read_json(result)
        elif result.suffix == ".npy":
            np.load(result, mmap_mode="r")
        elif result.suffix == ".png":
            with open_regular(result) as file:
                file.seek(-len(PNG_END), os.SEEK_END)
                return file.read() == PNG_END
        else:
            open_image([result])  # compares the size of a plain file with its header
            if result.suffix == ".gz":
                opened: Any = igzip.open
                with opened(result) as file:
                    while file.read(PIECE_BYTES):  # up to the checksum
                        pass
        return True
    return False


def read_scan(scan: Scan, scratch: Scratch | None = None) -> Image:
    """Read all channels of a scan; compressed voxels are unpacked to ``scratch``."""
    image = open_image(scan.images, scratch, scan.reading)
    image.load()
    warning = shear_warning(image.geometry)
    if warning is not None:
        logger.warning("%s", warning)
    return image


class ScansAhead:
    """Reads and measures a scan while another one is in use."""

    def __init__(
        self, scans: Sequence[Scan], scratch: Scratch, measure: Callable[[Image], "Measured"]
    ) -> None:
        """Take scans, without reading any; compressed voxels will be unpacked to ``scratch``."""
        self._scans = tuple(scans)
        self._scratch = scratch
        self._measure = measure
        self._begun: dict[int, Future[Measured | None]] = {}

    def begin(self, number: int | None) -> None:
        """Begin to read and measure a scan by its index; None: no scan."""
        if number is not None and not self._scans[number].in_blocks:
            scan = self._scans[number]
            self._begun[number] = ahead(lambda: self._read_small(scan))

    def take(self, number: int, following: int | None) -> "Measured":
        """Return a scan by its index, and begin with the following one.

        Errors of reading and measuring ahead are raised here.
        """
        begun = self._begun.pop(number, None)
        self._begun.clear()  # drops a scan that was never taken
        found = None if begun is None else begun.result()
        found = found or self._read(self._scans[number])
        self.begin(following)
        return found

    def _read(self, scan: Scan) -> "Measured":
        return self._measure(read_scan(scan, self._scratch))

    def _read_small(self, scan: Scan) -> "Measured | None":
        """Read a scan ahead; None if it would take too large a share of the available memory."""
        image = open_image(scan.images, reading=scan.reading)
        needed = image.unpacked_bytes if self._scratch.is_memory else 0
        fits = needed <= MEMORY_SHARE * available_bytes()
        return self._read(scan) if fits else None


def write_segmentation(
    scan: Scan,
    labels: npt.NDArray[Any],
    geometry: Geometry,
    names: dict[int, str],
    overwrite: bool = False,
) -> None:
    """Write label values (X, Y, Z) with their names, on the grid of a scan's geometry."""
    with _explaining(scan.output):
        write_label(scan.output, labels, geometry, overwrite, names)


def label_statistics(
    labels: npt.NDArray[Any], image: Image, label_names: dict[int, str]
) -> dict[str, Any]:
    """Return volume and intensity of each label, from label values (X, Y, Z) on the image's grid.

    Each name has ``value``, ``volume_ml``, ``num_voxels`` and ``intensity``: for each channel of
    the scan, mean, standard deviation, minimum and maximum, or None for an absent label.
    """
    voxel_ml = voxel_mm3(image.geometry.affine) / 1000
    values = sorted({0, *label_names})
    channels = range(image.num_channels)
    found = [[_Intensities() for _ in values] for _ in channels]
    counts = np.zeros(len(values), np.int64)
    for box in image.pieces():  # image and labels may be larger than the memory
        classes = class_indices(labels[box], values).ravel()
        order = np.argsort(classes, kind="stable")  # of small integers, by radix
        ends = np.bincount(classes, minlength=len(values)).cumsum()
        counts += np.diff(ends, prepend=0)
        for channel in channels if ends[0] < len(classes) else ():
            of_channel = image.read(box, channel).ravel()[order]
            for one, inside in zip(found[channel], np.split(of_channel, ends[:-1]), strict=True):
                one.add(inside)
        forget_pages(labels)
    statistics: dict[str, Any] = {}
    for value, name in label_names.items():
        index = values.index(value)
        count = int(counts[index])
        statistics[name] = {
            "value": value,
            "num_voxels": count,
            "volume_ml": count * voxel_ml,
            "intensity": [of_channel[index].described() for of_channel in found],
        }
    return statistics


def write_statistics(
    path: Path, scan: Scan, statistics: dict[str, Any], checkpoints: Sequence[str]
) -> None:
    """Write statistics of a scan's labels as JSON."""
    content = {
        "image": list(map(str, scan.images)),
        "checkpoints": list(checkpoints),
        "labels": statistics,
    }
    path.write_bytes(f"{json.dumps(content, indent=2)}\n".encode())


@contextmanager
def result_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary name for a file, which appears beside a segmentation once complete."""
    with _explaining(path), replacing(path, may_exist=overwrite) as unfinished:
        yield unfinished


def make_folder_of(path: Path) -> None:
    """Make the folder of a result."""
    if url_of(path):
        return
    try:
        make_folder(path.parent)
    except OSError as error:
        raise VolumeError(
            f"cannot write to {path.parent}: {reason_of(error)}; choose another --output"
        ) from error


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Make the folder of a result, and explain errors of writing it."""
    make_folder_of(path)
    try:
        yield
    except FileExistsError as error:
        raise ResultExistsError.meanwhile(path) from error
    except OSError as error:
        raise VolumeError(
            f"cannot write {path}: {reason_of(error)}; choose another --output"
        ) from error


class _Intensities:
    """Statistics of the voxels of one label in one channel, a part after the other."""

    def __init__(self) -> None:
        self._moments, self._lowest, self._highest = Moments(), np.inf, -np.inf

    def add(self, values: npt.NDArray[np.float32]) -> None:
        self._moments = self._moments.joined(Moments.of(values))
        self._lowest = min(self._lowest, float(values.min(initial=np.inf)))
        self._highest = max(self._highest, float(values.max(initial=-np.inf)))

    def described(self) -> dict[str, float] | None:
        """Return the statistics by name; None without voxels."""
        if not self._moments.count:
            return None
        return {
            "mean": self._moments.mean,
            "standard_deviation": self._moments.std,
            "minimum": self._lowest,
            "maximum": self._highest,
        }
