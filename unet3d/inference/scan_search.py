"""Finds the scans to segment, and existing results."""

import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from unet3d.config import Reading, Spacing
from unet3d.errors import ConfigError, ResultExistsError, Unet3dError, VolumeError, reason_of
from unet3d.images.files import (
    SUFFIXES,
    WRITTEN_SUFFIXES,
    ZARR,
    can_be_written,
    file_of,
    format_of,
    holds_store,
    is_collection,
    is_picture,
    is_volume_file,
    is_volume_folder,
    members,
    module_of,
    place_of,
    stands_for_volume,
    store_around,
    url_of,
    volume_stem,
    volume_suffix,
    written_suffix,
)
from unet3d.images.image import open_image, open_source
from unet3d.inference.request import PredictionRequest
from unet3d.inference.scans import ENDING, ENDINGS, Scan, is_whole

MOST_VOXELS = 2**31
"""Most voxels of a volume whose labels are written to a store as a whole, and not in blocks."""

CHANNEL = re.compile(r"(.+)_\d{4}")
"""Name of the file of one channel, without its ending."""


class FoundScans(BaseModel):
    """The requested scans, grouped by what to do with them."""

    model_config = ConfigDict(frozen=True)

    to_segment: tuple[Scan, ...]
    """Scans to segment."""
    kept: tuple[Scan, ...]
    """Scans whose results exist, and are kept."""
    faults: tuple[tuple[Scan, str], ...]
    """Scans that cannot be segmented, and why."""

    @property
    def number(self) -> int:
        """Number of all scans."""
        return len(self.to_segment) + len(self.kept) + len(self.faults)


def find_scans(
    request: PredictionRequest, num_channels: int, near_mm: Spacing | None = None
) -> FoundScans:
    """Return the scans and their outputs, after checking all names.

    Images are files, folders of volumes, or folders of DICOM slices. The output is a file for one
    scan, a folder for any number, or None: beside each scan. Pyramids are read at the level nearest
    to ``near_mm``.
    """
    inputs, output, reading = request.images, request.output, request.reading(near_mm)
    groups = _groups(inputs, num_channels)
    several = len(groups) > 1 or any(is_collection(path) and path not in groups for path in inputs)
    is_folder = output is not None and (
        _is_folder_of_results(request, output)
        or not (output.suffix or volume_suffix(output))
        or (several and not is_volume_file(output))  # such as results.v2
    )
    if output is not None and not is_folder and len(groups) > 1:
        raise ConfigError(f"{output} is one file for {len(groups)} scans; name a folder")
    scans = []
    for case, images in groups.items():
        stem = case.name if len(images) > 1 else volume_stem(images[0])
        if output is None or is_folder:
            place = _place(stem, images[0], output)
        else:
            place = output
        in_blocks = _is_in_blocks(images[0], place, request, reading)
        scans.append(Scan(images=images, output=place, reading=reading, in_blocks=in_blocks))
    _refuse_collisions(scans, request)
    to_segment, kept, faults = [], [], []
    for case, scan in zip(groups, scans, strict=True):
        try:
            _refuse_other_channels(case, scan.images, num_channels)
            for result in scan.results(request):
                _refuse_irregular(result)
            if not request.overwrite:
                refuse_existing(scan, request)
            if scan.in_blocks and (request.crop or request.mask):
                from unet3d.inference.region import Region  # most predictions have none

                Region(open_image(scan.images, reading=scan.reading), request, scan.reading)
            _refuse_unwritable(scan.output)  # last, because results that are kept are not written
            to_segment.append(scan)
        except ResultExistsError:
            if len(scans) == 1 and not request.goes_on:
                raise
            kept.append(scan)
        except Unet3dError as error:
            if len(scans) == 1:
                raise
            faults.append((scan, str(error)))
    return FoundScans(to_segment=tuple(to_segment), kept=tuple(kept), faults=tuple(faults))


def refuse_early(request: PredictionRequest) -> None:
    """Check names and headers as far as possible before networks are read."""
    inputs, output = request.images, request.output
    if not any(url_of(path) or os.path.exists(file_of(path)) for path in inputs):
        raise VolumeError(f"there is no file or folder {inputs[0]}; name a scan, or a folder")
    if request.mask is not None:
        open_source(request.mask, request.reading().near(None))
    for path in inputs:
        if is_collection(path):
            _volumes_in(path)
        elif len(inputs) == 1:  # if there are more, the others can be segmented
            open_source(path, request.reading())
            if output is None or _is_folder_of_results(request, output):
                place = _place(volume_stem(_named(path)), _named(path), output)
            elif output.suffix:
                place = output
            else:
                continue
            _asks_for_blocks(place, request)
            _refuse_collisions([Scan(images=(path,), output=place)], request)
            _refuse_irregular(place)
            if not request.overwrite and not request.goes_on:
                refuse_existing(Scan(images=(path,), output=place), request)
            if not os.path.lexists(place):  # an existing file may be kept
                _refuse_unwritable(place)


