"""Images prepared and logits restored by nnU-Net itself, where it is installed."""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.products import pairwise
from unet3d.config import Shape, Spacing
from unet3d.volumes.image_voxels import ImageVoxels, StoredChannels
from unet3d.volumes.normalization import ChannelNormalization
from unet3d.volumes.prepared_image import PreparedImage
from unet3d.volumes.resample import Interpolation, resampled_shape
from unet3d.volumes.restoring import restored_slabs
from unet3d.volumes.transform import Preprocessing, kept_box

preparing = pytest.importorskip("nnunetv2.preprocessing.preprocessors.default_preprocessor")
resampling = pytest.importorskip("nnunetv2.preprocessing.resampling.default_resampling")
exporting = pytest.importorskip("nnunetv2.inference.export_prediction")
plans = pytest.importorskip("nnunetv2.utilities.plans_handling.plans_handler")
labelling = pytest.importorskip("nnunetv2.utilities.label_handling.label_handling")

NNUNET = Interpolation(across_slices=0, logits_across_slices=0, clips=True)

SCHEMES: dict[str, tuple[str, bool]] = {
    "ct": ("CTNormalization", False),
    "z-score-all": ("ZScoreNormalization", False),
    "z-score-inside": ("ZScoreNormalization", True),
    "none": ("NoNormalization", False),
    "rescale": ("RescaleTo01Normalization", False),
    "rgb": ("RGBTo01Normalization", False),
}

CT = {"percentile_00_5": 40.0, "percentile_99_5": 190.0, "mean": 110.3, "std": 37.7}

TRANSPOSED = [[0, 1, 2], [2, 0, 1], [1, 0, 2]]

THICK = {"auto": None, "always": True, "never": False}

GRIDS: list[tuple[Shape, Spacing, Spacing]] = [
    ((23, 19, 17), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)),  # nothing is resampled
    ((23, 19, 17), (1.0, 1.2, 1.5), (1.4, 1.1, 0.9)),
    ((23, 19, 17), (0.7, 0.7, 1.0), (1.5, 1.5, 1.5)),
    ((23, 25, 9), (0.6, 0.6, 5.0), (0.8, 0.8, 3.0)),  # thick slices in the image, more of them
    ((23, 25, 19), (0.6, 0.6, 2.0), (0.8, 0.8, 3.0)),  # and fewer
    ((19, 9, 23), (0.8, 4.0, 0.6), (0.8, 2.0, 0.6)),  # along Y, and nothing in their planes
    ((9, 23, 25), (5.0, 0.6, 0.7), (5.0, 1.0, 1.0)),  # along X, and nothing across them
    ((23, 25, 19), (1.0, 1.0, 1.0), (0.8, 0.8, 3.0)),  # thick in the network alone
    ((23, 7, 9), (0.6, 4.0, 4.0), (0.9, 2.5, 3.0)),  # two axes are equally coarse
    ((23, 7, 9), (0.6, 4.0, 4.5), (0.9, 2.5, 3.0)),  # two are coarse, and one is coarser
    ((24, 25, 1), (0.6, 0.6, 5.0), (0.8, 0.8, 2.0)),
]


