"""In which precision the stages of a network compute."""

from collections.abc import Sequence

import torch

from unet3d.errors import DeviceError
from unet3d.parallel.executor import Executor


def default_precision(devices: Sequence[torch.device]) -> str:
    """Return the best precision that every GPU among the devices has.

    Args:
        devices: Those that the network runs on.

    Returns:
        ``bfloat16``, or ``float16`` where a GPU lacks it (P100, V100, T4) or cuDNN gets it wrong;
        ``float32`` where there is no GPU.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return "float32"
    # Ampere is the first with bfloat16 in hardware; PyTorch also reports emulation as support.
    has_bfloat16 = all(torch.cuda.get_device_capability(gpu) >= (8, 0) for gpu in gpus)
    return "bfloat16" if has_bfloat16 and not cudnn_breaks_bfloat16() else "float16"


def check_precision(precision: str, devices: Sequence[torch.device]) -> None:
    """Refuse a precision that would train wrongly here.

    Args:
        precision: Such as ``bfloat16``; never ``auto``.
        devices: Those that the network runs on.

    Raises:
        DeviceError: bfloat16 with a cuDNN whose convolutions are wrong.
    """
    on_gpu = any(device.type == "cuda" for device in devices)
    if precision == "bfloat16" and on_gpu and cudnn_breaks_bfloat16():
        raise DeviceError(
            f"cuDNN {_cudnn_version()} computes bfloat16 convolutions of volumes wrongly (PyTorch "
            "issue 163539); install cuDNN 9.15 or newer, or use training.precision=float16"
        )


def cudnn_breaks_bfloat16() -> bool:
    """Return whether this cuDNN is one of 9.8 to 9.14, whose bfloat16 conv3d is wrong."""
    return 90800 <= _cudnn_version() < 91500


def _cudnn_version() -> int:
    """Return such as 91002 for 9.10.2, or 0 where there is none."""
    return torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the type that GPU stages lower their operations to, or None.

    Args:
        precision: Such as ``bfloat16``; never ``auto``.
    """
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)


def image_dtype(executor: Executor) -> torch.dtype:
    """Return the type in which a placed network wants its images."""
    return next(executor.module.parameters()).dtype
