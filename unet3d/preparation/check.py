"""Checks for whatever would break a training on a data set, before it starts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np

from unet3d.datasets.contents import CaseContents, intensities_of, voxels_of
from unet3d.datasets.dataset import NO_LABEL, Case, Dataset, Finding
from unet3d.errors import VolumeError, some
from unet3d.images.files import is_volume_file, members, times
from unet3d.images.geometry import Geometry, same_grid, shear_warning, voxel_mm3
from unet3d.images.image import open_image
from unet3d.images.labels import read_label
from unet3d.preparation.resample import (
    SpacingSetting,
    median_spacing,
    target_spacing,
    visible_shape,
)

UNUSUAL_RATIO = 30.0
"""A spacing so many times larger or smaller than the median is probably in another unit."""

logger = logging.getLogger(__name__)


def check_headers(dataset: Dataset, spacing_mm: SpacingSetting = "median") -> list[Finding]:
    """Return everything that is wrong, as far as headers tell; training does this first.

    It finds files that are missing or that no case names, unreadable headers, wrong numbers of
    channels, 4-D label maps, images and label maps that are not on one grid, tilted axes, spacings
    far from those of the other cases, and cases that are too large for the memory once they are
    resampled, as ``data.spacing_mm`` says.
    """
    return _examine(dataset, spacing_mm)


def check_dataset(dataset: Dataset, watch: Callable[[str], object] = logger.debug) -> list[Finding]:
    """Check everything, voxels included.

    It finds all that training finds before it starts, label values that dataset.json lacks, empty
    label maps, NaN, infinite, huge and constant images, and files whose voxels cannot be read.

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
    measured: list[CaseContents] = []
    return _examine(dataset, "median", measured, watch), measured


def _examine(
    dataset: Dataset,
    spacing_mm: SpacingSetting,
    measured: list[CaseContents] | None = None,
    watch: Callable[[str], object] = logger.debug,
) -> list[Finding]:
    """Return all findings; voxels are read only where they are to be measured."""
    watch("reading headers")
    headers: dict[str, dict[Path, Geometry]] = {}
    findings: dict[str, list[Finding]] = {}
    for case in dataset.cases:
        headers[case.name], findings[case.name] = _read_headers(case)
    images = {
        case.name: headers[case.name][case.images[0]]
        for case in dataset.cases
        if case.images[0] in headers[case.name]
    }
    for finding in _spacing_findings(images, spacing_mm, len(dataset.channel_names)):
        findings[finding.case].append(finding)
    for number, case in enumerate(dataset.cases, start=1):
        found, readable = findings[case.name], headers[case.name]
        found += _header_findings(dataset, case, readable)
        if measured is None or not readable:
            continue
        watch(f"checking {case.name}, {number} of {len(dataset.cases)}")
        header = next(iter(readable.values()))
        contents = CaseContents(
            name=case.name,
            shape=header.shape,
            spacing_mm=header.spacing_mm,
            voxel_ml=voxel_mm3(header.affine) / 1000,
        )
        found += _image_findings(case, readable, contents)
        found += _label_findings(dataset, case, readable, contents)
        measured.append(contents)
    return [*dataset.faults, *chain.from_iterable(findings.values()), *_unnamed_files(dataset)]


def _error(case: Case, message: str) -> Finding:
    return Finding(case=case.name, severity="error", message=message)


def _warning(case: str, message: str) -> Finding:
    return Finding(case=case, severity="warning", message=message)


def _read_headers(case: Case) -> tuple[dict[Path, Geometry], list[Finding]]:
    """Return the headers that can be read, and what is wrong with the others."""
    headers, findings = {}, []
    for path in (*case.images, case.label):
        if os.path.lexists(path):
            try:
                headers[path] = open_image(path).geometry
            except VolumeError as error:
                findings.append(_error(case, str(error)))
        elif path == case.label:
            missing = f"{case.name} has no label map: {path} is missing; {NO_LABEL}"
            findings.append(_error(case, missing))
        else:
            remedy = "restore it or take the case out of dataset.json"
            findings.append(_error(case, f"{path} is missing; {remedy}"))
    return headers, findings


