"""Prediction: from the image of a scan to its label values."""

import logging
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from unet3d.config import InferenceSettings, ParallelSettings, Shape
from unet3d.errors import DoesNotFitError, VolumeError
from unet3d.inference.sliding_window import predict_logits
from unet3d.kernels import strongest_class
from unet3d.parallel import (
    Executor,
    Layout,
    ParallelDims,
    autocast_dtype,
    image_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import precision_on
from unet3d.runs.checkpoint import Checkpoint
from unet3d.volumes.nifti import Volume
from unet3d.volumes.transform import prepare_image, restore_logits

logger = logging.getLogger(__name__)


class Predictor:
    """A trained network, placed on devices, that segments volumes."""

    def __init__(
        self, checkpoint: Checkpoint, parallel: ParallelSettings, inference: InferenceSettings
    ) -> None:
        """Place the network.

        Args:
            checkpoint: A network trained in any mode.
            parallel: Where to run; it need not be where the network was trained.
            inference: Size and overlap of the windows.

        Raises:
            DeviceError: A device does not exist.
            CheckpointError: The parameters do not belong to the network.
        """
        devices = ParallelDims.resolve(parallel).devices
        model = checkpoint.build_model()
        # A network trained in float64 or float32 stays there.
        double = next(model.parameters()).dtype == torch.float64
        wanted = "float64" if double else checkpoint.config.training.precision
        # Lower ones suit the devices of training, which need not be these.
        precision = resolve_precision(
            wanted if wanted in ("float32", "float64") else "auto", devices
        )
        layout = Layout(devices=devices, cuts=parallel.cuts, autocast=autocast_dtype(precision))
        logger.info(
            "computing %s",
            " and ".join(
                f"on {device} in {precision_on(device, precision)}"
                for device in dict.fromkeys(devices)
            ),
        )
        self._topology = checkpoint.topology
        self.preprocessing = checkpoint.preprocessing
        self.executor: Executor = parallelize(model, layout)
        self.executor.module.eval()
        self._patch_size = checkpoint.patch_size
        self._inference = inference

    def segment(self, image: Volume) -> npt.NDArray[np.integer[Any]]:
        """Return the label values of an image.

        Args:
            image: Shape (C, X, Y, Z), as read from a file.

        Returns:
            Shape (X, Y, Z), on the image's grid.

        Raises:
            VolumeError: The image has other channels than the network was trained on.
            DoesNotFitError: A device has too little memory.
        """
        wanted = len(self.preprocessing.channels)
        if image.header.num_channels != wanted:
            raise VolumeError(
                f"{image.header.path} has {image.header.num_channels} channel(s) but the network "
                f"was trained on {wanted} ({', '.join(self.preprocessing.channel_names)})"
                f"{'; name the files of a scan case_0000, case_0001, ...' if wanted > 1 else ''}"
            )
        try:
            prepared = prepare_image(image.array, image.header.spacing_mm, self.preprocessing)
        except VolumeError as error:
            raise VolumeError(f"{image.header.path}: {error}") from error
        tensor = torch.from_numpy(np.ascontiguousarray(prepared)).to(
            image_dtype(self.executor.module)
        )
        classes = self._classes(self._logits(tensor), image.header.shape).numpy()
        values = self.preprocessing.label_values
        smallest = np.min_scalar_type(max(values))
        labels: npt.NDArray[np.integer[Any]] = np.array(values, smallest)[classes]
        return labels

    @staticmethod
    def _classes(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Return the strongest class of each voxel of the scan's own grid, on the CPU."""
        try:
            return strongest_class(restore_logits(logits, shape)).cpu()
        except torch.OutOfMemoryError:
            # The scan's grid may be much finer than the network's.
            return strongest_class(restore_logits(logits.cpu(), shape))

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
                # One at a time: several would need what has just turned out not to be there.
                return self._windows(image, (window[0], window[1], window[2]), alone=True)
            except DoesNotFitError:
                longest = max(range(3), key=lambda axis: window[axis])
                stride = self._topology.total_stride[longest]
                if window[longest] <= 4 * stride:
                    raise
                window[longest] = (window[longest] + 1) // 2
                logger.warning(
                    "the volume does not fit; trying windows of %s", "x".join(map(str, window))
                )

    def _windows(
        self, image: torch.Tensor, window: Shape | Literal["whole"], alone: bool = False
    ) -> torch.Tensor:
        settings = self._inference
        batch_size = 1 if alone and settings.batch_size == "auto" else settings.batch_size
        return predict_logits(
            self.executor, image, self._topology, window, settings.overlap, batch_size
        )
