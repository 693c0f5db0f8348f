"""The precision in which the stages of a network compute; it is resolved here and nowhere else.

A network has one precision, and each stage lowers its operations to it if its device has it in
hardware: a CPU without bfloat16 beside a GPU computes in float32. Parameters stay in float32.
"""

import functools
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from unet3d.errors import DeviceError
from unet3d.memory.fake_devices import is_gpu
from unet3d.torch_private import mkldnn_has_bfloat16, x86_has_bfloat16


def resolve_precision(
    wanted: str,
    devices: Sequence[torch.device],
    exchange: Callable[[str], Sequence[str]] = lambda own: (own,),
    setting: str = "training.precision",
) -> str:
    """Resolve the setting of the precision on some devices.

    Args:
        wanted: A precision, or ``auto``: bfloat16 where every GPU has it in hardware, else float16;
            where there is no GPU, bfloat16 if the CPU has it in hardware, else float32.
        devices: The devices that the network runs on. GPUs that are not here are taken to have
            bfloat16.
        exchange: Maps this process's answer to those of all ranks, which must agree.
        setting: Its name, for messages.

    Raises:
        DeviceError: The precision is computed wrongly on these devices, or emulated.
    """
    if wanted == "auto":
        choices = set(exchange(default_precision(devices)))
        wanted = next(one for one in ("float32", "float16", "bfloat16") if one in choices)
    check_precision(wanted, devices, setting)
    return wanted


def default_precision(devices: Sequence[torch.device]) -> str:
    """Return the best precision that every GPU among the devices has, as far as is known.

    Args:
        devices: The devices that the network runs on.

    Returns:
        ``bfloat16``, or ``float16`` where a GPU lacks it (P100, V100, T4) or cuDNN gets it wrong.
        Where there is no GPU, ``bfloat16`` if this CPU has it, else ``float32``. GPUs that are not
        here are taken to have ``bfloat16``.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return "bfloat16" if cpu_has_bfloat16() else "float32"
    here = [gpu for gpu in gpus if (gpu.index or 0) < torch.cuda.device_count()]
    if len(here) < len(gpus):
        return "bfloat16"
    # Ampere is the first with bfloat16 in hardware; PyTorch also reports emulation as support.
    has_bfloat16 = all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in gpus)
    return "bfloat16" if has_bfloat16 and not cudnn_breaks_bfloat16() else "float16"


def check_precision(
    precision: str, devices: Sequence[torch.device], setting: str = "training.precision"
) -> None:
    """Refuse a precision that would train wrongly here, or not be computed in.

    Args:
        precision: A resolved one, such as ``bfloat16``; never ``auto``.
        devices: The devices that the network runs on.
        setting: The setting that asks for it.

    Raises:
        DeviceError: The precision is bfloat16, and cuDNN's convolutions in it are wrong; or there
            are only CPUs, and they do not have it.
    """
    on_gpu = any(device.type == "cuda" for device in devices)
    if precision == "float16" and not on_gpu:
        raise DeviceError(
            f"{setting}=float16 needs a GPU; use {setting}=auto, which is "
            f"{default_precision(devices)} on this CPU"
        )
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

    On x86 that is AVX512-BF16 or AMX; PyTorch also reports emulation as support. On Arm it asks the
    processor itself.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return x86_has_bfloat16()
    return mkldnn_has_bfloat16()


def cudnn_breaks_bfloat16() -> bool:
    """Return whether this cuDNN is one of 9.8 to 9.14, whose bfloat16 conv3d is wrong."""
    return 90800 <= _cudnn_version() < 91500


def _cudnn_version() -> int:
    """Return cuDNN's version, such as 91002 for 9.10.2, or 0 without cuDNN."""
    return torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the type that stages lower their operations to, where their device has it, or None.

    Args:
        precision: A resolved one, such as ``bfloat16``; never ``auto``.
    """
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)


def lowered_on(device: torch.device, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the type that a stage on one device lowers its operations to, or None.

    Args:
        device: The stage's device.
        autocast: That of the network, or None.
    """
    if is_gpu(device):
        return autocast
    return autocast if autocast == torch.bfloat16 and cpu_has_bfloat16() else None


def precision_on(device: torch.device, precision: str) -> str:
    """Return the precision that a stage on one device computes in, as a name.

    Args:
        device: The stage's device.
        precision: That of the network, a resolved one.
    """
    dtype = autocast_dtype(precision)
    return precision if lowered_on(device, dtype) == dtype else "float32"


def lowering(device: torch.device, autocast: torch.dtype | None) -> AbstractContextManager[None]:
    """Return a context in which operations are lowered as a stage on one device lowers them.

    The lowered weights are remembered until the context ends.

    Args:
        device: The stage's device.
        autocast: That of the network, or None.
    """
    dtype = lowered_on(device, autocast)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def image_dtype(network: nn.Module) -> torch.dtype:
    """Return the type that a network expects of its images.

    Args:
        network: The network, with all its parameters in one type.
    """
    return next(iter(network.parameters())).dtype


def to_parameter_dtype(module: nn.Module, precision: str) -> None:
    """Give a network's parameters the type in which they are trained.

    Args:
        module: The network, with float32 parameters.
        precision: ``float64`` keeps them so; every other one has float32 master weights.
    """
    if precision == "float64":
        module.double()
