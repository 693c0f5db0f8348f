"""Scans to segment: finding and reading them, and writing what was found in them."""

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.atomic import make_folder, write_atomically
from unet3d.errors import ConfigError, VolumeError, reason_of
from unet3d.volumes.files import (
    SUFFIXES,
    is_nifti_file,
    is_volume_file,
    members,
    stands_for_volume,
    volume_stem,
)
from unet3d.volumes.grids import voxel_mm3
from unet3d.volumes.header import VolumeHeader, shear_warning
from unet3d.volumes.nifti import Volume, read_channels, write_label

logger = logging.getLogger(__name__)

SUFFIX = "_seg.nii.gz"
"""How the names of our segmentations end."""

CHANNEL = re.compile(r"(.+)_\d{4}")
"""How the file of one channel is named, without its ending."""


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


def find_scans(
    inputs: Sequence[Path],
    output: Path | None,
    num_channels: int,
    overwrite: bool,
    statistics: bool = False,
) -> list[Scan]:
    """Return what to segment and where to, once all names have been checked.

    Args:
        inputs: Files and folders; a folder's own earlier segmentations are left out. Files named
            ``case_0000``, ``case_0001``, ... are the channels of one scan where the network takes
            several.
        output: A file for one scan, a folder for any number, None: beside each scan.
        num_channels: Channels that the network takes.
        overwrite: Whether existing files may be replaced.
        statistics: Whether statistics will be written too.

    Raises:
        VolumeError: There is nothing to segment, or a channel is missing.
        ConfigError: An output exists already, or two scans have the same one.
    """
    groups = _groups(inputs, num_channels)
    if output is not None and len(groups) > 1 and is_volume_file(output) and not output.is_dir():
        raise ConfigError(f"{output} is one file for {len(groups)} scans; name a folder")
    scans = [Scan(images=images, output=_output_of(images, output)) for images in groups]
    # realpath leaves links that lead to themselves as they are; reading refuses them.
    sources = {os.path.realpath(image) for scan in scans for image in scan.images}
    by_output: dict[str, Scan] = {}
    for scan in scans:
        if not is_nifti_file(scan.output):
            raise ConfigError(f"{scan.output}: name a .nii or .nii.gz file, or a folder")
        if os.path.realpath(scan.output) in sources:
            raise ConfigError(f"{scan.output} is itself to be segmented; choose another --output")
        twin = by_output.setdefault(os.path.realpath(scan.output), scan)
        if twin is not scan:
            raise ConfigError(
                f"{twin.images[0]} and {scan.images[0]} would both be written to {scan.output}; "
                "segment one of them, or one after the other"
            )
        for path in (scan.output, scan.statistics) if statistics else (scan.output,):
            if path.exists() and not overwrite:
                raise ConfigError(f"{path} exists; add --overwrite to replace it")
    return scans


def read_scan(scan: Scan) -> Volume:
    """Read the image of a scan, with all its channels.

    Raises:
        VolumeError: A file cannot be read, or the channels are on different grids.
    """
    image = read_channels(scan.images)
    warning = shear_warning(image.header)
    if warning is not None:
        logger.warning("%s", warning)
    return image


def write_segmentation(scan: Scan, labels: npt.NDArray[Any], header: VolumeHeader) -> None:
    """Write a scan's segmentation on the scan's own grid.

    Args:
        scan: Says where to.
        labels: Label values, shape (X, Y, Z).
        header: Header of the scan's image.

    Raises:
        VolumeError: The file cannot be written.
    """
    try:
        make_folder(scan.output.parent)
    except OSError as error:
        raise VolumeError(
            f"cannot write to {scan.output.parent}: {reason_of(error)}; choose another --output"
        ) from error
    write_label(scan.output, labels, header)


def label_statistics(
    labels: npt.NDArray[Any], image: Volume, label_names: dict[int, str]
) -> dict[str, Any]:
    """Return volume and intensity of each label.

    Args:
        labels: Label values, shape (X, Y, Z), on the image's grid.
        image: The scan's.
        label_names: Name of each label value without the background.

    Returns:
        Per label name: ``volume_ml``, ``num_voxels``, and per channel the mean, standard
        deviation, minimum and maximum of the scan's intensities (None for an absent label).
    """
    voxel_ml = voxel_mm3(image.header.affine) / 1000
    statistics: dict[str, Any] = {}
    for value, name in label_names.items():
        inside = labels == value
        count = int(inside.sum())
        channels = [_intensity(channel[inside]) if count else None for channel in image.array]
        statistics[name] = {
            "value": value,
            "num_voxels": count,
            "volume_ml": count * voxel_ml,
            "intensity": channels,
        }
    return statistics


def write_statistics(scan: Scan, statistics: dict[str, Any]) -> Path:
    """Write statistics as JSON beside a segmentation.

    Args:
        scan: Says where to.
        statistics: From :func:`label_statistics`.

    Returns:
        The file.

    Raises:
        VolumeError: The file cannot be written.
    """
    content = {"image": [str(image) for image in scan.images], "labels": statistics}
    text = json.dumps(content, indent=2) + "\n"
    try:
        write_atomically(scan.statistics, lambda file: file.write(text.encode()))
    except OSError as error:
        raise VolumeError(
            f"cannot write {scan.statistics}: {reason_of(error)}; choose another --output"
        ) from error
    return scan.statistics


def _intensity(values: npt.NDArray[np.float32]) -> dict[str, float]:
    wide = values.astype(np.float64)
    return {
        "mean": float(wide.mean()),
        "standard_deviation": float(wide.std()),
        "minimum": float(wide.min()),
        "maximum": float(wide.max()),
    }


def _groups(inputs: Iterable[Path], num_channels: int) -> list[tuple[Path, ...]]:
    """Return the files of each scan; a volume that is named twice counts once."""
    groups: dict[Path, list[Path]] = {}
    named: set[tuple[Path, ...]] = set()
    for path in inputs:
        for file in _volumes_in(path) if path.is_dir() else (path,):
            if members(file) in named:
                continue
            named.add(members(file))
            match = CHANNEL.fullmatch(volume_stem(file)) if num_channels > 1 else None
            groups.setdefault(file.with_name(match[1]) if match else file, []).append(file)
    for case, files in groups.items():
        files.sort(key=volume_stem)
        wanted = [f"{case.name}_{channel:04d}" for channel in range(num_channels)]
        # A single file may hold every channel.
        if len(files) > 1 and [volume_stem(file) for file in files] != wanted:
            raise VolumeError(
                f"{case} has the files {', '.join(file.name for file in files)} but the network "
                f"takes {num_channels} channels; name them {wanted[0]} to {wanted[-1]}"
            )
    return [tuple(files) for files in groups.values()]


def _volumes_in(folder: Path) -> list[Path]:
    try:
        files = sorted(
            file
            for file in folder.iterdir()
            if stands_for_volume(file)
            and not file.name.startswith(".")
            and not file.name.lower().endswith(SUFFIX)
        )
    except OSError as error:
        raise VolumeError(f"cannot list {folder}: {reason_of(error)}") from error
    if not files:
        raise VolumeError(f"{folder} holds no volumes to segment; known: {', '.join(SUFFIXES)}")
    return files


def _output_of(images: tuple[Path, ...], output: Path | None) -> Path:
    match = CHANNEL.fullmatch(volume_stem(images[0])) if len(images) > 1 else None
    name = (match[1] if match else volume_stem(images[0])) + SUFFIX
    if output is None:
        return images[0].with_name(name)
    if output.is_dir() or not output.suffix:
        return output / name
    return output
