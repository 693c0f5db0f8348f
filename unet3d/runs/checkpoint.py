"""Checkpoints: written whole or not at all, independent of devices, safe to load.

A checkpoint is one file of tensors on the CPU, numbers and strings; it loads with
``weights_only=True``, so it cannot run code. Parameters have their plain names, so it loads in
every mode and on every number of devices.
"""

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unet3d import __version__
from unet3d.atomic import write_atomically
from unet3d.config import Config, Shape
from unet3d.errors import CheckpointError, ConfigError, reason_of
from unet3d.model import Topology, UNet3d
from unet3d.runs.case_split import CaseSplit
from unet3d.volumes.transform import Preprocessing

FORMAT = 1
"""Raised whenever a checkpoint is laid out differently."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A network, and what is needed to use it or to continue its training."""

    topology: Topology
    """The architecture, which fixes names and shapes of the parameters."""
    preprocessing: Preprocessing
    """How the images of its training were prepared."""
    patch_size: Shape | None
    """Voxels along X, Y, Z of the patches that it was trained on; None: whole volumes."""
    config: Config
    """The settings of its run."""
    split: CaseSplit | None = None
    """The cases that its run trains and validates on; None: it is older than their record."""
    model: dict[str, Tensor]
    """Parameters and buffers by name."""
    training: dict[str, Any]
    """Where its training stands, for ``--resume``."""

    def build_model(self) -> UNet3d:
        """Return the network, on the CPU.

        Raises:
            CheckpointError: The parameters are not those of its topology.
        """
        model = UNet3d(self.topology)
        dtypes = {value.dtype for value in self.model.values() if value.is_floating_point()}
        if torch.float64 in dtypes:
            model.double()
        try:
            model.load_state_dict(self.model)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise CheckpointError(f"the parameters are of another network: {reason}") from error
        return model


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint. At every moment ``path`` is the old file or the new one.

    Args:
        checkpoint: Its tensors may be on any device.
        path: Where to; its folder exists.

    Raises:
        CheckpointError: The file cannot be written.
    """
    content = {
        "format": FORMAT,
        "unet3d": __version__,
        "topology": checkpoint.topology.to_dict(),
        "preprocessing": checkpoint.preprocessing.to_dict(),
        "patch_size": checkpoint.patch_size,
        "config": checkpoint.config.to_yaml(),
        "split": None if checkpoint.split is None else checkpoint.split.to_dict(),
        "model": _to_cpu(checkpoint.model),
        "training": _to_cpu(checkpoint.training),
    }
    try:
        write_atomically(path, lambda file: torch.save(content, file))
    except (OSError, RuntimeError) as error:
        # torch.save hides an error of the file, such as a full disk, behind one of its own.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason_of(cause)}; make space there, or choose "
            "another --output"
        ) from error


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint onto the CPU.

    Args:
        path: As written by :func:`save_checkpoint`.

    Raises:
        CheckpointError: The file is missing, damaged, or not a checkpoint of ours.
    """
    content = _read(path)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise CheckpointError(f"{path} is not a checkpoint of unet3d; train one with unet3d train")
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {content['format']}, written by unet3d "
            f"{content.get('unet3d')}; this is unet3d {__version__}, which reads format {FORMAT}"
        )
    try:
        patch_size, split = content["patch_size"], content.get("split")
        return Checkpoint(
            topology=Topology.from_dict(content["topology"]),
            preprocessing=Preprocessing.from_dict(content["preprocessing"]),
            patch_size=tuple(patch_size) if patch_size else None,
            config=Config.from_yaml(content["config"]),
            split=None if split is None else CaseSplit.from_dict(split),
            model=content["model"],
            training=content["training"],
        )
    except (CheckpointError, ConfigError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{path} is of another version of unet3d (it was written by "
            f"{content.get('unet3d')}): {reason}"
        ) from error


def _read(path: Path) -> Any:
    """Return what a file of torch.save holds, if every byte is as it was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare the checksums of tensors
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason_of(error)}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors, numbers and strings, "
            "and so could run code"
        ) from error
    except Exception as error:  # both readers can raise anything for damaged bytes
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is not a checkpoint, or is damaged: {reason}") from error
    raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value