def _is_folder_of_results(request: PredictionRequest, output: Path) -> bool:
    """Return whether an output is a folder, by its content or its last ``/``, and not a store."""
    ends_as_folder = request.in_folder and volume_suffix(output) not in ZARR.suffixes
    return ends_as_folder or is_collection(output)


def _place(stem: str, scan: Path, output: Path | None) -> Path:
    """Return the file of a scan's segmentation.

    In a folder other than the scan's, it has the name of the case, without nnU-Net's channel number
    ``_0000``, so that it pairs with a label map by name. That of a URL is in the current folder.
    """
    suffix, folder = written_suffix(scan), Path() if url_of(scan) else file_of(scan).parent
    if output is None or os.path.realpath(output) == os.path.realpath(folder):
        return (output or folder) / f"{stem}{ENDING}{suffix}"
    return output / f"{stem.removesuffix('_0000')}{suffix}"


def refuse_existing(scan: Scan, request: PredictionRequest) -> None:
    """Raise ResultExistsError if all results of a scan exist, ConfigError if only some do.

    With ``--continue``, raise nothing unless all results exist and are complete.
    """
    results = scan.results(request)
    existing = [path for path in results if _exists(path) and not _may_be_filled(path)]
    if existing == results and not (request.goes_on and not all(map(is_whole, results))):
        raise ResultExistsError(
            f"{place_of(scan.output)} exists; add --overwrite to replace it, or --continue to keep "
            "it"
        )
    if existing and not request.goes_on:
        missing = " and ".join(path.name for path in results if path not in existing)
        raise ConfigError(
            f"{existing[0]} exists, but not {missing}; add --overwrite to write all results anew, "
            "or --continue to write only missing ones"
        )


def _refuse_collisions(scans: Sequence[Scan], request: PredictionRequest) -> None:
    inputs = [*(image for scan in scans for image in scan.images), *filter(None, [request.mask])]
    sources = {os.path.realpath(file_of(image)) for image in inputs}
    by_output: dict[str, Scan] = {}
    for scan in scans:
        url = url_of(scan.output)
        if url and not (url.startswith("s3://") and volume_suffix(scan.output) in ZARR.suffixes):
            raise ConfigError(
                f"{url} is not on this machine; name a file or a folder with -o, or an OME-Zarr in "
                "an object store, such as s3://bucket/result.ome.zarr"
            )
        if not can_be_written(scan.output):
            raise ConfigError(
                f"{scan.output}: a segmentation ends in {' or '.join(WRITTEN_SUFFIXES)}; name "
                "such a file, or a folder with / at its end"
            )
        place = os.path.realpath(scan.output)
        if place in sources:
            raise ConfigError(f"{scan.output} is also an input; choose another --output")
        if any(source.startswith(f"{place}{os.sep}") for source in sources):
            raise ConfigError(f"{scan.output} holds an input; choose another --output")
        store = store_around(Path(os.path.realpath(scan.output.parent), scan.output.name))
        if store is not None and not url:
            raise ConfigError(
                f"{scan.output} would be in the store {store}, which stays as it is; name a place "
                "outside of it with -o"
            )
        for result in scan.results(request):
            twin = by_output.setdefault(os.path.realpath(result), scan)
            if twin is not scan:
                one, other = twin.images[0], scan.images[0]
                is_apart = one.parent != other.parent
                raise ConfigError(
                    f"{one} and {other} would both be written to {result}; "
                    + ("leave out --output to write beside each scan" if is_apart else "name one")
                )


def _refuse_irregular(path: Path) -> None:
    """Refuse a path that a result, a file or a store, cannot replace."""
    is_folder = volume_suffix(path) in ZARR.suffixes
    fits = holds_store(path) or _is_empty(path) if is_folder else os.path.isfile(path)
    if os.path.exists(path) and not fits:
        kind = "zarr store" if is_folder else "regular file"
        raise ConfigError(
            f"cannot write {path}: it is not a {kind}; remove it, or choose another --output"
        )


def _is_in_blocks(image: Path, output: Path, request: PredictionRequest, reading: Reading) -> bool:
    """Return whether a scan is segmented in blocks: on request, or if its labels are large."""
    is_asked = _asks_for_blocks(output, request)
    is_large = bool(url_of(output))
    if volume_suffix(output) in ZARR.suffixes and not is_asked and not is_large:
        with suppress(VolumeError):  # raised again when the scan is read
            shape = open_source(image, reading).geometry.shape
            is_large = math.prod(shape) > MOST_VOXELS
    if not is_asked and not is_large:
        return False
    beside = [f"--{name}" for name in ENDINGS if getattr(request, name)]
    if beside:
        raise ConfigError(
            f"{place_of(output)} is written in blocks; leave out {' and '.join(beside)}"
        )
    return True


