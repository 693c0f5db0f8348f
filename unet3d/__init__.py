"""unet3d: 3D U-Net segmentation of volumes that outgrow one GPU.

From Python, ``unet3d.load("runs/mine").segment("scan.nii.gz")`` segments as ``unet3d predict``
does, see :func:`unet3d.segmenter.load`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_INTERFACE = ("Segmenter", "load")


def __getattr__(name: str) -> Any:
    """Return what the Python interface has; importing it takes seconds, so nothing else waits."""
    if name in _INTERFACE:
        return getattr(importlib.import_module("unet3d.segmenter"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what there is, the Python interface included."""
    return sorted((*globals(), *_INTERFACE))
