"""The Python interface of prediction: trained networks, and images in files or in memory."""

import logging
import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import nibabel as nib
import numpy as np
import numpy.typing as npt
import torch
from nibabel.spatialimages import SpatialImage

from unet3d.config import Config, Shape
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError
from unet3d.images.geometry import shear_warning
from unet3d.images.image import Image as OpenedImage
from unet3d.images.image import image_of, open_image
from unet3d.images.labels import label_image
from unet3d.images.memory_limits import explaining_memory
from unet3d.images.nifti import open_array, open_nibabel
from unet3d.inference.mode_choice import choose_mode
from unet3d.inference.networks import Networks
from unet3d.inference.predictor import Predictor
from unet3d.nnunet.model_files import networks_in
from unet3d.runs.finding import chosen_folds

logger = logging.getLogger(__name__)

FileName = str | os.PathLike[str]

Device: TypeAlias = str | int | torch.device

Image: TypeAlias = FileName | Sequence[FileName] | SpatialImage | npt.NDArray[Any]
"""A file, the files of its channels, an image of nibabel's, or an array."""


class Segmenter:
    """Segments images with a network, or with the mean of several, as ``unet3d predict`` does.

    One image at a time: threads wait for one another.
    """

    def __init__(self, predictor: Predictor) -> None:
        """Take what :func:`load` has placed."""
        self._predictor = predictor
        self._lock = Lock()  # several networks take turns on the devices

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label value without the background."""
        return self._predictor.label_names

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The channels that an image must have, in this order."""
        return tuple(self._predictor.preprocessing.channel_names)

    def segment(self, image: Image, affine: npt.ArrayLike | None = None) -> nib.Nifti1Image:
        """Segment one image.

        Args:
            image: A file or a folder of DICOM slices; several files, one for each channel; an image
                of nibabel's; or an array of shape (I, J, K), or (I, J, K, C) with channels.
            affine: Of an array: (4, 4), from its indices to mm, to the right, front and top, as
                nibabel has it.

        Returns:
            The labels on the grid of the image, in its orientation:
            ``numpy.asarray(result.dataobj)`` has their values, ``nibabel.save`` writes them.

        Raises:
            VolumeError: The image cannot be read or used, or has other channels than the networks.
            DoesNotFitError: A device has too little memory.
            CheckpointError: One of several networks cannot be used.
            TypeError: The image is something else, an array has no affine, or something else has
                one.
        """
        with explaining_memory("the image"):
            volume = _volume(image, affine)
            warning = shear_warning(volume.geometry)
            if warning is not None:
                logger.warning("%s", warning)
            with self._lock:
                labels = self._predictor.segment(volume)
            return label_image(labels, volume.geometry, self.label_names)


def load(
    checkpoint: FileName,
    *others: FileName,
    folds: int | str | Sequence[int | str] | None = None,
    devices: Device | Sequence[Device] | None = None,
    window: Shape | str | None = None,
    overlap: float | None = None,
    precision: str | None = None,
    tta: bool | None = None,
    postprocessing: bool | None = None,
) -> Segmenter:
    """Load trained networks, and place them on devices of this process.

    Args:
        checkpoint: File or folder of a run, of folds or of files, or a model of nnU-Net, as a
            folder or an archive.
        others: More of them; several networks are averaged.
        folds: Which folds of them, such as 0, ``"0,2"`` or ``[0, 2]``; ``"all"`` or None: all that
            they have; of a model of nnU-Net the numbered ones, or else the one on all cases.
        devices: Such as ``"cuda:0"``, 0, ``"cpu"``, or ``"0,1"`` for windows dealt to replicas on
            two GPUs (where a window does not fit on one of them, or they differ, for a network in
            stages); None: the first GPU, or the CPU.
        window: Voxels of a window along X, Y, Z, or ``"whole"``; None: as in training.
        overlap: Share of a window that its neighbour covers too; None: as in training.
        precision: What is computed in, such as ``"float32"``; None: as in training.
        tta: Whether to average over mirror images, too; None: as in training.
        postprocessing: Whether to keep only the largest component of the labels where the
            validation has shown that this is better; None: as in training.

    Returns:
        What segments images, one after another.

    Raises:
        CheckpointError: A file cannot be used, or the networks do not belong together.
        ConfigError: A setting is refused.
        DeviceError: A device does not exist, or has too little memory.
    """
    given = {
        "inference.window": window,
        "inference.overlap": overlap,
        "inference.precision": precision,
        "inference.tta": tta,
        "inference.postprocessing": postprocessing,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    try:
        chosen = chosen_folds(folds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if devices is None:
        devices = "cuda:0" if torch.cuda.is_available() else "cpu"
    group, paths = Group(Ranks()), map(Path, (checkpoint, *others))
    with ExitStack() as unpacked:
        files = [file for path in paths for file in networks_in(path, chosen, unpacked)]
        networks = Networks.read(list(dict.fromkeys(files)), group)
        inference = [one.config.with_values(changes).inference for one in networks.described]
        parallel = Config().with_values({"parallel.devices": names_of(devices)}).parallel
        parallel = choose_mode(parallel, networks, inference, group.ranks)
        if parallel.mode == "spatial":
            # Slabs of a volume need a process for each device, which unet3d predict starts.
            parallel = parallel.model_copy(update={"mode": "model"})
        segmenter = Segmenter(Predictor(networks, parallel, inference, group))
        # Weights are read when they are needed.
        weakref.finalize(segmenter, unpacked.pop_all().close)
    return segmenter


def names_of(devices: Device | Sequence[Device]) -> list[str]:
    """Return devices as settings name them; text may have commas between several."""
    if isinstance(devices, (str, int, torch.device)):
        return str(devices).split(",")
    return [str(device) for device in devices]


def _volume(image: Image, affine: npt.ArrayLike | None) -> OpenedImage:
    if isinstance(image, np.ndarray) and affine is not None:
        return image_of([open_array(image, affine)])
    if isinstance(image, np.ndarray) or affine is not None:
        raise TypeError("a NumPy array needs an affine, and nothing else takes one")
    if isinstance(image, SpatialImage):
        return image_of([open_nibabel(image)])
    paths = [image] if isinstance(image, (str, os.PathLike)) else image
    if not isinstance(paths, Sequence) or not paths or not isinstance(paths[0], (str, os.PathLike)):
        raise TypeError(
            f"cannot segment a {type(image).__name__}; give a file, a list of files, an image of "
            "nibabel's, or a NumPy array with its affine"
        )
    return open_image([Path(path) for path in paths])