def _asks_for_blocks(output: Path, request: PredictionRequest) -> bool:
    """Return whether options ask for blocks; ConfigError if the output cannot have them."""
    given = [name for name in ("block", "part", "crop", "mask") if getattr(request, name)]
    if given and volume_suffix(output) not in ZARR.suffixes:
        raise ConfigError(
            f"{output} cannot be written in blocks; leave out --{' and --'.join(given)}, or name "
            "a store, such as -o result.ome.zarr"
        )
    return bool(given)


def _exists(path: Path) -> bool:
    if not url_of(path):
        return os.path.lexists(path)
    from unet3d.images.objects import store_exists  # most results are files

    return store_exists(path)


def _may_be_filled(path: Path) -> bool:
    """Return whether a path is an empty folder, or a store that processes are filling."""
    is_store = volume_suffix(path) in ZARR.suffixes
    return _is_empty(path) or (is_store and module_of(ZARR).is_unfinished(path))


def _is_empty(path: Path) -> bool:
    """Return whether a path is an empty folder, which a store may fill."""
    return os.path.isdir(path) and not os.listdir(path)


def _refuse_unwritable(path: Path) -> None:
    """Before anything is computed, refuse a folder or a format that cannot be written."""
    is_url = bool(url_of(path))
    folder = next((above for above in path.parents if os.path.lexists(above)), path.parent)
    if not is_url and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"cannot write {path}: {folder} is not a writable folder; choose another --output"
        )
    format_ = format_of(path)
    if format_ is not None and format_.writer:
        from unet3d.images.microscopy import package  # most results are NIfTI

        package(format_.writer, f"writing {path}")


def _refuse_other_channels(case: Path, files: Sequence[Path], num_channels: int) -> None:
    wanted = [f"{case.name}_{channel:04d}" for channel in range(num_channels)]
    # A single file may hold every channel.
    if len(files) > 1 and [volume_stem(file) for file in files] != wanted:
        raise VolumeError(
            f"{case} has the files {', '.join(file.name for file in files)} but the network "
            f"takes {num_channels} channels; name them {wanted[0]} to {wanted[-1]}"
        )


def _groups(inputs: Iterable[Path], num_channels: int) -> dict[Path, tuple[Path, ...]]:
    """Return the files of each scan; duplicates count once."""
    groups: dict[Path, list[Path]] = {}
    named: set[tuple[str, ...]] = set()
    real_folder = functools.cache(os.path.realpath)
    for path in inputs:
        for file in _volumes_in(path) if is_collection(path) else (_named(path),):
            # Two links to one file are two scans, but one file may be named in several ways.
            files = tuple(
                os.path.join(real_folder(member.parent), member.name) for member in members(file)
            )
            if files in named:
                continue
            named.add(files)
            match = CHANNEL.fullmatch(volume_stem(file)) if num_channels > 1 else None
            groups.setdefault(file.with_name(match[1]) if match else file, []).append(file)
    return {case: tuple(sorted(files, key=volume_stem)) for case, files in groups.items()}


def _other_than(folder: Path) -> str:
    """Return what to name in place of a folder without volumes."""
    if (folder / "checkpoint-latest.pt").exists():
        return "name the run with --checkpoint"
    for path in sorted(folder.glob("*/*")):
        if stands_for_volume(path):
            return f"name the folders in it, or files such as {path}"
    return f"known: {', '.join(SUFFIXES)}, and folders of DICOM or TIFF slices"


def _named(folder: Path) -> Path:
    """Return a folder with its name, after which segmentations are named, in place of ``.``."""
    return Path(os.path.abspath(folder)) if folder.name in ("", "..") else folder


def _volumes_in(folder: Path) -> list[Path]:
    """Return the volumes in a folder, or the folder itself if it has the slices of a scan."""
    try:
        own = tuple(ENDING + suffix for suffix in WRITTEN_SUFFIXES)
        listed = [path for path in folder.iterdir() if not path.name.startswith(".")]
        files = {
            path
            for path in listed
            if stands_for_volume(path) and not path.name.lower().endswith(own)
        }
        files = {path for path in files if not is_picture(path)}
        if is_volume_folder(folder):
            others = files.difference(members(folder))
            if others:
                raise VolumeError(
                    f"{folder} holds slices and volumes, such as {min(others).name}; move one of "
                    "them to a folder of its own"
                )
            return [_named(folder)]
        files.update(path for path in listed if is_collection(path) and is_volume_folder(path))
    except OSError as error:
        raise VolumeError(f"cannot list {folder}: {reason_of(error)}") from error
    if not files:
        raise VolumeError(f"{folder} holds no volumes to segment; {_other_than(folder)}")
    return sorted(files)
