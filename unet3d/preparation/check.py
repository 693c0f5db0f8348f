"""Checks for whatever would break a training on a data set, before it starts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from unet3d.datasets.contents import CaseContents, intensities_of, voxels_of
from unet3d.datasets.dataset import NO_LABEL, Case, Dataset, Finding
from unet3d.errors import VolumeError, some
from unet3d.images.files import is_volume_file, members, times
from unet3d.images.grids import voxel_mm3
from unet3d.images.header import VolumeHeader, read_header, same_grid, shear_warning
from unet3d.images.nifti import read_image, read_label
from unet3d.preparation.resample import affordable_shape
from unet3d.preparation.target_spacing import SpacingSetting, median_spacing, target_spacing

UNUSUAL_RATIO = 30.0
"""A spacing so many times larger or smaller than the median is probably in another unit."""

logger = logging.getLogger(__name__)


def check_headers(dataset: Dataset, spacing_mm: SpacingSetting = "median") -> list[Finding]:
    """Check what can be checked without reading voxels; training does this first.

    It finds files that are missing or that no case names, unreadable headers, wrong numbers of
    channels, 4-D label maps, images and label maps that are not on one grid, tilted axes, spacings
    far from those of the other cases, and cases that resampling would make too large for the
    memory.

    Args:
        dataset: The data set.
        spacing_mm: What cases will be resampled to, as data.spacing_mm says it.

    Returns:
        Everything that is wrong or looks wrong, case after case.
    """
    _, findings = _check_headers(dataset, spacing_mm)
    return [*dataset.faults, *_in_order(dataset, findings), *_unnamed_files(dataset)]


def check_dataset(dataset: Dataset, watch: Callable[[str], object] = logger.debug) -> list[Finding]:
    """Check everything, voxels included.

    It finds all that :func:`check_headers` finds, label values that dataset.json lacks, empty label
    maps, NaN, infinite, huge and constant images, and files whose voxels cannot be read.

    Args:
        dataset: The data set.
        watch: Is told what is read next: on a large data set this takes minutes.

    Returns:
        Everything that is wrong or looks wrong, case after case.
    """
    return examine(dataset, watch)[0]


def examine(
    dataset: Dataset, watch: Callable[[str], object]
) -> tuple[list[Finding], list[CaseContents]]:
    """Return the findings of :func:`check_dataset`, and what the readable cases hold."""
    watch("reading headers")
    headers, findings = _check_headers(dataset, "median")
    measured = []
    for number, case in enumerate(dataset.cases, start=1):
        watch(f"checking {case.name}, {number} of {len(dataset.cases)}")
        readable = headers[case.name]
        if readable:
            header = next(iter(readable.values()))
            contents = CaseContents(
                name=case.name,
                shape=header.shape,
                spacing_mm=header.spacing_mm,
                voxel_ml=voxel_mm3(header.affine) / 1000,
            )
            findings += _voxel_findings(dataset, case, readable, contents)
            measured.append(contents)
    return [*dataset.faults, *_in_order(dataset, findings), *_unnamed_files(dataset)], measured


def _in_order(dataset: Dataset, findings: list[Finding]) -> list[Finding]:
    number_of = {case.name: number for number, case in enumerate(dataset.cases)}
    return sorted(findings, key=lambda finding: number_of[finding.case])


def _check_headers(
    dataset: Dataset, spacing_mm: SpacingSetting
) -> tuple[dict[str, dict[Path, VolumeHeader]], list[Finding]]:
    """Return the headers of each case that can be read, and the findings of all cases."""
    headers: dict[str, dict[Path, VolumeHeader]] = {}
    findings: list[Finding] = []
    for case in dataset.cases:
        headers[case.name], of_case = _read_headers(case)
        findings += [*of_case, *_header_findings(dataset, case, headers[case.name])]
    images = {
        case.name: headers[case.name][case.images[0]]
        for case in dataset.cases
        if case.images[0] in headers[case.name]
    }
    findings += _spacing_findings(images, spacing_mm, len(dataset.channel_names))
    return headers, findings


def _read_headers(case: Case) -> tuple[dict[Path, VolumeHeader], list[Finding]]:
    """Return the headers that can be read, and what is wrong with the others."""
    headers, findings = {}, []
    for path in (*case.images, case.label):
        try:
            if path == case.label and not os.path.lexists(path):
                raise VolumeError(f"{case.name} has no label map: {path} is missing; {NO_LABEL}")
            headers[path] = _header(path)
        except VolumeError as error:
            findings.append(Finding(case=case.name, severity="error", message=str(error)))
    return headers, findings


def _header_findings(
    dataset: Dataset, case: Case, headers: Mapping[Path, VolumeHeader]
) -> Iterator[Finding]:
    images = [headers[path] for path in case.images if path in headers]
    label = headers.get(case.label)
    if label is not None and label.num_channels != 1:
        yield Finding(
            case=case.name,
            severity="error",
            message=f"{label.path} is 4-D with {label.num_channels} channels; a label map is 3-D",
        )
    num_channels = sum(header.num_channels for header in images)
    if len(images) == len(case.images) and num_channels != len(dataset.channel_names):
        yield Finding(
            case=case.name,
            severity="error",
            message=f"{case.images[0]} has {num_channels} channel(s) but dataset.json names "
            f"{len(dataset.channel_names)}: {some(dataset.channel_names)}",
        )
    readable = list(headers.values())
    for header in readable[1:]:
        disagreement = same_grid(readable[0], header)
        if disagreement:
            yield Finding(
                case=case.name,
                severity="error",
                message=f"{header.path} is not on the grid of {readable[0].path}: {disagreement}",
            )


def _spacing_findings(
    images: Mapping[str, VolumeHeader], setting: SpacingSetting, num_channels: int
) -> Iterator[Finding]:
    """Compare the spacings of the cases, and count what resampling them takes."""
    if not images:
        return
    spacings_mm = [header.spacing_mm for header in images.values()]
    median_mm = median_spacing(spacings_mm)
    target_mm = target_spacing(spacings_mm, [header.shape for header in images.values()], setting)
    for name, header in images.items():
        warning = shear_warning(header)
        if warning is not None:
            yield Finding(case=name, severity="warning", message=warning)
        try:
            affordable_shape(header.shape, header.spacing_mm, target_mm, num_channels)
        except VolumeError as error:
            message = f"{header.path}: {error}"
            yield Finding(case=name, severity="error", message=message)
            continue
        ratios = np.divide(header.spacing_mm, median_mm)
        if max(ratios.max(), 1 / ratios.min()) > UNUSUAL_RATIO:
            yield Finding(
                case=name,
                severity="warning",
                message=f"{header.path} has the spacing {times(header.spacing_mm)} mm, but the "
                f"median of the data set is {times(median_mm)} mm; are the units in its header "
                "right?",
            )


def _header(path: Path) -> VolumeHeader:
    if not os.path.lexists(path):
        raise VolumeError(f"{path} is missing; restore it or take the case out of dataset.json")
    return read_header(path)


def _unnamed_files(dataset: Dataset) -> Iterator[Finding]:
    """Look for volumes in imagesTr and labelsTr that no case names: they are not trained on."""
    of_cases = [file for case in dataset.cases for file in (*case.images, case.label)]
    volumes = (*of_cases, *dataset.unlabelled)
    named = {os.path.realpath(file) for volume in volumes for file in members(volume)}
    for folder in (dataset.root / "imagesTr", dataset.root / "labelsTr"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            hidden = path.name.startswith(".")
            is_volume = not hidden and path.is_file() and is_volume_file(path)
            if is_volume and os.path.realpath(path) not in named:
                yield Finding(
                    case=path.name,
                    severity="warning",
                    message=f"{path} belongs to no case and is not used",
                )


def _voxel_findings(
    dataset: Dataset, case: Case, headers: Mapping[Path, VolumeHeader], contents: CaseContents
) -> Iterator[Finding]:
    """Check and measure the voxels of all files whose headers can be read."""
    next_channel = 0
    for path in case.images:
        first, next_channel = next_channel, next_channel + 1
        if path not in headers:
            continue
        next_channel = first + headers[path].num_channels
        try:
            image = read_image(path).array
        except VolumeError as error:  # NaN and infinity too
            yield Finding(case=case.name, severity="error", message=str(error))
            continue
        for channel, array in enumerate(image):
            lowest, *_, highest = contents.intensities[first + channel] = intensities_of(array)
            if lowest == highest:
                message = f"{path} is {lowest:g} in every voxel of channel {channel}"
                yield Finding(case=case.name, severity="warning", message=message)
    if case.label not in headers or headers[case.label].num_channels != 1:
        return  # reported already; a 4-D label map has no single label for a voxel
    try:
        contents.num_voxels = voxels_of(read_label(case.label).array)
    except VolumeError as error:
        yield Finding(case=case.name, severity="error", message=str(error))
        return
    values = sorted(contents.num_voxels)
    known = {*dataset.label_values, dataset.ignore_value}
    unknown = [value for value in values if value not in known]
    if unknown:
        yield Finding(
            case=case.name,
            severity="error",
            message=f"{case.label} holds the value(s) {some(unknown)}, but dataset.json names "
            f"{some(dataset.label_values)}; correct one of them",
        )
    elif not {*values} - {0, dataset.ignore_value}:
        what = "background" if values == [0] else "background or ignored"
        yield Finding(
            case=case.name,
            severity="warning",
            message=f"{case.label} is empty: every voxel is {what}",
        )
