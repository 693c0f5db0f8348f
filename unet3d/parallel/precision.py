"""The precision and memory format in which stages compute; resolved here and nowhere else.

A network has one precision, and each stage lowers its operations to it if its device has it in
hardware: a CPU without bfloat16 beside a GPU computes in float32. Parameters stay in float32.
"""

import functools
import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from unet3d.atomic import users_cache
from unet3d.errors import CacheError, DeviceError
from unet3d.inputs.plain_data import key_of
from unet3d.memory.fake_devices import is_gpu
from unet3d.memory.gpus import refuse_float16
from unet3d.records import recall, remember
from unet3d.torch_private import mkldnn_has_bfloat16, x86_has_bfloat16

logger = logging.getLogger(__name__)

MIN_GAIN = 1.25
"""A CPU computes in bfloat16 if that speeds up convolutions at least by this factor. Smaller
factors are mostly noise, and float32 rounds less."""
_TIMED_CHANNELS = 32
_TIMED_SIZE = 16
_TIMED_ROUNDS = 3
"""Rounds of measuring a convolution and its gradients in both types: 0.1 s on one core. The first
round is a warm-up."""
_CPU_LINES = ("model name", "flags", "CPU part", "Features")
"""Fields of ``/proc/cpuinfo`` that identify a processor and the features of a virtual machine."""


def resolve_precision(
    wanted: str,
    devices: Sequence[torch.device],
    exchange: Callable[[str], Sequence[str]] = lambda own: (own,),
    setting: str = "training.precision",
) -> str:
    """Resolve the precision setting for some devices.

    Args:
        wanted: A precision, or ``auto``: bfloat16 where every GPU has it in hardware, else float16;
            where there is no GPU, bfloat16 if the CPU has it in hardware and convolves a quarter
            faster in it, else float32.
        devices: The devices that the network runs on. Absent GPUs are assumed to have bfloat16.
        exchange: Maps this process's answer to the answers of all ranks, so that all take the same.
        setting: Name of the setting, for messages.

    Raises:
        DeviceError: These devices compute the precision wrongly, or emulate it.
    """
    if wanted == "auto":
        choices = set(exchange(default_precision(devices)))
        wanted = next(one for one in ("float32", "float16", "bfloat16") if one in choices)
    check_precision(wanted, devices, setting)
    return wanted


def default_precision(devices: Sequence[torch.device]) -> str:
    """Return the best precision that all GPUs among the devices are known to have.

    ``bfloat16``, or ``float16`` where a GPU lacks it (P100, V100, T4) or cuDNN gets it wrong. Where
    there is no GPU, ``bfloat16`` if the CPU is a quarter faster in it, else ``float32``.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return "bfloat16" if cpu_has_bfloat16() and bfloat16_is_faster() else "float32"
    here = [gpu for gpu in gpus if (gpu.index or 0) < torch.cuda.device_count()]
    if len(here) < len(gpus):
        return "bfloat16"
    # Ampere is the first architecture with bfloat16 in hardware; PyTorch counts emulation as
    # support.
    has_bfloat16 = all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in gpus)
    return "bfloat16" if has_bfloat16 and not cudnn_breaks_bfloat16() else "float16"


def check_precision(
    precision: str, devices: Sequence[torch.device], setting: str = "training.precision"
) -> None:
    """Refuse a resolved precision that would train wrongly here, or be emulated: DeviceError."""
    on_gpu = any(device.type == "cuda" for device in devices)
    refuse_float16(precision, on_gpu, setting)
    if precision == "bfloat16" and not on_gpu and not cpu_has_bfloat16():
        raise DeviceError(
            f"{setting}=bfloat16 is slower than float32 on this CPU, which does not have it in "
            f"hardware; use {setting}=float32"
        )
    if precision == "bfloat16" and on_gpu and cudnn_breaks_bfloat16():
        raise DeviceError(
            f"cuDNN {_cudnn_version()} computes bfloat16 convolutions of volumes wrongly (PyTorch "
            f"issue 163539); install cuDNN 9.15 or newer, or use {setting}=float16"
        )


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 in hardware, through oneDNN.

    On x86 that is AVX512-BF16 or AMX; PyTorch counts emulation as support. On Arm, PyTorch asks the
    processor itself.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return x86_has_bfloat16()
    return mkldnn_has_bfloat16()


@functools.cache
def bfloat16_is_faster() -> bool:
    """Return whether this CPU convolves clearly faster in bfloat16 than in float32, and log it.

    On some processors AVX512-BF16 alone multiplies no faster, and conversions take extra time. Each
    processor is measured once; the result is cached in the user's cache folder, if there is one.
    """
    processor = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    times = None
    try:
        path = users_cache() / "processors" / f"{key_of(processor)}.json"
        times = recall(path, lambda record: (float(record["float32"]), float(record["bfloat16"])))
        if times is None:
            times = convolution_seconds(torch.float32), convolution_seconds(torch.bfloat16)
            remember(path, {**processor, "float32": times[0], "bfloat16": times[1]})
    except CacheError as error:
        logger.debug("the measurement of this processor is not saved: %s", error)
    times = times or (convolution_seconds(torch.float32), convolution_seconds(torch.bfloat16))
    is_faster = times[0] > MIN_GAIN * times[1]
    logger.debug(
        "this CPU computes in %s: a convolution takes %.1f ms in float32 and %.1f in bfloat16",
        "bfloat16" if is_faster else "float32",
        *(1000 * seconds for seconds in times),
    )
    return is_faster


def convolution_seconds(dtype: torch.dtype) -> float:
    """Return the least time of a few 3x3x3 convolutions on this CPU, with their gradients."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        layout, channels = torch.channels_last_3d, _TIMED_CHANNELS
        # Two samples: PyTorch unfolds the float32 convolution of a small single sample in memory.
        x = torch.ones(2, channels, *(_TIMED_SIZE,) * 3, dtype=dtype).to(memory_format=layout)
        weight = torch.ones(channels, channels, 3, 3, 3, dtype=dtype, requires_grad=True)
        x.requires_grad_()
        times = []
        for _ in range(_TIMED_ROUNDS):
            start = time.perf_counter()
            y = F.conv3d(x, weight, padding=1)
            torch.autograd.grad(y, (x, weight), y.detach())
            times.append(time.perf_counter() - start)
    return min(times[1:])


