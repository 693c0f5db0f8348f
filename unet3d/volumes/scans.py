"""Scans to segment: finding and reading them, and writing what was found in them."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unet3d.atomic import write_atomically
from unet3d.errors import ConfigError, VolumeError
from unet3d.volumes.nifti import (
    SUFFIXES,
    Volume,
    VolumeHeader,
    is_volume_file,
    read_image,
    same_grid,
    volume_stem,
    write_label,
)

SUFFIX = "_seg.nii.gz"

CHANNEL = re.compile(r"(.+)_\d{4}")
"""How the file of one channel is named, without its ending."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What is segmented at once."""

    images: tuple[Path, ...]
    """One file, or one for each channel."""
    output: Path
    """Where the segmentation goes."""

    @property
    def statistics(self) -> Path:
        """Where its statistics go: beside the segmentation."""
        return self.output.with_name(f"{volume_stem(self.output)}.json")


def find_scans(
    inputs: Sequence[Path],
    output: Path | None,
    num_channels: int,
    overwrite: bool,
    statistics: bool = False,
) -> list[Scan]:
    """Return what to segment and where to, after a look at all of it.

    Args:
        inputs: Files and folders; a folder's own earlier segmentations are left out. Files named
            ``case_0000``, ``case_0001``, ... are the channels of one scan where the network wants
            several.
        output: A file for one scan, a folder for any number, None: beside each scan.
        num_channels: Of the network.
        overwrite: Whether existing files may be replaced.
        statistics: Whether statistics will be written too.

    Raises:
        VolumeError: There is nothing to segment, or a channel is missing.
        ConfigError: Outputs exist already, or fall together.
    """
    groups = _groups(inputs, num_channels)
    if output is not None and len(groups) > 1 and is_volume_file(output) and not output.is_dir():
        raise ConfigError(f"{output} is one file for {len(groups)} scans; name a folder")
    scans = [Scan(images=images, output=_output_of(images, output)) for images in groups]
    sources = {image.resolve() for scan in scans for image in scan.images}
    by_output: dict[Path, Scan] = {}
    for scan in scans:
        if not scan.output.name.endswith((".nii", ".nii.gz")):
            raise ConfigError(f"{scan.output}: name a .nii or .nii.gz file, or a folder")
        if scan.output.resolve() in sources:
            raise ConfigError(f"{scan.output} is itself to be segmented; choose another --output")
        twin = by_output.setdefault(scan.output.resolve(), scan)
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
    """Read a scan whose channels may be in files of their own.

    Raises:
        VolumeError: A file cannot be read, or the channels are on different grids.
    """
    volumes = [read_image(path) for path in scan.images]
    first = volumes[0].header
    for volume in volumes[1:]:
        difference = same_grid(first, volume.header)
        if difference:
            raise VolumeError(f"{first.path} and {volume.header.path} do not match: {difference}")
    if len(volumes) == 1:
        return volumes[0]
    array = np.concatenate([volume.array for volume in volumes])
    return Volume(array=array, header=replace(first, num_channels=len(array)))


def write_segmentation(scan: Scan, labels: npt.NDArray[Any], header: VolumeHeader) -> None:
    """Write a scan's segmentation on the scan's own grid.

    Raises:
        VolumeError: The file cannot be written.
    """
    try:
        scan.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VolumeError(f"cannot write to {scan.output.parent}: {error.strerror}") from error
    write_label(scan.output, labels, header)


def label_statistics(
    labels: npt.NDArray[Any], image: Volume, label_names: dict[int, str]
) -> dict[str, Any]:
    """Return volume and intensity of each label.

    Args:
        labels: (X, Y, Z) on the image's grid.
        image: The scan.
        label_names: Per label value, the background left out.

    Returns:
        Per label name: ``volume_ml``, ``num_voxels``, and per channel the mean, standard
        deviation, minimum and maximum of the scan's intensities (None for an absent label).
    """
    voxel_ml = float(np.prod(image.header.spacing_mm)) / 1000
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
    """Write statistics as JSON beside a segmentation; return the file.

    Raises:
        VolumeError: The file cannot be written.
    """
    content = {"image": [str(image) for image in scan.images], "labels": statistics}
    text = json.dumps(content, indent=2) + "\n"
    try:
        write_atomically(scan.statistics, lambda file: file.write(text.encode()))
    except OSError as error:
        raise VolumeError(f"cannot write {scan.statistics}: {error.strerror}") from error
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
    """Return the files of each scan; a file that is named twice counts once."""
    groups: dict[Path, list[Path]] = {}
    for path in inputs:
        for file in _volumes_in(path) if path.is_dir() else (path,):
            match = CHANNEL.fullmatch(volume_stem(file)) if num_channels > 1 else None
            group = groups.setdefault(file.with_name(match[1]) if match else file, [])
            if file not in group:
                group.append(file)
    for case, files in groups.items():
        files.sort()
        wanted = [f"{case.name}_{channel:04d}" for channel in range(num_channels)]
        # A single file may hold every channel.
        if len(files) > 1 and [volume_stem(file) for file in files] != wanted:
            raise VolumeError(
                f"{case} has the files {', '.join(file.name for file in files)} but the network "
                f"wants its {num_channels} channels as {wanted[0]} to {wanted[-1]}"
            )
    return [tuple(files) for files in groups.values()]


def _volumes_in(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.iterdir()
        if is_volume_file(file)
        and not file.name.startswith(".")
        and not file.name.endswith(SUFFIX)
        and not _has_header_file(file)
    )
    if not files:
        raise VolumeError(f"{folder} holds no volumes to segment; known: {', '.join(SUFFIXES)}")
    return files


def _has_header_file(file: Path) -> bool:
    """Tell whether a volume of two files is counted by its other file."""
    header = {".img": ".hdr", ".IMG": ".HDR"}.get(file.suffix)
    return header is not None and file.with_suffix(header).exists()


def _output_of(images: tuple[Path, ...], output: Path | None) -> Path:
    match = CHANNEL.fullmatch(volume_stem(images[0])) if len(images) > 1 else None
    name = (match[1] if match else volume_stem(images[0])) + SUFFIX
    if output is None:
        return images[0].with_name(name)
    if output.is_dir() or not output.suffix:
        return output / name
    return output
