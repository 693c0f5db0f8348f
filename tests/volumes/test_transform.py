import json

import numpy as np
import pytest
import torch
from scipy import ndimage

from unet3d.config import Shape, Spacing
from unet3d.errors import VolumeError
from unet3d.plain_data import validated
from unet3d.volumes.transform import (
    ChannelNormalization,
    Preprocessing,
    prepare_image,
    prepare_label,
    restore_logits,
)

RNG = np.random.default_rng(0)


def plan(
    *channels: ChannelNormalization,
    spacing_mm: Spacing | None = None,
    label_values: tuple[int, ...] = (0, 1, 2),
) -> Preprocessing:
    return Preprocessing(
        spacing_mm=spacing_mm,
        channels=channels or (ChannelNormalization(kind="z-score"),),
        channel_names=tuple(f"m{number}" for number in range(max(1, len(channels)))),
        label_names=tuple(f"label {value}" for value in label_values),
        label_values=label_values,
    )


def test_survives_json() -> None:
    ct = ChannelNormalization(kind="ct", low=-100, high=200, mean=40.5, std=31.25)
    preprocessing = plan(ct, ChannelNormalization(kind="none"), spacing_mm=(0.5, 0.75, 3.0))
    tree = json.loads(json.dumps(preprocessing.to_dict()))
    assert validated(Preprocessing, tree) == preprocessing
    assert validated(Preprocessing, plan().to_dict()) == plan()


def test_z_score_is_over_the_voxels_that_are_not_zero() -> None:
    image = RNG.normal(1000, 50, (1, 12, 12, 12)).astype(np.float32)
    image[:, :6] = 0
    before = image.copy()
    prepared = prepare_image(image, (1, 1, 1), plan())
    np.testing.assert_array_equal(image, before)
    assert prepared.dtype == np.float32
    inside = prepared[:, 6:].astype(np.float64)
    assert abs(inside.mean()) < 1e-4
    assert abs(inside.std() - 1) < 1e-4
    # One shift and one scale for the whole image: zero keeps its distance.
    expected = -before[:, 6:].mean(dtype=float) / before[:, 6:].std(dtype=float)
    np.testing.assert_allclose(prepared[:, :6], expected, rtol=1e-4)


def test_z_score_forgets_the_range_of_the_scanner() -> None:
    image = RNG.uniform(1, 2, (1, 8, 8, 8)).astype(np.float32)
    np.testing.assert_allclose(
        prepare_image(image * 5000, (1, 1, 1), plan()),
        prepare_image(image, (1, 1, 1), plan()),
        atol=1e-4,
    )


@pytest.mark.parametrize("value", [0.0, 7.0, 1e6])
def test_constant_images_become_zero(value: float) -> None:
    image = np.full((1, 4, 4, 4), value, np.float32)
    np.testing.assert_array_equal(prepare_image(image, (1, 1, 1), plan()), 0)


def test_channels_are_normalized_each_its_own_way() -> None:
    image = RNG.uniform(-2000, 2000, (3, 6, 6, 6)).astype(np.float32)
    ct = ChannelNormalization(kind="ct", low=-100, high=200, mean=50, std=25)
    prepared = prepare_image(
        image,
        (1, 1, 1),
        plan(ct, ChannelNormalization(kind="none"), ChannelNormalization(kind="z-score")),
    )
    np.testing.assert_allclose(prepared[0], (np.clip(image[0], -100, 200) - 50) / 25, rtol=1e-5)
    np.testing.assert_array_equal(prepared[1], image[1])
    assert abs(prepared[2].std() - 1) < 1e-4
    with pytest.raises(VolumeError, match=r"has 3 channel\(s\); 2 are needed: m0, m1"):
        prepare_image(image, (1, 1, 1), plan(ct, ct))


def test_labels_become_class_indices() -> None:
    label = np.array([[[0, 9], [4, 4]]], np.uint16)
    classes = prepare_label(label, (1, 1, 1), plan(label_values=(0, 4, 9)))
    assert classes.dtype == np.uint8
    np.testing.assert_array_equal(classes, [[[0, 2], [1, 1]]])
    many = prepare_label(label, (1, 1, 1), plan(label_values=tuple(range(300))))
    assert many.dtype == np.uint16
    np.testing.assert_array_equal(many, label)


@pytest.mark.parametrize("value", [-1, 3, 255])
def test_refuses_label_values_without_a_class(value: int) -> None:
    label = np.zeros((3, 3, 3), np.int16)
    label[1, 1, 1] = value
    with pytest.raises(VolumeError, match=rf"the value {value}, .*names 0, 1, 2, 9"):
        prepare_label(label, (1, 1, 1), plan(label_values=(0, 1, 2, 9)))


def test_image_and_label_land_on_one_grid() -> None:
    label = np.zeros((20, 24, 10), np.uint8)
    label[5:15, 6:18, 2:8] = 1
    image = label[None].astype(np.float32) + 1
    preprocessing = plan(ChannelNormalization(kind="none"), spacing_mm=(0.7, 1.3, 1.0))
    prepared = prepare_image(image, (1, 1, 2.5), preprocessing)
    classes = prepare_label(label, (1, 1, 2.5), preprocessing)
    assert prepared.shape[1:] == classes.shape == (29, 18, 25)
    in_image = np.array(ndimage.center_of_mass(prepared[0] - 1))
    in_label = np.array(ndimage.center_of_mass(classes))
    expected = (np.array([9.5, 11.5, 4.5]) + 0.5) * np.array([29, 18, 25]) / label.shape - 0.5
    np.testing.assert_allclose(in_image, expected, atol=0.1)
    np.testing.assert_allclose(in_label, expected, atol=0.5)


def test_logits_return_to_the_original_grid() -> None:
    # A field that is linear in space is the same field on any grid of the same box.
    def field(shape: Shape) -> torch.Tensor:
        x, y, z = ((torch.arange(size, dtype=torch.float64) + 0.5) / size - 0.5 for size in shape)
        plane = x[:, None, None] + 2 * y[None, :, None] - z[None, None, :]
        return torch.stack([plane, -3 * plane])

    small, large = (20, 16, 12), (33, 25, 40)
    restored = restore_logits(field(small), large)
    assert restored.shape == (2, *large) and restored.dtype == torch.float64
    inside = (slice(None), slice(2, -2), slice(2, -2), slice(2, -2))
    torch.testing.assert_close(restored[inside], field(large)[inside])
    same = field(small)
    assert restore_logits(same, small) is same


def test_a_label_map_survives_the_way_there_and_back() -> None:
    label = np.zeros((30, 30, 15), np.uint8)
    label[8:20, 5:25, 3:12] = 1
    label[20:26, 5:25, 3:12] = 2
    classes = prepare_label(label, (1, 1, 2), plan(spacing_mm=(1, 1, 1)))
    logits = torch.nn.functional.one_hot(torch.from_numpy(classes).long(), 3).movedim(-1, 0)
    back = restore_logits(logits.float(), (30, 30, 15)).argmax(0).numpy()
    np.testing.assert_array_equal(back, label)
