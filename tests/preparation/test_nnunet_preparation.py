"""Prepared images and resampled logits, compared with nnU-Net itself if it is installed."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.images.samples import held_image
from tests.products import each_value
from unet3d.preparation.interpolation import restored_slabs
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.prepared_image import PreparedImage, kept_box
from unet3d.preparation.resample import Interpolation
from unet3d.preparation.transform import Preprocessing

preparing = pytest.importorskip("nnunetv2.preprocessing.preprocessors.default_preprocessor")
resampling = pytest.importorskip("nnunetv2.preprocessing.resampling.default_resampling")
exporting = pytest.importorskip("nnunetv2.inference.export_prediction")
plans = pytest.importorskip("nnunetv2.utilities.plans_handling.plans_handler")
labelling = pytest.importorskip("nnunetv2.utilities.label_handling.label_handling")

SCHEMES = {
    "ct": ("CTNormalization", False),
    "z-score": ("ZScoreNormalization", False),
    "z-score-inside": ("ZScoreNormalization", True),
    "none": ("NoNormalization", False),
    "rescale": ("RescaleTo01Normalization", False),
    "rgb": ("RGBTo01Normalization", False),
}
CT = {"percentile_00_5": 40.0, "percentile_99_5": 190.0, "mean": 110.3, "std": 37.7}
OUR_CT = {"low": 40.0, "high": 190.0, "mean": 110.3, "std": 37.7}
TRANSPOSED = [[0, 1, 2], [2, 0, 1], [1, 0, 2]]
THICK = {"auto": None, "always": True, "never": False}
GRIDS = [
    ((23, 19, 17), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),  # nothing is resampled
    ((23, 19, 17), (1.0, 1.2, 1.5), (1.4, 1.1, 0.9)),
    ((23, 19, 17), (0.7, 0.7, 1.0), (1.5, 1.5, 1.5)),
    ((23, 25, 9), (0.6, 0.6, 5.0), (0.8, 0.8, 3.0)),  # thick slices in the image, then more slices
    ((23, 25, 19), (0.6, 0.6, 2.0), (0.8, 0.8, 3.0)),  # then fewer slices
    ((19, 9, 23), (0.8, 4.0, 0.6), (0.8, 2.0, 0.6)),  # thick along Y, resampled across slices only
    ((9, 23, 25), (5.0, 0.6, 0.7), (5.0, 1.0, 1.0)),  # thick along X, resampled within slices only
    ((23, 25, 19), (1.0, 1.0, 1.0), (0.8, 0.8, 3.0)),  # thick slices in the network's spacing only
    ((23, 7, 9), (0.6, 4.0, 4.0), (0.9, 2.5, 3.0)),  # two axes are equally coarse
    ((23, 7, 9), (0.6, 4.0, 4.5), (0.9, 2.5, 3.0)),  # two axes are coarse, one of them coarser
    ((24, 25, 1), (0.6, 0.6, 5.0), (0.8, 0.8, 2.0)),
]


def image_of(shape, channels):
    """Return an image with values in a part of the grid, with holes in it, and zeros around."""
    rng = np.random.default_rng(0)
    image = np.zeros((channels, *shape), np.int16)
    inner = tuple(slice(n // 6, n - n // 5) for n in shape)
    image[(slice(None), *inner)] = rng.integers(1, 250, image[(slice(None), *inner)].shape)
    if min(shape) > 6:
        middle = tuple(slice(n // 2 - 1, n // 2 + 2) for n in shape)
        image[(slice(None), *middle)] = 0  # enclosed by values, so inside
        image[:, : shape[0] // 3, : shape[1] // 3, :] = 0  # at a corner of the part, so outside
    return image


def configuration(kinds, target_mm, how, transpose):
    """Return nnU-Net's configuration; its axes are ours in reverse order, then transposed."""
    common = {"force_separate_z": THICK[how.thick]}
    arguments = {
        "data": {"is_seg": False, "order": how.order, "order_z": how.across_slices},
        "seg": {"is_seg": True, "order": 1, "order_z": 0},
        "probabilities": {"is_seg": False, "order": 1, "order_z": how.logits_across_slices},
    }
    return plans.ConfigurationManager(
        {
            "architecture": {},
            "spacing": [target_mm[::-1][axis] for axis in transpose],
            "normalization_schemes": [SCHEMES[kind][0] for kind in kinds],
            "use_mask_for_norm": [SCHEMES[kind][1] for kind in kinds],
            **{f"resampling_fn_{of}": "resample_data_or_seg_to_shape" for of in arguments},
            **{
                f"resampling_fn_{of}_kwargs": {**common, **of_it} for of, of_it in arguments.items()
            },
        }
    )


def plans_of(transpose, num_channels):
    return SimpleNamespace(
        transpose_forward=transpose,
        transpose_backward=[transpose.index(axis) for axis in range(3)],
        foreground_intensity_properties_per_channel={str(c): CT for c in range(num_channels)},
    )


