"""An image at the target spacing, of which planes are made when they are asked for."""

import logging
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from unet3d.errors import VolumeError
from unet3d.images.image import Image
from unet3d.images.memory_limits import explaining_memory
from unet3d.memory.host import is_out_of_gpu_memory
from unet3d.preparation.cropping import inside_mask
from unet3d.preparation.intensities import measured
from unet3d.preparation.normalization import Scaling
from unet3d.preparation.plane_resampling import Resampling
from unet3d.preparation.resample import affordable_shape, visible_shape
from unet3d.preparation.transform import Preprocessing

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

MAX_NORMALISED = 1e37
"""Splines overshoot by less than float32 has beyond it."""


class PreparedImage:
    """An image that is normalised and resampled where its planes are asked for.

    On a GPU that happens on a stream of its own.
    """

    def __init__(self, image: Image, preprocessing: Preprocessing) -> None:
        """Look at all intensities of an image that is cut to its :func:`kept_box`.

        Raises:
            VolumeError: A voxel is not finite, the image has another number of channels than the
                plan, or its shape at the target spacing is absurd.
        """
        channels = preprocessing.channels
        if image.num_channels != len(channels):
            raise VolumeError(
                f"the image has {image.num_channels} channel(s); {len(channels)} are needed: "
                f"{', '.join(preprocessing.channel_names)}"
            )
        shape, spacing_mm = image.geometry.shape, image.geometry.spacing_mm
        target_mm = preprocessing.spacing_mm
        self.shape = visible_shape(shape, spacing_mm, target_mm)
        """Voxels along X, Y, Z at the target spacing."""
        self._image = image
        self._has_told = False
        interpolation, target_mm = preprocessing.interpolation, target_mm or spacing_mm
        slice_axes = interpolation.slice_axes(spacing_mm, target_mm)
        slice_axis = slice_axes[0] if interpolation.clips and slice_axes else None
        is_masked = [how.kind == "z-score-inside" for how in channels]
        with explaining_memory("the image cannot be prepared"):
            inside = inside_mask(image) if any(is_masked) else None
            self._masks = [inside if masked else None for masked in is_masked]
            found = measured(image, self._masks, slice_axis)
        self._scalings = [
            Scaling.of(how, of_one) for how, of_one in zip(channels, found, strict=True)
        ]
        ranges = torch.stack(
            [
                scaling.range_of(of_one, mask, slice_axis)
                for scaling, of_one, mask in zip(self._scalings, found, self._masks, strict=True)
            ]
        )
        self.largest = float(ranges.abs().max())
        """The largest magnitude of its normalised intensities."""
        if not self.largest <= MAX_NORMALISED:
            raise VolumeError(
                f"the image has normalised intensities up to {self.largest:.3g}, which cannot be "
                "resampled; scale the image, or train with data.normalization=z-score"
            )
        orders = interpolation.orders(slice_axes)
        limits = ranges if interpolation.clips else None
        self._resampling = Resampling(shape, self.shape, orders, limits, slice_axis)
        self.nearest_axes: tuple[int, ...] = ()
        """Of X, Y, Z, those along which logits are those of the nearest plane, when they are
        brought back to the image's own spacing."""
        if not interpolation.logits_across_slices:
            self.nearest_axes = interpolation.slice_axes(target_mm, spacing_mm)

    @property
    def num_channels(self) -> int:
        """Channels."""
        return self._image.num_channels

    def planes(self, axis: int, begin: int, end: int, device: torch.device = CPU) -> torch.Tensor:
        """Return some planes at the target spacing.

        Args:
            axis: Of X, Y, Z, counted from 0, the one that the planes follow each other along.
            begin: The first of them.
            end: The one after the last.
            device: Where they are wanted.

        Returns:
            Shape (C, X', Y', Z'), in any order of memory; on the device or, if it has too little
            memory, on the CPU. On a GPU the memory belongs to another stream than the caller's,
            which records itself (``record_stream``); what is in it is there.

        Raises:
            VolumeError: They do not fit in memory, or are not finite.
        """
        with explaining_memory("the image cannot be prepared"):
            if device.type == "cuda":
                try:
                    return self._made_on_gpu(axis, begin, end, device)
                except RuntimeError as error:
                    if not is_out_of_gpu_memory(error):
                        raise
                    self._tell_of(device)
            return self._made(axis, begin, end, CPU)

    def whole(self) -> torch.Tensor:
        """Return all planes, as :meth:`planes` does."""
        axis = self._resampling.best_axis
        return self.planes(axis, 0, self.shape[axis])

    def _tell_of(self, device: torch.device) -> None:
        """Say once that a GPU is too full."""
        if not self._has_told:
            logger.info("%s has too little memory to prepare the image; the CPU does", device)
        self._has_told = True

    def _made_on_gpu(self, axis: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
            made = self._made(axis, begin, end, device)
            _stream(device).synchronize()  # the caller's stream knows nothing of this one
            return made

    def _made(self, axis: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
        sources = self._resampling.pieces(axis, begin, end, self.num_channels)
        pieces = (self._normalised(axis, source, device) for source in sources)
        return self._resampling.planes(pieces, axis, begin, end)

    def _normalised(self, axis: int, source: slice, device: torch.device) -> torch.Tensor:
        """Return some planes of the image itself, normalised."""
        image = self._image.on_device(self._image.planes(axis, source), device)
        inside: torch.Tensor | None = None
        for channel, scaling, mask in zip(image, self._scalings, self._masks, strict=True):
            if mask is not None and inside is None:
                inside = torch.from_numpy(mask[(slice(None),) * axis + (source,)]).to(device)
            scaling.apply_(channel, None if mask is None else inside)
        return image


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU prepares images, one for all of them."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def prepare_image(image: Image, preprocessing: Preprocessing) -> npt.NDArray[np.float32]:
    """Return an image normalised and resampled, all at once, (C, X', Y', Z') and C-contiguous."""
    geometry = image.geometry
    affordable_shape(
        geometry.shape, geometry.spacing_mm, preprocessing.spacing_mm, len(preprocessing.channels)
    )
    prepared = PreparedImage(image, preprocessing)
    return np.ascontiguousarray(prepared.whole().numpy())