def image_of(shape: Shape, channels: int, seed: int = 0) -> np.ndarray:
    """Return what lies in a part of the grid, with holes in it, around which all is zero."""
    rng = np.random.default_rng(seed)
    image = np.zeros((channels, *shape), np.int16)
    inner = tuple(slice(n // 6, n - n // 5) for n in shape)
    image[(slice(None), *inner)] = rng.integers(1, 250, image[(slice(None), *inner)].shape)
    if min(shape) > 6:
        middle = tuple(slice(n // 2 - 1, n // 2 + 2) for n in shape)
        image[(slice(None), *middle)] = 0  # enclosed, so inside
        image[:, : shape[0] // 3, : shape[1] // 3, :] = 0  # a corner, which is outside
    return image


def configuration(
    kinds: list[str], target_mm: Spacing, interpolation: Interpolation, transpose: list[int]
) -> Any:
    """Return nnU-Net's; its axes are ours in reverse order, and then transposed."""
    spacing = [target_mm[::-1][axis] for axis in transpose]
    common = {"force_separate_z": THICK[interpolation.thick]}
    images = {"is_seg": False, "order": interpolation.order, **common}
    logits = {"is_seg": False, "order": 1, **common}
    name = "resample_data_or_seg_to_shape"
    return plans.ConfigurationManager(
        {
            "architecture": {},
            "spacing": spacing,
            "normalization_schemes": [SCHEMES[kind][0] for kind in kinds],
            "use_mask_for_norm": [SCHEMES[kind][1] for kind in kinds],
            "resampling_fn_data": name,
            "resampling_fn_data_kwargs": {**images, "order_z": interpolation.across_slices},
            "resampling_fn_seg": name,
            "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, "order_z": 0, **common},
            "resampling_fn_probabilities": name,
            "resampling_fn_probabilities_kwargs": {
                **logits,
                "order_z": interpolation.logits_across_slices,
            },
        }
    )


def plans_of(transpose: list[int], num_channels: int) -> Any:
    return SimpleNamespace(
        transpose_forward=transpose,
        transpose_backward=[transpose.index(axis) for axis in range(3)],
        foreground_intensity_properties_per_channel={str(c): CT for c in range(num_channels)},
    )


def nnunet_image(
    image: np.ndarray,
    spacing_mm: Spacing,
    target_mm: Spacing,
    kinds: list[str],
    interpolation: Interpolation = NNUNET,
    transpose: list[int] | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return an image prepared by nnU-Net, in our axes, and its notes."""
    order = transpose or [0, 1, 2]
    properties: dict[str, Any] = {"spacing": list(spacing_mm[::-1])}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of means of nothing
        found, _, properties = preparing.DefaultPreprocessor(verbose=False).run_case_npy(
            image.transpose(0, 3, 2, 1),
            None,
            properties,
            plans_of(order, len(image)),
            configuration(kinds, target_mm, interpolation, order),
            {},
        )
    back = [order.index(axis) for axis in range(3)][::-1]
    return found.transpose(0, *(1 + axis for axis in back)), properties


def our_plan(
    kinds: list[str], target_mm: Spacing, interpolation: Interpolation = NNUNET
) -> Preprocessing:
    ct = {"low": 40.0, "high": 190.0, "mean": 110.3, "std": 37.7}
    return Preprocessing(
        spacing_mm=target_mm,
        channels=tuple(
            ChannelNormalization(kind=kind, least_std=1e-8, **(ct if kind == "ct" else {}))  # type: ignore[arg-type]
            for kind in kinds
        ),
        channel_names=tuple(kinds),
        label_names=("background", "one", "two"),
        label_values=(0, 1, 2),
        crops_to_nonzero=True,
        interpolation=interpolation,
    )


def our_image(image: np.ndarray, spacing_mm: Spacing, plan: Preprocessing) -> PreparedImage:
    voxels = ImageVoxels([StoredChannels(voxels=image)])
    return PreparedImage(voxels.cut(kept_box(voxels, plan).slices), spacing_mm, plan)


def assert_planes_are(prepared: PreparedImage, expected: np.ndarray) -> None:
    """Compare planes along each axis, some at a time."""
    atol = 1e-5 * max(1, np.abs(expected).max() / 4)
    for axis, number in ((0, 100), (0, 3), (1, 4), (2, 2)):
        parts = [
            prepared.planes(axis, begin, min(begin + number, prepared.shape[axis])).numpy()
            for begin in range(0, prepared.shape[axis], number)
        ]
        np.testing.assert_allclose(np.concatenate(parts, 1 + axis), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize(("shape", "spacing_mm", "target_mm"), GRIDS, ids=str)
def test_prepared_images_are_those_of_nnunet(kind, shape, spacing_mm, target_mm):
    images = [image_of(shape, 1)]
    if target_mm == spacing_mm:
        images += [np.zeros_like(images[0]), np.full_like(images[0], 7)]  # nothing, and no contrast
    for image in images:
        expected, _ = nnunet_image(image, spacing_mm, target_mm, [kind])
        assert_planes_are(our_image(image, spacing_mm, our_plan([kind], target_mm)), expected)


@pairwise(
    thick=list(THICK),
    orders=[(3, 0), (3, 1), (1, 0), (1, 1)],
    transpose=TRANSPOSED,
    grids=GRIDS[1::2],
)
def test_plans_say_how_images_are_interpolated(thick, orders, transpose, grids):
    order, across_slices = orders
    shape, spacing_mm, target_mm = grids
    how = Interpolation(
        order=order,
        thick=thick,
        across_slices=across_slices,
        logits_across_slices=across_slices,
        clips=True,
    )
    kinds = ["z-score-all", "z-score-inside", "ct"]
    image = image_of(shape, 3)
    image[1, : shape[0] // 2] = 0  # and elsewhere in one channel alone
    expected, _ = nnunet_image(image, spacing_mm, target_mm, kinds, how, transpose)
    assert_planes_are(our_image(image, spacing_mm, our_plan(kinds, target_mm, how)), expected)


def test_shapes_and_thick_axes_are_those_of_nnunet():
    rng = np.random.default_rng(5)
    lengths = [0.5, 0.6, 0.7, 0.75, 0.8, 1.0, 1.2, 1.4, 1.5, 2.0, 2.1, 3.0, 3.6, 4.5, 5.0]
    lengths += [0.699999988079071, 0.9765625, 0.7425000071525574]
    num_separate = 0
    for _ in range(3000):
        x, y, z = (int(n) for n in rng.integers(5, 400, 3))
        have, want = (
            (float(one[0]), float(one[1]), float(one[2])) for one in rng.choice(lengths, (2, 3))
        )
        expected = resampling.compute_new_shape((x, y, z), have, want).tolist()
        assert resampled_shape((x, y, z), have, want) == tuple(max(1, n) for n in expected)
        for thick, force in THICK.items():
            how = Interpolation(thick=thick, clips=True)  # type: ignore[arg-type]
            for first, second in ((have, want), (want, have)):
                is_separate, axis = resampling.determine_do_sep_z_and_axis(force, first, second)
                assert how.slice_axes(first, second) == ((axis,) if is_separate else ())
                num_separate += is_separate
    assert num_separate > 1000


@pairwise(thick=list(THICK), across_slices=[0, 1], transpose=TRANSPOSED, grids=GRIDS)
def test_restored_logits_are_those_of_nnunet(thick, across_slices, transpose, grids):
    shape, spacing_mm, target_mm = grids
    how = Interpolation(
        thick=thick, across_slices=0, logits_across_slices=across_slices, clips=True
    )
    image = image_of(shape, 1)
    _, properties = nnunet_image(image, spacing_mm, target_mm, ["none"], how, transpose)
    plan = our_plan(["none"], target_mm, how)
    prepared = our_image(image, spacing_mm, plan)
    box = kept_box(ImageVoxels([StoredChannels(voxels=image)]), plan)
    logits = torch.from_numpy(
        np.random.default_rng(1).normal(0, 1, (3, *prepared.shape)).astype(np.float32)
    )
    axes = [2 - axis for axis in transpose]  # of nnU-Net's arrays, among ours
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
        restored = torch.cat(
            list(restored_slabs(slabs, axis, prepared.shape, box.shape, prepared.nearest_axes)),
            1 + axis,
        )
        np.testing.assert_allclose(restored.numpy(), expected, rtol=0, atol=1e-5)
        labels = np.zeros(shape, np.uint8)
        labels[box.slices] = restored.argmax(0).numpy()
        np.testing.assert_array_equal(labels, segmentation)