def nnunet_image(image, spacing_mm, target_mm, kinds, how, transpose):
    """Return an image prepared by nnU-Net, in our axes, and nnU-Net's properties."""
    properties = {"spacing": list(spacing_mm[::-1])}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # means of empty arrays warn
        found, _, properties = preparing.DefaultPreprocessor(verbose=False).run_case_npy(
            image.transpose(0, 3, 2, 1),
            None,
            properties,
            plans_of(transpose, len(image)),
            configuration(kinds, target_mm, how, transpose),
            {},
        )
    back = [transpose.index(axis) for axis in range(3)][::-1]
    return found.transpose(0, *(1 + axis for axis in back)), properties


def our_image(image, spacing_mm, target_mm, kinds, how):
    """Return an image prepared by us, and the box of the scan that is kept."""
    plan = Preprocessing(
        spacing_mm=target_mm,
        channels=tuple(
            ChannelNormalization(kind=kind, least_std=1e-8, **(OUR_CT if kind == "ct" else {}))
            for kind in kinds
        ),
        channel_names=tuple(kinds),
        label_names=("background",),
        label_values=(0,),
        crops_to_nonzero=True,
        interpolation=how,
    )
    voxels = held_image(image, spacing_mm=spacing_mm)
    box = kept_box(voxels, plan)
    return PreparedImage(voxels.cut(box), plan), box


@each_value(thick=list(THICK), orders=[(3, 0), (3, 1), (1, 1)], transpose=TRANSPOSED, grids=GRIDS)
def test_prepared_images_are_those_of_nnunet(thick, orders, transpose, grids):
    shape, spacing_mm, target_mm = grids
    how = Interpolation(order=orders[0], thick=thick, across_slices=orders[1], clips=True)
    image = image_of(shape, len(SCHEMES))
    image[1, : shape[0] // 2] = 0  # one channel has more zeros
    images = [image]
    if target_mm == spacing_mm:
        images += [np.zeros_like(image), np.full_like(image, 7)]  # all zeros, and constant
    for image in images:
        given = (image, spacing_mm, target_mm, list(SCHEMES), how)
        (expected, _), (prepared, _) = nnunet_image(*given, transpose), our_image(*given)
        # Planes along each axis, some at a time; channels without normalisation are 100 times
        # larger.
        tolerances = [1e-5 * max(1, np.abs(channel).max() / 4) for channel in expected]
    for axis, number in ((0, 100), (0, 3), (1, 4), (2, 2)):
        size = prepared.shape[axis]
        starts = range(0, size, number)
        parts = [prepared.planes(axis, one, min(one + number, size)) for one in starts]
        found = torch.cat(parts, 1 + axis)
        for one, wanted, atol in zip(found, expected, tolerances, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0, atol=atol)


@each_value(thick=list(THICK), across_slices=[0, 1], transpose=TRANSPOSED, grids=GRIDS)
def test_restored_logits_are_those_of_nnunet(thick, across_slices, transpose, grids):
    shape, spacing_mm, target_mm = grids
    how = Interpolation(
        thick=thick, across_slices=0, logits_across_slices=across_slices, clips=True
    )
    given = (image_of(shape, 1), spacing_mm, target_mm, ["none"], how)
    (_, properties), (prepared, box) = nnunet_image(*given, transpose), our_image(*given)
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 1, (3, *prepared.shape)).astype(np.float32))
    axes = [2 - axis for axis in transpose]  # our axes in the order of nnU-Net's arrays
    theirs = logits.permute(0, *(1 + axis for axis in axes))
    manager = configuration(["none"], target_mm, how, transpose)
    resized = manager.resampling_fn_probabilities(
        theirs,
        properties["shape_after_cropping_and_before_resampling"],
        manager.spacing,
        [properties["spacing"][axis] for axis in transpose],
    )
    expected = np.asarray(resized).transpose(0, *(1 + axes.index(axis) for axis in range(3)))
    segmentation = exporting.convert_predicted_logits_to_segmentation_with_correct_shape(
        theirs,
        plans_of(transpose, 1),
        manager,
        labelling.LabelManager({"background": 0, "one": 1, "two": 2}, None),
        properties,
        num_threads_torch=1,
    ).transpose()
    for axis, number in ((0, 100), (0, 3), (1, 4), (2, 2)):
        slabs = torch.split(logits, number, 1 + axis)
        planes = restored_slabs(slabs, axis, prepared.restoring())
        restored = torch.cat(list(planes), 1 + axis)
        np.testing.assert_allclose(restored.numpy(), expected, rtol=0, atol=1e-5)
        labels = np.zeros(shape, np.uint8)
        labels[box] = restored.argmax(0).numpy()
        np.testing.assert_array_equal(labels, segmentation)
