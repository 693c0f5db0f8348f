"""The memory of a prediction on host and device, predicted before it starts.

GPU memory of the network is counted on fake tensors, as for training. The rest follows from shapes:
the slab of the image that windows read, their sums, and the voxels and labels of a scan.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.errors import VolumeError, naming
from unet3d.images.image import Image, open_image
from unet3d.images.memory_limits import FLOAT32_BYTES
from unet3d.images.scratch import LARGE_BYTES
from unet3d.inference.image_slab import PIECE_VOXELS
from unet3d.inference.networks import Networks
from unet3d.inference.placing import wanted_precision
from unet3d.inference.request import PredictionRequest
from unet3d.inference.sliding_window import PIECE_NUMBERS
from unet3d.inference.window_network import mirrored_mean
from unet3d.inference.windows import (
    BFLOAT16_BYTES,
    Windows,
    bytes_of_image,
    bytes_of_maps,
    bytes_of_voxel,
    window_of,
)
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
"""Host memory of CUDA, in addition to the program's; together 1.24 GiB on an H200."""

CLASS_BYTES = 9
"""Memory per voxel whose class is chosen: the class index as int64, and as uint8."""


def planned_prediction(request: PredictionRequest, device_memory: float | None) -> dict[str, Any]:
    """Return the memory for segmenting a scan on the host and on a device, as plain values.

    The scan is the request's only one. The device is the first of its settings, or a GPU with
    ``device_memory`` GiB, which need not exist.
    """
    scan = request.images
    loaded = map(load_network, request.checkpoints)
    networks = Networks.of(
        *(replace(one, config=one.config.with_values(request.inference)) for one in loaded)
    )
    if device_memory is not None:
        device = torch.device("cuda", 0)
        gpu_bytes = int(device_memory * 1024**3)
    else:
        device = ParallelDims.resolve(request.placement).all_devices[0]
        gpu_bytes = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    try:
        image = open_image(scan, reading=request.reading(networks.preprocessing.spacing_mm))
        memory = prediction_memory(
            image, networks, device, gpu_bytes, skips_empty=request.skip_background
        )
    except VolumeError as error:
        raise VolumeError(naming(scan[0], error)) from error
    return {
        "device": str(device),
        "device_has_bytes": gpu_bytes,
        "host_available_bytes": available_bytes(),
        **memory,
    }


def prediction_memory(
    image: Image,
    networks: Networks,
    device: torch.device,
    gpu_bytes: int,
    *,
    skips_empty: bool = False,
) -> dict[str, Any]:
    """Predict the memory for segmenting a scan on a device, which need not exist.

    ``device_bytes``: on the GPU; 0 for a CPU. ``host_bytes``: on the host, the sum of
    ``program_bytes`` (libraries and networks), ``slab_bytes`` (planes being prepared, added up and
    written), ``voxel_bytes`` (unpacked scan) and ``label_bytes``, unless the labels are so large
    that they are in a file beside the result (``label_file_bytes``). With ``--scratch``, the first
    two (``scratch_host_bytes``) remain on the host, and scan and labels (``scratch_bytes``) are in
    the folder. With ``skips_empty``, windows of constant intensity are skipped.
    """
    preprocessing = networks.preprocessing
    geometry = image.geometry
    if preprocessing.orientation == "stored":
        geometry = geometry.as_stored()
    stored = geometry.shape
    shape = visible_shape(stored, geometry.spacing_mm, preprocessing.spacing_mm)
    on_gpu = device.type == "cuda"
    # The host has all networks in memory, and of each kind a second copy, which computes.
    precisions = [
        resolve_precision(wanted_precision(one.dtype, one.config, [device]), [device])
        for one in networks.described
    ]
    described = list(zip(networks.described, precisions, strict=True))
    kinds = [(one.topology, one.dtype, precision) for one, precision in described]
    sizes = [sum(value.nbytes for value in one.model.values()) for one in networks.described]
    weights = sum(dict(zip(kinds, sizes, strict=True)).values())
    # Measured before GPU memory is counted, which imports modules that a prediction does not.
    program = _resident_bytes() + weights + (CUDA_HOST_BYTES if on_gpu else 0)
    computed: dict[Any, int] = {}
    kept, prepared, all_windows = [], [], []
    for kind, (network, precision) in zip(kinds, described, strict=True):
        windows = _windows(network, shape, device, gpu_bytes)
        of_windows = _computed_bytes(network, windows, device, precision)
        computed[kind] = max(of_windows, computed.get(kind, 0))
        kept.append(_kept_bytes(network, windows, device, skips_empty))
        most = PIECE_VOXELS[device.type]
        prepared.append(_prepared_bytes(stored, shape, windows, image.num_channels, most))
        all_windows.append(windows)
    if networks.add_up:
        kept, prepared = kept[:1], prepared[:1]
    # On a GPU, each kind keeps the memory of its graph.
    needed = sum(kept) + (sum if on_gpu else max)(computed.values())
    all_prepared, axis = sum(prepared), all_windows[0].axis
    largest = max(all_windows, key=lambda one: math.prod(one.slab))
    slabs = all_prepared + image.layer_bytes(axis) + (0 if on_gpu else needed)
    voxels = image.unpacked_bytes
    labels = math.prod(stored) * np.min_scalar_type(max(preprocessing.label_values)).itemsize
    is_large = labels > LARGE_BYTES
    return {
        "num_windows": len(largest.starts),
        "window": list(largest.shape),
        "windows_at_a_time": largest.batch_size,
        "device_bytes": UNCOUNTED_BYTES + needed + all_prepared if on_gpu else 0,
        "host_bytes": program + slabs + voxels + (0 if is_large else labels),
        "program_bytes": program,
        "slab_bytes": slabs,
        "voxel_bytes": voxels,
        "label_bytes": 0 if is_large else labels,
        "label_file_bytes": labels if is_large else 0,
        "scratch_host_bytes": program + slabs,
        "scratch_bytes": voxels + labels,
    }


