"""A scan to segment: reading it, and writing what was found in it."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.atomic import creating, make_folder, replacing
from unet3d.errors import ResultExistsError, VolumeError, reason_of
from unet3d.images.files import members, volume_stem
from unet3d.images.grids import voxel_mm3
from unet3d.images.header import VolumeHeader, shear_warning
from unet3d.images.nifti import ScanImage, open_channels, write_label
from unet3d.images.scratch import Scratch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be written of each scan, and over what."""

    statistics: bool = False
    """Whether volume and intensity of each label are described, too."""
    preview: bool = False
    """Whether a picture is drawn."""
    probabilities: bool = False
    """Whether the probability of each class is written."""
    overwrite: bool = False
    """Whether results are replaced."""
    goes_on: bool = False
    """Whether results that are complete are kept also of a single scan, and others replaced."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """One image to segment, and where its segmentation goes."""

    images: tuple[Path, ...]
    """One file, or one for each channel."""
    output: Path
    """The file of the segmentation."""

    @property
    def statistics(self) -> Path:
        """The file of its statistics, beside the segmentation."""
        return self.output.with_name(f"{volume_stem(self.output)}.json")

    @property
    def preview(self) -> Path:
        """The picture of it, beside the segmentation."""
        return self.output.with_name(f"{volume_stem(self.output)}.png")

    @property
    def probabilities(self) -> Path:
        """The file of the probabilities, beside the segmentation."""
        return self.output.with_name(f"{volume_stem(self.output)}.npy")

    def results(self, wanted: Wanted) -> list[Path]:
        """Return the files to be written.

        Args:
            wanted: What is asked for.
        """
        return [
            self.output,
            *[self.statistics] * wanted.statistics,
            *[self.preview] * wanted.preview,
            *[self.probabilities] * wanted.probabilities,
        ]


def stamps(scan: Scan) -> list[tuple[int, int, int] | None]:
    """Return what changes when a file of a scan is written: time, size and number of each.

    Args:
        scan: The scan.

    Returns:
        None for a file that is not there.
    """
    found: list[tuple[int, int, int] | None] = []
    for file in (file for image in scan.images for file in members(image)):
        try:
            status = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return found


def read_scan(scan: Scan, scratch: Scratch | None = None) -> ScanImage:
    """Open the image of a scan, with all its channels.

    Args:
        scan: The scan.
        scratch: Where packed voxels go; None: into memory.

    Raises:
        VolumeError: A file cannot be read, or the channels are on different grids.
    """
    image = open_channels(scan.images, scratch)
    warning = shear_warning(image.header)
    if warning is not None:
        logger.warning("%s", warning)
    return image


def write_segmentation(
    scan: Scan, labels: npt.NDArray[Any], header: VolumeHeader, overwrite: bool = False
) -> None:
    """Write a scan's segmentation on the scan's own grid.

    Args:
        scan: Says where to.
        labels: Label values, shape (X, Y, Z).
        header: Header of the scan's image.
        overwrite: Whether an existing file may be replaced.

    Raises:
        ResultExistsError: A file of that name has appeared.
        VolumeError: The file cannot be written.
    """
    _make_folder_of(scan.output)
    try:
        write_label(scan.output, labels, header, overwrite)
    except FileExistsError as error:
        raise _appeared(scan.output) from error


def label_statistics(
    labels: npt.NDArray[Any], image: ScanImage, label_names: dict[int, str]
) -> dict[str, Any]:
    """Return volume and intensity of each label.

    Args:
        labels: Label values, shape (X, Y, Z), on the image's grid.
        image: The scan's.
        label_names: Name of each label value without the background.

    Returns:
        Per label name (with the value, where several have one name): ``volume_ml``, ``num_voxels``,
        and per channel the mean, standard deviation, minimum and maximum of the scan's intensities
        (None for an absent label).
    """
    from scipy.ndimage import find_objects  # takes a third of a second, and few ask for it

    voxel_ml = voxel_mm3(image.header.affine) / 1000
    statistics: dict[str, Any] = {}
    names = Counter(label_names.values())
    boxes = find_objects(labels, max(label_names, default=0))
    channels = [image.voxels.channel(number) for number in range(image.voxels.num_channels)]
    for value, name in label_names.items():
        box = boxes[value - 1]
        count = 0
        intensity: list[dict[str, float] | None] = [None] * len(channels)
        if box is not None:
            inside = labels[box] == value
            count = int(inside.sum())
            intensity = [_intensity(channel[box][inside]) for channel in channels]
        # Two labels may have one name.
        statistics[name if names[name] == 1 else f"{name} ({value})"] = {
            "value": value,
            "num_voxels": count,
            "volume_ml": count * voxel_ml,
            "intensity": intensity,
        }
    return statistics


@contextmanager
def writing_statistics(
    scan: Scan,
    statistics: dict[str, Any],
    checkpoints: Sequence[Path],
    overwrite: bool = False,
) -> Iterator[None]:
    """Write statistics as JSON, which get their name after what is written in the meantime.

    Args:
        scan: Says where to: beside its segmentation.
        statistics: From :func:`label_statistics`.
        checkpoints: Files of the networks that made the segmentation.
        overwrite: Whether an existing file may be replaced.

    Raises:
        ResultExistsError: A file of that name has appeared.
        VolumeError: The file cannot be written.
    """
    content = {
        "image": [str(image) for image in scan.images],
        "checkpoints": [str(path) for path in checkpoints],
        "labels": statistics,
    }
    text = json.dumps(content, indent=2) + "\n"
    with result_file(scan.statistics, overwrite) as unfinished:
        unfinished.write_bytes(text.encode())
        yield


@contextmanager
def result_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """Make a file beside a segmentation from the one that is written in the meantime.

    Args:
        path: The file; the folders above it are made where they are missing.
        overwrite: Whether an existing file may be replaced.

    Yields:
        The name to write to.

    Raises:
        ResultExistsError: A file of that name has appeared.
        VolumeError: The file cannot be written.
    """
    _make_folder_of(path)
    publishing = replacing if overwrite else creating
    try:
        with publishing(path) as unfinished:
            yield unfinished
    except FileExistsError as error:
        raise _appeared(path) from error
    except OSError as error:
        raise VolumeError(
            f"cannot write {path}: {reason_of(error)}; choose another --output"
        ) from error


def _make_folder_of(path: Path) -> None:
    try:
        make_folder(path.parent)
    except OSError as error:
        raise VolumeError(
            f"cannot write to {path.parent}: {reason_of(error)}; choose another --output"
        ) from error


def _appeared(path: Path) -> ResultExistsError:
    return ResultExistsError(
        f"{path} was made by somebody else in the meantime, and is kept; add --overwrite to "
        "replace it"
    )


def _intensity(values: npt.NDArray[np.float32]) -> dict[str, float]:
    wide = values.astype(np.float64)
    return {
        "mean": float(wide.mean()),
        "standard_deviation": float(wide.std()),
        "minimum": float(wide.min()),
        "maximum": float(wide.max()),
    }
