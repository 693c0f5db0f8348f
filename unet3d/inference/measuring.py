"""Measuring an image, before a device computes anything: what its normalisation needs."""

from dataclasses import dataclass

from unet3d.errors import VolumeError, counted, naming, some
from unet3d.images.image import Box, Image
from unet3d.preparation.prepared_image import PreparedImage, kept_box, whole_box
from unet3d.preparation.transform import Preprocessing


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An image that can be segmented."""

    image: Image
    seen: Image
    """The image with the axes that the networks expect."""
    box: Box
    """The part that is segmented."""
    found: PreparedImage


def measured(image: Image, preprocessing: Preprocessing, *, crops: bool = True) -> Measured:
    """Measure an image, or refuse it with a VolumeError.

    For networks that were trained on images cut to their nonzero voxels, it is cut, if ``crops``.
    """
    _refuse_channels(image, preprocessing)
    seen = image.as_stored() if preprocessing.orientation == "stored" else image
    box = kept_box(seen, preprocessing) if crops else whole_box(seen.geometry.shape)
    try:
        found = PreparedImage(seen.cut(box), preprocessing)
    except VolumeError as error:
        raise VolumeError(naming(image.geometry.path, error)) from error
    return Measured(image=image, seen=seen, box=box, found=found)


def _refuse_channels(image: Image, preprocessing: Preprocessing) -> None:
    path, wanted = image.geometry.path, len(preprocessing.channels)
    if image.num_channels != wanted:
        raise VolumeError(
            f"{path} has {counted(image.num_channels, 'channel')}, but the network "
            f"was trained on {wanted} ({', '.join(preprocessing.channel_names)})"
            f"{'; name the files of a scan case_0000, case_0001, ...' if wanted > 1 else ''}"
        )
    stated = image.channels_in_other_order(preprocessing.channel_names)
    if stated:
        raise VolumeError(
            f"{path} has the channels {some(stated)}, but the network was trained on "
            f"{some(preprocessing.channel_names)}; bring them into this order"
        )