def _header_findings(
    dataset: Dataset, case: Case, headers: Mapping[Path, Geometry]
) -> Iterator[Finding]:
    label = headers.get(case.label)
    if label is not None and label.num_channels != 1:
        many = f"4-D with {label.num_channels} channels"
        yield _error(case, f"{label.path} is {many}; a label map is 3-D")
    num_channels = sum(headers[path].num_channels for path in case.images if path in headers)
    if headers.keys() >= {*case.images} and num_channels != len(dataset.channel_names):
        have = f"{case.images[0]} has {num_channels} channel(s)"
        named = f"{len(dataset.channel_names)}: {some(dataset.channel_names)}"
        yield _error(case, f"{have} but dataset.json names {named}")
    readable = list(headers.values())
    for header in readable[1:]:
        disagreement = same_grid(readable[0], header)
        if disagreement:
            where = f"not on the grid of {readable[0].path}"
            yield _error(case, f"{header.path} is {where}: {disagreement}")


def _spacing_findings(
    images: Mapping[str, Geometry], setting: SpacingSetting, num_channels: int
) -> Iterator[Finding]:
    """Compare the spacings of the cases, and count what resampling them takes."""
    if not images:
        return
    spacings_mm = [header.spacing_mm for header in images.values()]
    median_mm = median_spacing(spacings_mm)
    target_mm = target_spacing(spacings_mm, [header.shape for header in images.values()], setting)
    for name, header in images.items():
        shear = shear_warning(header)
        if shear is not None:
            yield _warning(name, shear)
        try:
            visible_shape(header.shape, header.spacing_mm, target_mm, num_channels)
        except VolumeError as error:
            yield Finding(case=name, severity="error", message=f"{header.path}: {error}")
            continue
        ratios = np.divide(header.spacing_mm, median_mm)
        if max(ratios.max(), 1 / ratios.min()) > UNUSUAL_RATIO:
            yield _warning(
                name,
                f"{header.path} has the spacing {times(header.spacing_mm)} mm, but the median of "
                f"the data set is {times(median_mm)} mm; are the units in its header right?",
            )


def _image_findings(
    case: Case, headers: Mapping[Path, Geometry], contents: CaseContents
) -> Iterator[Finding]:
    """Check and measure the voxels of all images whose headers can be read."""
    channel = 0
    for path in case.images:
        try:
            image = open_image(path).whole() if path in headers else np.empty(0)
        except VolumeError as error:
            yield _error(case, str(error))
            image = np.empty(0)
        num_wrong = image.size - int(np.count_nonzero(np.isfinite(image)))
        if num_wrong:
            many = f"{num_wrong} voxels of {image.size} that are NaN or infinite"
            yield _error(case, f"{path} has {many}; replace them, for example by 0")
            image = np.empty(0)
        for number, array in enumerate(image):
            lowest, *_, highest = contents.intensities[channel + number] = intensities_of(array)
            if lowest == highest:
                where = f"every voxel of channel {number}"
                yield _warning(case.name, f"{path} is {lowest:g} in {where}")
        channel += headers[path].num_channels if path in headers else 1


def _label_findings(
    dataset: Dataset, case: Case, headers: Mapping[Path, Geometry], contents: CaseContents
) -> Iterator[Finding]:
    """Check and count the voxels of a label map, where its header can be read and is right."""
    if case.label not in headers or headers[case.label].num_channels != 1:
        return
    try:
        contents.num_voxels = voxels_of(read_label(case.label).array)
    except VolumeError as error:
        yield _error(case, str(error))
        return
    known = {*dataset.label_values, dataset.ignore_value}
    unknown = sorted(contents.num_voxels.keys() - known)
    if unknown:
        named = f"dataset.json names {some(dataset.label_values)}"
        held = f"{case.label} holds the value(s) {some(unknown)}"
        yield _error(case, f"{held}, but {named}; correct one of them")
    elif contents.num_voxels.keys() <= {0, dataset.ignore_value}:
        what = "background" if [*contents.num_voxels] == [0] else "background or ignored"
        yield _warning(case.name, f"{case.label} is empty: every voxel is {what}")


def _unnamed_files(dataset: Dataset) -> Iterator[Finding]:
    """Look for volumes in imagesTr and labelsTr that no case names: they are not trained on."""
    volumes = [file for case in dataset.cases for file in (*case.images, case.label)]
    files = [file for path in volumes if os.path.lexists(path) for file in members(path)]
    named = {os.path.realpath(file) for file in files}
    for folder in (dataset.root / "imagesTr", dataset.root / "labelsTr"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_volume = is_volume_file(path) and path.is_file() and not path.name.startswith(".")
            if is_volume and os.path.realpath(path) not in named:
                yield _warning(path.name, f"{path} belongs to no case and is not used")
