"""Checks for whatever would break a training on a data set, before it starts."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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


class Examined(NamedTuple):
    """What was found out about a data set."""

    findings: list[Finding]
    """Everything that is wrong or looks wrong, case after case."""
    geometries: list[Geometry]
    """Of the first image of each case, where its header can be read."""
    contents: list[CaseContents]
    """What the readable cases hold, if voxels are read."""


def check_headers(dataset: Dataset, spacing_mm: SpacingSetting = "median") -> list[Finding]:
    """Return everything that is wrong, as far as headers tell; training does this first."""
    return examine(dataset, spacing_mm).findings


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
    return examine(dataset, watch=watch).findings


def examine(
    dataset: Dataset,
    spacing_mm: SpacingSetting = "median",
    watch: Callable[[str], object] | None = None,
) -> Examined:
    """Look at headers, and where somebody watches also at voxels, which takes long.

    ``spacing_mm`` is the setting ``data.spacing_mm``: resampled cases must fit in memory.
    """
    findings: dict[str, list[Finding]] = {case.name: [] for case in dataset.cases}
    contents: list[CaseContents] = []
    if watch is not None:
        watch("reading headers")
    headers = {case.name: _read_headers(case, findings[case.name]) for case in dataset.cases}
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
        if watch is None or not readable:
            continue
        watch(f"checking {case.name}, {number} of {len(dataset.cases)}")
        header = next(iter(readable.values()))
        measured = CaseContents(
            name=case.name,
            shape=header.shape,
            spacing_mm=header.spacing_mm,
            voxel_ml=voxel_mm3(header.affine) / 1000,
        )
        found += _image_findings(case, readable, measured)
        found += _label_findings(dataset, case, readable, measured)
        contents.append(measured)
    in_order = [*dataset.faults, *chain.from_iterable(findings.values()), *_unnamed_files(dataset)]
    return Examined(in_order, list(images.values()), contents)


def _error(case: str, message: str) -> Finding:
    return Finding(case=case, severity="error", message=message)


def _warning(case: str, message: str) -> Finding:
    return Finding(case=case, severity="warning", message=message)


def _read_headers(case: Case, findings: list[Finding]) -> dict[Path, Geometry]:
    """Return the headers that can be read, and add a finding for each of the others."""
    headers = {}
    for path in (*case.images, case.label):
        if os.path.lexists(path):
            try:
                headers[path] = open_image(path).geometry
            except VolumeError as error:
                findings.append(_error(case.name, str(error)))
            continue
        message = f"{path} is missing; restore it or take the case out of the data set"
        if path == case.label:
            message = f"{case.name} has no label map: {path} is missing; {NO_LABEL}"
        findings.append(_error(case.name, message))
    return headers


def _header_findings(
    dataset: Dataset, case: Case, headers: Mapping[Path, Geometry]
) -> Iterator[Finding]:
    label = headers.get(case.label)
    if label is not None and label.num_channels != 1:
        many = f"4-D with {label.num_channels} channels"
        yield _error(case.name, f"{label.path} is {many}; a label map is 3-D")
    num_channels = sum(headers[path].num_channels for path in case.images if path in headers)
    if headers.keys() >= {*case.images} and num_channels != len(dataset.channel_names):
        named = f"{len(dataset.channel_names)}: {some(dataset.channel_names)}"
        have = f"{case.images[0]} has {num_channels} channel(s)"
        yield _error(case.name, f"{have} but dataset.json names {named}")
    readable = list(headers.values())
    for header in readable[1:]:
        disagreement = same_grid(readable[0], header)
        if disagreement:
            where = f"not on the grid of {readable[0].path}"
            yield _error(case.name, f"{header.path} is {where}: {disagreement}")


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
            yield _error(name, f"{header.path}: {error}")
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
            yield _error(case.name, str(error))
            image = np.empty(0)
        num_wrong = image.size - int(np.count_nonzero(np.isfinite(image)))
        if num_wrong:
            many = f"{num_wrong} voxels of {image.size} that are NaN or infinite"
            yield _error(case.name, f"{path} has {many}; replace them, for example by 0")
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
        yield _error(case.name, str(error))
        return
    known = {*dataset.label_values, dataset.ignore_value}
    unknown = sorted(contents.num_voxels.keys() - known)
    if unknown:
        named = f"dataset.json names {some(dataset.label_values)}"
        held = f"{case.label} holds the value(s) {some(unknown)}"
        yield _error(case.name, f"{held}, but {named}; correct one of them")
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
