"""Checks of a data set for problems that would break training."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from unet3d.config import Spacing
from unet3d.datasets.contents import CaseContents, intensities_of, voxels_of
from unet3d.datasets.dataset import NO_LABEL, Case, Dataset, Finding
from unet3d.errors import VolumeError, counted, some
from unet3d.images.files import (
    file_of,
    is_store,
    is_there,
    is_volume_file,
    members,
    volume_stem,
    volume_suffix,
)
from unet3d.images.geometry import ONE_GRID, Geometry, same_grid, shear_warning, voxel_mm3
from unet3d.images.image import Image, open_image
from unet3d.images.labels import read_label
from unet3d.images.source import Reading
from unet3d.images.units import Units
from unet3d.preparation.normalization import sampled
from unet3d.preparation.resample import (
    SpacingSetting,
    median_spacing,
    target_spacing,
    visible_shape,
)

UNUSUAL_RATIO = 30.0
"""A spacing this many times larger or smaller than the median is probably in another unit."""

Read = TypeVar("Read")


class Examined(NamedTuple):
    """The findings about a data set."""

    findings: list[Finding]
    """Everything that is wrong or looks wrong, case after case."""
    geometries: list[Geometry]
    """Geometry of the first image of each case whose header can be read."""
    contents: list[CaseContents]
    """Measurements of the readable cases, if voxels are read."""


def examine(
    dataset: Dataset,
    spacing_mm: SpacingSetting = "median",
    watch: Callable[[str], object] | None = None,
) -> Examined:
    """Check all headers and, if ``watch`` is given, all voxels.

    Headers show problems that stop training at its start, such as cases too large for memory at
    ``data.spacing_mm``. Voxels also show label values that dataset.json lacks, empty label maps,
    NaN, infinite and constant images, and unreadable files. ``watch`` gets the name of what is read
    next.
    """
    if watch is not None:
        watch("reading headers")
    checks = [_CaseCheck(dataset, case) for case in dataset.cases]
    images = [check.image for check in checks if check.image is not None]
    spacings_mm = [image.spacing_mm for image in images]
    if images:
        median_mm = median_spacing(spacings_mm)
        target_mm = target_spacing(spacings_mm, [image.shape for image in images], spacing_mm)
        for check in checks:
            check.compare_spacing(median_mm, target_mm)
    contents = []
    for number, check in enumerate(checks, start=1):
        check.compare_headers()
        if watch is not None and check.headers:
            watch(f"checking {check.case.name}, {number} of {len(checks)}")
            contents.append(check.measure())
    of_cases = [finding for check in checks for finding in check.findings]
    return Examined([*dataset.faults, *of_cases, *_unnamed_files(dataset)], images, contents)


def opened(path: Path, reading: Reading) -> Image:
    """Open one file."""
    return open_image(path, reading=reading)


class _CaseCheck:
    """The check of one case, with its findings."""

    def __init__(self, dataset: Dataset, case: Case) -> None:
        """Read the headers that can be read."""
        self.dataset, self.case = dataset, case
        self.findings: list[Finding] = []
        self.headers: dict[Path, Geometry] = {}
        for path in (*case.images, case.label):
            if not is_there(path):
                what = "has no label map: " if path == case.label else ""
                self.error(f"{what}{path} is missing; {self._remedy(path)}")
            elif (image := self.read(opened, path)) is not None:
                self.headers[path] = image.geometry
                names = image.channels_in_other_order(dataset.channel_names)
                if names:
                    order = f"{path} has the channels {some(names)}, in another order than"
                    self.error(f"{order} the data set, {some(dataset.channel_names)}; reorder them")
        self.image = self.headers.get(case.images[0])

    def reading_of(self, path: Path) -> Reading:
        """Return how a file is read: a label map with several levels at the one of its image."""
        first = self.headers.get(self.case.images[0])
        is_image, reading = path in self.case.images, self.case.reading
        return reading if is_image else reading.near(first.spacing_mm if first else None)

    def _remedy(self, path: Path) -> str:
        """Return what to do about a missing file; nnU-Net's images end in a channel's number."""
        bare = volume_stem(path).removesuffix("_0000") + volume_suffix(path)
        if bare != path.name and os.path.lexists(path.with_name(bare)):
            return f"rename {bare}, or take the case out of the data set"
        return NO_LABEL

    def error(self, message: str) -> None:
        self.findings.append(Finding(case=self.case.name, severity="error", message=message))

    def warn(self, message: str) -> None:
        self.findings.append(Finding(case=self.case.name, severity="warning", message=message))

    def read(self, reader: Callable[[Path, Reading], Read], path: Path) -> Read | None:
        """Return the content of a file; if it cannot be read, None after noting an error."""
        try:
            return reader(path, self.reading_of(path))
        except VolumeError as error:
            self.error(str(error))
        return None

    def compare_spacing(self, median_mm: Spacing, target_mm: Spacing | None) -> None:
        """Compare the spacing with the median, and check the shape and memory of resampling."""
        header = self.image
        if header is None:
            return
        shear = shear_warning(header)
        if shear is not None:
            self.warn(shear)
        try:
            num_channels = len(self.dataset.channel_names)
            visible_shape(header.shape, header.spacing_mm, target_mm, num_channels)
        except VolumeError as error:
            self.error(f"{header.path}: {error}")
            return
        ratios = np.divide(header.spacing_mm, median_mm)
        if header.has_spacing and max(ratios.max(), 1 / ratios.min()) > UNUSUAL_RATIO:
            text = Units.of(median_mm).spacing_text
            self.warn(
                f"{header.path} has the spacing {text(header.spacing_mm)}, but the median of the "
                f"data set is {text(median_mm)}; are the units in its header right?"
            )

    def compare_headers(self) -> None:
        """Compare channels with dataset.json, and grids of the files with each other."""
        label = self.headers.get(self.case.label)
        if label is not None and label.num_channels != 1:
            many = f"4-D with {label.num_channels} channels"
            self.error(f"{label.path} is {many}; a label map is 3-D")
        images, names = self.case.images, self.dataset.channel_names
        known = [self.headers[path].num_channels for path in images if path in self.headers]
        if len(known) == len(images) and sum(known) != len(names):
            found = counted(sum(known), "channel")
            named = f"dataset.json names {len(names)}: {some(names)}"
            self.error(f"{images[0]} has {found}, but {named}; correct one of them")
        readable = list(self.headers.values())
        for header in readable[1:]:
            disagreement = same_grid(readable[0], header)
            if disagreement:
                where = f"not on the grid of {readable[0].path}"
                self.error(f"{header.path} is {where}: {disagreement}; {ONE_GRID}")

    def measure(self) -> CaseContents:
        """Check and measure the voxels of all files whose headers can be read."""
        header = next(iter(self.headers.values()))
        contents = CaseContents(
            name=self.case.name,
            shape=header.shape,
            spacing_mm=header.spacing_mm,
            voxel_ml=voxel_mm3(header.affine) / 1000,
        )
        channel = 0
        for path in self.case.images:
            if path not in self.headers:
                channel += 1
                continue
            image = self.read(lambda *file: sampled(opened(*file)), path)
            if image is not None:
                contents.intensities |= self._measured(path, image, channel)
            channel += self.headers[path].num_channels
        if self.case.label in self.headers and self.headers[self.case.label].num_channels == 1:
            label_map = self.read(read_label, self.case.label)
            if label_map is not None:
                contents.num_voxels = voxels_of(label_map.array)
                self._compare_labels(contents.num_voxels)
        return contents

    def _measured(self, path: Path, image: npt.NDArray[Any], first: int) -> dict[int, list[float]]:
        """Return percentiles of each channel of a file; if voxels are not finite, note an error."""
        num_wrong = image.size - int(np.count_nonzero(np.isfinite(image)))
        if num_wrong:
            many = f"{num_wrong} of {counted(image.size, 'voxel')} that are NaN or infinite"
            self.error(f"{path} has {many}; replace them, for example by 0")
            return {}
        found = {first + number: intensities_of(array) for number, array in enumerate(image)}
        for channel, (lowest, *_, highest) in found.items():
            if lowest == highest:
                self.warn(f"{path} is {lowest:g} in every voxel of channel {channel - first}")
        return found

    def _compare_labels(self, found: dict[int, int]) -> None:
        class_of = self.dataset.class_of
        unknown = sorted(found.keys() - class_of.keys())
        if unknown:
            self.error(
                f"{self.case.label} holds values that dataset.json does not name: {some(unknown)} "
                f"(it names {some(list(class_of))}); correct one of them"
            )
        elif not any(0 < class_of[value] < len(self.dataset.label_values) for value in found):
            what = "background or ignored" if self.dataset.ignore_value in found else "background"
            self.warn(f"{self.case.label} is empty: every voxel is {what}")


def _unnamed_files(dataset: Dataset) -> Iterator[Finding]:
    """Look for volumes in imagesTr and labelsTr that no case names: they are not trained on."""
    volumes = [file for case in dataset.cases for file in (*case.images, case.label)]
    files = [file_of(file) for path in volumes for file in members(path)]
    named = {os.path.realpath(file) for file in (*volumes, *files)}
    for folder in (dataset.root / "imagesTr", dataset.root / "labelsTr"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_volume = is_store(path) or (is_volume_file(path) and path.is_file())
            if is_volume and not path.name.startswith(".") and os.path.realpath(path) not in named:
                message = f"{path} belongs to no case and is not used"
                yield Finding(case=path.name, severity="warning", message=message)
