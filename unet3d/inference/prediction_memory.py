"""How much memory a prediction takes of the host and of its device, known before it starts.

What the network takes of a GPU is counted on fake tensors, as for training. The rest follows from
shapes: the slab of the image that windows reach, their sums, and what of a scan is in memory.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.errors import VolumeError
from unet3d.images.image import Image, open_image
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.inference.averaging import adds_up_together
from unet3d.inference.image_slab import PIECE_VOXELS
from unet3d.inference.placing import wanted_precision
from unet3d.inference.sliding_window import PIECE_NUMBERS
from unet3d.inference.window_memory import BFLOAT16_BYTES, bytes_of_maps, bytes_of_voxel
from unet3d.inference.window_network import mirrored_mean
from unet3d.inference.windows import Window, Windows, window_of
from unet3d.memory.allocations import UNCOUNTED_BYTES, counted_allocations, make_parameters_fake
from unet3d.memory.fake_devices import fake_device
from unet3d.memory.host import available_bytes
from unet3d.nnunet.loading import load_network
from unet3d.parallel import (
    Layout,
    ParallelDims,
    autocast_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.preparation.interpolation import SOURCE_VOXELS
from unet3d.preparation.resample import visible_shape
from unet3d.runs.checkpoint import Checkpoint

CUDA_HOST_BYTES = 200 * 1024**2
"""What CUDA takes of the host, beside the program: on an H200, 1.24 GiB in all."""

CLASS_BYTES = 9
"""Of a voxel whose class is looked for: the class as a number of 8 bytes, and as one of 1."""


@dataclass(frozen=True, kw_only=True)
class PredictionMemory:
    """What the prediction of a scan takes."""

    windows: Windows
    """The windows."""
    device_bytes: int
    """Of the GPU; 0 on a CPU."""
    program_bytes: int
    """Of the host: the program with its libraries, and the network."""
    slab_bytes: int
    """Of the host: what is prepared, added up and written of the scan at a time."""
    voxel_bytes: int
    """Of the host, or of a disk: voxels that are packed in their file."""
    label_bytes: int
    """Of the host, or of a disk: the labels."""

    @property
    def scratch_host_bytes(self) -> int:
        """Of the host, with a folder for what is worked on."""
        return self.program_bytes + self.slab_bytes

    @property
    def scratch_bytes(self) -> int:
        """Of that folder."""
        return self.voxel_bytes + self.label_bytes

    @property
    def host_bytes(self) -> int:
        """Of the host, if nothing is on a disk."""
        return self.scratch_host_bytes + self.scratch_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and reports."""
        windows = self.windows
        sizes = {
            name: getattr(self, name)
            for name in (
                *("device_bytes", "host_bytes", "program_bytes", "slab_bytes", "voxel_bytes"),
                *("label_bytes", "scratch_host_bytes", "scratch_bytes"),
            )
        }
        return {
            "num_windows": len(windows.starts),
            "window": list(windows.shape),
            "windows_at_a_time": windows.batch_size,
            **sizes,
        }


def planned_prediction(
    scan: Sequence[Path],
    checkpoints: Sequence[Path],
    parallel: ParallelSettings,
    device_memory: float | None,
) -> dict[str, Any]:
    """Return what a scan takes of the host and of a device, as plain values.

    The device is the first of the settings, or a GPU of so many GiB that need not be here.
    """
    networks = [load_network(path) for path in checkpoints]
    if device_memory is not None:
        device = torch.device("cuda", 0)
        gpu_bytes = int(device_memory * 1024**3)
        precision = "bfloat16"
    else:
        device = ParallelDims.resolve(parallel).all_devices[0]
        gpu_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
        precision = resolve_precision("auto", [device])
    settings = [one.config.inference for one in networks]
    wanted = [
        wanted_precision(one.precision, network.dtype, network.config.training.precision, [device])
        for network, one in zip(networks, settings, strict=True)
    ]
    precisions = [precision if one == "auto" else one for one in wanted]
    try:
        memory = prediction_memory(
            open_image(scan), networks, settings, device, precisions, gpu_bytes
        )
    except VolumeError as error:
        raise VolumeError(f"{scan[0]}: {error}") from error
    return {
        "device": str(device),
        "device_has_bytes": gpu_bytes,
        "host_available_bytes": available_bytes(),
        **memory.to_dict(),
    }


@dataclass(frozen=True, kw_only=True)
class _NetworkMemory:
    """What one network takes, beside its weights."""

    windows: Windows
    computed_bytes: int
    """While it computes windows."""
    kept_bytes: int
    """Of a volume that is not finished: image and sums of the planes that windows reach."""
    prepared_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.computed_bytes + self.kept_bytes + self.prepared_bytes


