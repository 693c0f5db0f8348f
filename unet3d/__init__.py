"""unet3d: 3D U-Net segmentation of volumes that outgrow one GPU.

In Python, ``unet3d.load("runs/mine").segment("scan.nii.gz")`` segments a scan like ``unet3d
predict`` (see :func:`unet3d.api.load`), and ``unet3d.train("DATASET")`` trains a network like
``unet3d train`` (see :func:`unet3d.api.train`).
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_INTERFACE = {
    "Segmenter": "unet3d.api",
    "TrainedRun": "unet3d.api",
    "load": "unet3d.api",
    "predict": "unet3d.api",
    "train": "unet3d.api",
}


def __getattr__(name: str) -> Any:
    """Return a name of the Python interface, imported on first use because that takes seconds."""
    if name not in _INTERFACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_INTERFACE[name]), name)


def __dir__() -> list[str]:
    """Return all names, including those of the Python interface."""
    return sorted((*globals(), *_INTERFACE))