def _windows(network: Checkpoint, shape: Shape, device: torch.device, gpu_bytes: int) -> Windows:
    settings = network.config.inference
    return Windows.of(
        shape,
        network.topology,
        window_of(network),
        settings.overlap,
        settings.batch_size,
        [device],
        bytes_of_voxel(network),
        max(0, gpu_bytes - UNCOUNTED_BYTES),
    )


def _kept_bytes(
    network: Checkpoint, windows: Windows, device: torch.device, skips_empty: bool
) -> int:
    """Return the bytes of a slab: its image, its sums, and its finished planes.

    Finished planes have two copies of logits while they are resampled, weights, and classes.
    """
    slab, classes = math.prod(windows.slab), network.topology.num_classes
    num_sums = classes + skips_empty  # if windows are skipped, also the sum of the weights
    sums = slab * num_sums * FLOAT32_BYTES if len(windows.starts) > 1 else 0
    of_plane = slab // windows.slab[windows.axis]
    most = PIECE_NUMBERS[device.type] // (of_plane * num_sums)
    planes = max(1, min(windows.slab[windows.axis], most))
    means = planes * of_plane * ((2 * classes + 1) * FLOAT32_BYTES + CLASS_BYTES)
    return bytes_of_image(network, windows.slab) + sums + means


def _prepared_bytes(
    stored: Shape, shape: Shape, windows: Windows, num_channels: int, most_voxels: int
) -> int:
    """Return the bytes of two prepared pieces of a scan: the current one and the next one."""
    axis = windows.axis
    of_plane = math.prod(shape) // shape[axis]
    planes = max(1, min(windows.slab[axis], shape[axis], most_voxels // of_plane))
    made = planes * of_plane * num_channels * FLOAT32_BYTES
    if stored == shape:
        return 2 * made
    num_planes = math.ceil(stored[axis] * min(1.0, 2 * planes / shape[axis]))
    of_source = num_channels * math.prod(stored) // stored[axis]
    piece = max(1, min(num_planes, SOURCE_VOXELS // of_source))
    if piece == num_planes:  # one piece: as stored, in float32, and its growing result
        return 3 * made + 2 * piece * of_source * FLOAT32_BYTES
    # The needed planes are interpolated within themselves, a piece at a time. A piece is in memory
    # as stored, in float32, after interpolation along one axis, and after both.
    of_plane *= num_channels
    arrays = 2 * of_source + 2 * max(of_source, of_plane)
    return 2 * made + (num_planes * of_plane + piece * arrays) * FLOAT32_BYTES


def _computed_bytes(
    network: Checkpoint, windows: Windows, device: torch.device, precision: str
) -> int:
    """Return the bytes that the network needs to compute windows."""
    autocast, topology = autocast_dtype(precision), network.topology
    count = min(windows.batch_size, len(windows.starts))
    if device.type != "cuda":
        logits = topology.num_classes * network.dtype.itemsize
        if network.mirrored_axes:
            logits *= 3  # the sum, and the logits of a mirror image, as computed and flipped back
        maps = bytes_of_maps(topology)  # in a type with two bytes
        if autocast is None:
            maps = maps * network.dtype.itemsize // BFLOAT16_BYTES
        return count * math.prod(windows.shape) * (maps + logits)
    model = network.build_model().eval()
    with counted_allocations() as recorder:
        stand_in = fake_device(device)
        executor = parallelize(model, Layout(devices=(stand_in,), autocast=autocast))
        make_parameters_fake(model)
        size = (count, topology.in_channels, *windows.shape)
        image = torch.empty(size, dtype=network.dtype, device=stand_in)
        axes = network.mirrored_axes
        logits_of: Sequence[Tensor] = [mirrored_mean(executor.predict, image, axes)]
        del logits_of
        return recorder.peak[stand_in] + recorder.workspace_bytes[stand_in]


def _resident_bytes() -> int:
    """Return the resident memory of this process, including all modules of a prediction."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
