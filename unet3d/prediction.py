"""Prediction: from a scan's file to the file of its segmentation."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unet3d.atomic import write_atomically
from unet3d.checkpoint import Checkpoint
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.errors import ConfigError, DoesNotFitError, VolumeError
from unet3d.inference import predict_logits
from unet3d.optimization import autocast_dtype, image_dtype
from unet3d.parallel import (
    Executor,
    Layout,
    default_precision,
    parallelize,
    resolve_devices,
)
from unet3d.volumes.nifti import (
    Volume,
    VolumeHeader,
    is_volume_file,
    read_image,
    same_grid,
    volume_stem,
    write_label,
)
from unet3d.volumes.preprocess import prepare_image, restore_logits

logger = logging.getLogger(__name__)

SUFFIX = "_seg.nii.gz"


@dataclass(frozen=True)
class Scan:
    """What is segmented at once.

    Attributes:
        images: One file, or one for each channel.
        output: Where the segmentation goes.
    """

    images: tuple[Path, ...]
    output: Path


class Predictor:
    """A trained network, placed on devices, that segments volumes."""

    def __init__(
        self, checkpoint: Checkpoint, parallel: ParallelSettings, inference: InferenceSettings
    ) -> None:
        """Place the network.

        Args:
            checkpoint: Of any mode.
            parallel: Where to run; it need not be where the network was trained.
            inference: Windows.

        Raises:
            DeviceError: A device does not exist.
            CheckpointError: The parameters do not belong to the network.
        """
        devices = resolve_devices(parallel)
        model = checkpoint.build_model()
        # A network trained in float64 stays there; the others compute as they would in training.
        double = next(model.parameters()).dtype == torch.float64
        autocast = None if double else autocast_dtype(default_precision(devices))
        layout = Layout(devices, parallel.cuts, autocast=autocast)
        self.preprocessing = checkpoint.preprocessing
        self.executor: Executor = parallelize(model, layout)
        self.executor.module.eval()
        self._patch_size = checkpoint.patch_size
        self._inference = inference

    def segment(self, image: Volume) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of an image.

        Args:
            image: (C, X, Y, Z) as read from a file.

        Returns:
            (X, Y, Z) on the image's grid.

        Raises:
            VolumeError: The image has other channels than the network was trained on.
            DoesNotFitError: A device has too little memory.
        """
        wanted = len(self.preprocessing.channels)
        if image.header.num_channels != wanted:
            raise VolumeError(
                f"{image.header.path} has {image.header.num_channels} channels but the network "
                f"was trained on {wanted} ({', '.join(self.preprocessing.channel_names)})"
            )
        prepared = prepare_image(image.array, image.header.spacing_mm, self.preprocessing)
        tensor = torch.from_numpy(np.ascontiguousarray(prepared)).to(image_dtype(self.executor))
        logits = restore_logits(self._logits(tensor), image.header.shape)
        classes = logits.argmax(0).cpu().numpy()
        values: npt.NDArray[np.integer[Any]] = np.asarray(self.preprocessing.label_values)[classes]
        return values

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        settings = self._inference
        if settings.window != "auto":
            return self._windows(image, settings.window)
        if self._patch_size is not None:
            return self._windows(image, self._patch_size)
        # Trained on whole volumes: the whole volume where it fits, else the largest windows.
        x, y, z = image.shape[1:]
        window: list[int] = [x, y, z]
        while True:
            try:
                return self._windows(image, (window[0], window[1], window[2]))
            except DoesNotFitError:
                longest = max(range(3), key=lambda axis: window[axis])
                stride = self.executor.module.topology.total_stride[longest]
                if window[longest] <= 4 * stride:
                    raise
                window[longest] = (window[longest] + 1) // 2
                logger.warning("the volume does not fit; trying windows of %s", window)

    def _windows(self, image: torch.Tensor, window: Any) -> torch.Tensor:
        settings = self._inference
        return predict_logits(self.executor, image, window, settings.overlap, settings.batch_size)


def find_scans(
    inputs: Sequence[Path], output: Path | None, num_channels: int, overwrite: bool
) -> list[Scan]:
    """Return what to segment and where to, after a look at all of it.

    Args:
        inputs: Files and folders. In a folder, files named ``case_0000``, ``case_0001``, ... are
            the channels of one scan where the network wants several.
        output: A file for one scan, a folder for any number, None: beside each scan.
        num_channels: Of the network.
        overwrite: Whether existing files may be replaced.

    Raises:
        VolumeError: There is nothing to segment, or a channel is missing.
        ConfigError: Outputs exist already, or fall together.
    """
    groups = [group for path in inputs for group in _groups(path, num_channels)]
    if output is not None and len(groups) > 1 and is_volume_file(output):
        raise ConfigError(f"{output} is one file for {len(groups)} scans; name a folder")
    scans = [Scan(images, _output_of(images, num_channels, output)) for images in groups]
    by_output: dict[Path, Scan] = {}
    for scan in scans:
        twin = by_output.setdefault(scan.output.resolve(), scan)
        if twin is not scan:
            raise ConfigError(
                f"{twin.images[0]} and {scan.images[0]} would both be written to {scan.output}"
            )
        if scan.output.exists() and not overwrite:
            raise ConfigError(f"{scan.output} exists; add --overwrite to replace it")
        if scan.output.resolve() in {image.resolve() for image in scan.images}:
            raise ConfigError(f"{scan.output} is the scan itself; choose another --output")
        if not is_volume_file(scan.output) or not scan.output.name.endswith((".nii", ".nii.gz")):
            raise ConfigError(f"{scan.output}: name a .nii or .nii.gz file, or a folder")
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
    return Volume(array, replace(first, num_channels=len(array)))


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
    """Write statistics as JSON beside a segmentation; return the file."""
    path = scan.output.with_name(volume_stem(scan.output) + ".json")
    content = {"image": [str(image) for image in scan.images], "labels": statistics}
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
    return path


def _intensity(values: npt.NDArray[np.float32]) -> dict[str, float]:
    wide = values.astype(np.float64)
    return {
        "mean": float(wide.mean()),
        "standard_deviation": float(wide.std()),
        "minimum": float(wide.min()),
        "maximum": float(wide.max()),
    }


def _groups(path: Path, num_channels: int) -> Iterable[tuple[Path, ...]]:
    if not path.is_dir():
        return [(path,)]
    files = sorted(
        file
        for file in path.iterdir()
        if is_volume_file(file)
        and not file.name.startswith(".")
        and not file.name.endswith(SUFFIX)
        and file.suffix != ".img"  # named by its .hdr
    )
    if not files:
        raise VolumeError(f"{path} holds no volumes to segment")
    channels: dict[str, list[Path]] = {}
    for file in files:
        stem = volume_stem(file)
        is_channel = num_channels > 1 and len(stem) > 5 and stem[-5] == "_" and stem[-4:].isdigit()
        channels.setdefault(stem[:-5] if is_channel else stem, []).append(file)
    for stem, group in channels.items():
        if len(group) not in (1, num_channels):
            raise VolumeError(
                f"{path / stem} has {len(group)} channel files but the network wants {num_channels}"
            )
    return [tuple(group) for group in channels.values()]


def _output_of(images: tuple[Path, ...], num_channels: int, output: Path | None) -> Path:
    stem = volume_stem(images[0])
    name = (stem[:-5] if len(images) > 1 else stem) + SUFFIX
    if output is None:
        return images[0].with_name(name)
    if output.is_dir() or not output.suffix:
        return output / name
    return output