def _processor() -> str:
    """Return the name and features of this machine's processor, or the machine's architecture."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = []
    known = [line for line in first if line.partition("\t")[0].strip() in _CPU_LINES]
    return "\n".join(known) or f"{platform.machine()} of {platform.node()}"


def cudnn_breaks_bfloat16() -> bool:
    """Return whether this cuDNN is one of 9.8 to 9.14, whose bfloat16 conv3d is wrong."""
    return 90800 <= _cudnn_version() < 91500


def _cudnn_version() -> int:
    """Return cuDNN's version, such as 91002 for 9.10.2, or 0 without cuDNN."""
    return torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the type that stages compute in where their device has it in hardware, or None.

    Args:
        precision: Resolved precision, such as ``bfloat16``; never ``auto``.
    """
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)


def lowered_on(device: torch.device, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the network's autocast type if a device has it in hardware, else None."""
    if is_gpu(device):
        return autocast
    return autocast if autocast == torch.bfloat16 and cpu_has_bfloat16() else None


def precision_on(device: torch.device, precision: str) -> str:
    """Return the precision of a stage on one device, given the network's precision."""
    dtype = autocast_dtype(precision)
    return precision if lowered_on(device, dtype) == dtype else "float32"


def lowering(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[None]:
    """Return a context in which operations are lowered as a stage on one device lowers them.

    The lowered weights are cached until the context ends.
    """
    dtype = lowered_on(device, autocast)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def memory_format(device: torch.device, dtype: torch.dtype) -> torch.memory_format:
    """Return the memory format of weights and maps that is fastest for convolutions of a type.

    A whole network has one format, so that it converts no map: the result of a convolution has the
    format of its weights. The choice follows measurements:

    * GPU: channels-last in 16 bits, which tensor cores read; in float32 channels-first, which is
      cuDNN's default.
    * CPU with oneDNN, up to float32: channels-last, at every width. On two cores with AVX512-BF16,
      a step of 32 to 320 channels at 96^3 takes 0.85 of the time that it takes channels-first in
      bfloat16 and 0.81 in float32; a step of 4 and 8 channels at 64^3 takes 0.44 and 0.64
      (docs/results/training.md).
    * CPU, float64, or without oneDNN: channels-first, which PyTorch's own convolutions unfold.
    """
    if is_gpu(device):
        is_last = dtype in (torch.bfloat16, torch.float16)
    else:
        is_last = dtype != torch.float64 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return torch.channels_last_3d if is_last else torch.contiguous_format


def image_dtype(network: nn.Module) -> torch.dtype:
    """Return the number type of a network's images.

    Args:
        network: The network, with all its parameters in one type.
    """
    return next(iter(network.parameters())).dtype


def to_parameter_dtype(module: nn.Module, precision: str) -> None:
    """Give a network's float32 parameters the type in which they are trained."""
    if precision == "float64":
        module.double()