def prediction_memory(
    image: Image,
    networks: Sequence[Checkpoint],
    settings: Sequence[InferenceSettings],
    device: torch.device,
    precisions: Sequence[str],
    gpu_bytes: int,
) -> PredictionMemory:
    """Predict the memory that a scan takes with networks, one at a time on a device.

    The device need not exist, and precisions are resolved ones; nothing of the scan is read.
    """
    preprocessing = networks[0].preprocessing
    geometry = image.geometry
    if preprocessing.orientation == "stored":
        geometry = geometry.as_stored()
    shape = visible_shape(geometry.shape, geometry.spacing_mm, preprocessing.spacing_mm)
    on_gpu = device.type == "cuda"
    # All of them are in memory here, too, and one of them again where it computes.
    weights = max(sum(value.nbytes for value in one.model.values()) for one in networks)
    # Before anything is counted, which imports what a prediction does not.
    program = _resident_bytes() + weights + (CUDA_HOST_BYTES if on_gpu else 0)
    sizes: list[Window] = [
        window_of(one, of_one) for one, of_one in zip(networks, settings, strict=True)
    ]
    found = [
        _network_memory(
            one,
            of_one,
            size,
            stored=geometry.shape,
            shape=shape,
            device=device,
            precision=precision,
            gpu_bytes=gpu_bytes,
        )
        for one, of_one, size, precision in zip(networks, settings, sizes, precisions, strict=True)
    ]
    kept = found[:1] if adds_up_together(networks, settings, sizes) else found
    needed = max(one.computed_bytes for one in found) + sum(one.kept_bytes for one in kept)
    prepared = sum(one.prepared_bytes for one in kept)
    return PredictionMemory(
        windows=max(found, key=lambda one: one.bytes).windows,
        device_bytes=UNCOUNTED_BYTES + needed + prepared if on_gpu else 0,
        program_bytes=program,
        slab_bytes=prepared + (0 if on_gpu else needed),
        voxel_bytes=image.unpacked_bytes,
        label_bytes=math.prod(geometry.shape)
        * np.min_scalar_type(max(preprocessing.label_values)).itemsize,
    )


def _network_memory(
    network: Checkpoint,
    settings: InferenceSettings,
    size: Window,
    *,
    stored: Shape,
    shape: Shape,
    device: torch.device,
    precision: str,
    gpu_bytes: int,
) -> _NetworkMemory:
    topology = network.topology
    mirror_axes = network.mirrored_axes(settings)
    windows = Windows.of(
        shape,
        topology,
        size,
        settings.overlap,
        settings.batch_size,
        [device],
        bytes_of_voxel(topology, network.dtype, is_mirrored=bool(mirror_axes)),
        max(0, gpu_bytes - UNCOUNTED_BYTES),
    )
    slab, classes = math.prod(windows.slab), topology.num_classes
    sums = slab * classes * FLOAT32_BYTES if len(windows.starts) > 1 else 0
    image = slab * topology.in_channels * network.dtype.itemsize
    return _NetworkMemory(
        windows=windows,
        computed_bytes=_computed_bytes(network, windows, mirror_axes, device, precision),
        kept_bytes=image + sums + _means_bytes(windows, classes, device),
        prepared_bytes=_prepared_bytes(stored, shape, windows, topology.in_channels),
    )


def _means_bytes(windows: Windows, num_classes: int, device: torch.device) -> int:
    """Return what becomes of the sums of the planes that are finished at a time, and is restored.

    Of them, logits are there twice while they are resampled, with the weights of one class.
    """
    of_plane = math.prod(windows.slab) // windows.slab[windows.axis]
    most = PIECE_NUMBERS[device.type] // (of_plane * num_classes)
    planes = max(1, min(windows.slab[windows.axis], most))
    return planes * of_plane * ((2 * num_classes + 1) * FLOAT32_BYTES + CLASS_BYTES)


def _prepared_bytes(stored: Shape, shape: Shape, windows: Windows, num_channels: int) -> int:
    """Return what is prepared at once: a piece of the scan, and the next one ahead."""
    axis = windows.axis
    of_plane = math.prod(shape) // shape[axis]
    planes = max(1, min(windows.slab[axis], shape[axis], PIECE_VOXELS // of_plane))
    made = planes * of_plane * num_channels * FLOAT32_BYTES
    if stored == shape:
        return 2 * made
    num_planes = math.ceil(stored[axis] * min(1.0, 2 * planes / shape[axis]))
    of_source = num_channels * math.prod(stored) // stored[axis]
    piece = max(1, min(num_planes, SOURCE_VOXELS // of_source))
    if piece == num_planes:  # as stored, in float32, and while they become larger
        return 3 * made + 2 * piece * of_source * FLOAT32_BYTES
    # All planes that are needed are interpolated within themselves, some of them at a time: as
    # stored, in float32, and interpolated along one axis and along both.
    of_plane *= num_channels
    arrays = 2 * of_source + 2 * max(of_source, of_plane)
    return 2 * made + (num_planes * of_plane + piece * arrays) * FLOAT32_BYTES


def _computed_bytes(
    network: Checkpoint,
    windows: Windows,
    mirror_axes: Sequence[int],
    device: torch.device,
    precision: str,
) -> int:
    """Return what the network takes while it computes windows."""
    topology = network.topology
    count = min(windows.batch_size, len(windows.starts))
    if device.type != "cuda":
        logits = topology.num_classes * network.dtype.itemsize
        if mirror_axes:
            logits *= 3  # their sum, those of an image, and the same turned back
        maps = bytes_of_maps(topology)  # in a type of two bytes
        if autocast_dtype(precision) is None:
            maps = maps * network.dtype.itemsize // BFLOAT16_BYTES
        return count * math.prod(windows.shape) * (maps + logits)
    model = network.build_model().eval()
    with counted_allocations() as recorder:
        stand_in = fake_device(device)
        executor = parallelize(
            model, Layout(devices=(stand_in,), autocast=autocast_dtype(precision))
        )
        make_parameters_fake(model)
        size = (count, topology.in_channels, *windows.shape)
        image = torch.empty(size, dtype=network.dtype, device=stand_in)
        logits_of: Sequence[Tensor] = [mirrored_mean(executor.predict, image, mirror_axes)]
        del logits_of
        return recorder.peak[stand_in] + recorder.workspace_bytes[stand_in]


def _resident_bytes() -> int:
    """Return what this process has in memory, with all that a prediction imports."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
