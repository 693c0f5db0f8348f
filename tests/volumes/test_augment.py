import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from unet3d.config import AugmentationSettings, Shape, Spacing
from unet3d.errors import ConfigError
from unet3d.volumes.augment import Augmentation, affine_margin, sample_affine

ALWAYS = {
    f"{name}_probability": 1.0
    for name in (
        *("rotation", "scaling", "noise", "blur", "brightness"),
        *("contrast", "gamma", "low_resolution"),
    )
}
NEVER = {name: 0.0 for name in ALWAYS}


def augmentation(**changes: object) -> Augmentation:
    return Augmentation(AugmentationSettings.model_validate({**NEVER, **changes}))


def test_nothing_happens_where_nothing_may() -> None:
    still = augmentation()
    image, label = torch.randn(1, 6, 6, 6), torch.zeros(6, 6, 6, dtype=torch.uint8)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        assert still.draw_affine(rng, (6, 6, 6), (1, 1, 1)) is None
        assert torch.equal(still.change_intensities(rng, image), image)
        assert still.mirror(rng, image, label) == (image, label)


def test_happens_as_often_as_asked() -> None:
    often = augmentation(rotation_probability=0.2, scaling_probability=0.2)
    drawn = [
        often.draw_affine(np.random.default_rng(seed), (8, 8, 8), (1, 1, 1)) for seed in range(1000)
    ]
    share = sum(matrix is not None for matrix in drawn) / len(drawn)
    assert share == pytest.approx(1 - 0.8 * 0.8, abs=0.05)


def test_rotation_keeps_lengths_in_millimetres() -> None:
    turning = augmentation(rotation_probability=1.0, rotation_degrees=180)
    for seed in range(20):
        spacing: Spacing = (0.5, 1.0, 1.4)
        matrix = turning.draw_affine(np.random.default_rng(seed), (9, 9, 9), spacing)
        assert matrix is not None
        scale = np.diag(spacing)
        in_mm = scale @ matrix @ np.linalg.inv(scale)
        np.testing.assert_allclose(in_mm @ in_mm.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(in_mm) == pytest.approx(1)


def test_scaling_is_the_same_along_every_axis_and_within_range() -> None:
    scaling = augmentation(scaling_probability=1.0, scaling_range=(0.7, 1.4))
    factors = []
    for seed in range(300):
        matrix = scaling.draw_affine(np.random.default_rng(seed), (9, 9, 9), (1, 1, 1))
        assert matrix is not None
        np.testing.assert_allclose(matrix, matrix[0, 0] * np.eye(3), atol=1e-12)
        factors.append(matrix[0, 0])
    assert 0.7 <= min(factors) < 0.75 and 1.3 < max(factors) <= 1.4


@pytest.mark.parametrize(
    ("spacing_mm", "size", "axis"), [((1, 1, 3.3), (9, 9, 9), 2), ((1, 1, 1), (1, 9, 9), 0)]
)
def test_thick_or_single_slices_stay_in_their_plane(
    spacing_mm: Spacing, size: Shape, axis: int
) -> None:
    both = augmentation(rotation_probability=1.0, scaling_probability=1.0)
    for seed in range(10):
        matrix = both.draw_affine(np.random.default_rng(seed), size, spacing_mm)
        assert matrix is not None
        np.testing.assert_allclose(matrix[axis], np.eye(3)[axis], atol=1e-12)
        np.testing.assert_allclose(matrix[:, axis], np.eye(3)[axis], atol=1e-12)
        inplane = [other for other in range(3) if other != axis]
        assert abs(matrix[inplane[0], inplane[1]]) > 1e-6


def test_sampling_is_scipys_affine_transform() -> None:
    rng = np.random.default_rng(0)
    size = (10, 12, 8)
    matrix = (
        np.array([[math.cos(0.4), -math.sin(0.4), 0], [math.sin(0.4), math.cos(0.4), 0], [0, 0, 1]])
        * 1.17
    )
    margin = affine_margin(matrix, size)
    box = tuple(voxels + 2 * extra for voxels, extra in zip(size, margin, strict=True))
    image = rng.normal(size=box).astype(np.float32)
    label = rng.integers(0, 4, box).astype(np.uint8)
    sampled, classes = sample_affine(
        torch.from_numpy(image[None]), torch.from_numpy(label), matrix, size
    )
    assert type(sampled) is torch.Tensor and type(classes) is torch.Tensor
    assert sampled.shape == (1, *size) and classes.shape == size and classes.dtype == torch.uint8
    centre, old_centre = (np.array(size) - 1) / 2, (np.array(box) - 1) / 2
    offset = old_centre - matrix @ centre
    expected = ndimage.affine_transform(
        image, matrix, offset, output_shape=size, order=1, mode="nearest"
    )
    np.testing.assert_allclose(sampled[0].numpy(), expected, atol=1e-4)
    nearest = ndimage.affine_transform(
        label, matrix, offset, output_shape=size, order=0, mode="nearest"
    )
    assert (classes.numpy() == nearest).mean() > 0.99  # float32 against float64 at the halves


def test_the_margin_holds_every_sampled_point() -> None:
    both = augmentation(rotation_probability=1.0, scaling_probability=1.0)
    size = (16, 24, 8)
    for seed in range(20):
        matrix = both.draw_affine(np.random.default_rng(seed), size, (1, 1.2, 2))
        assert matrix is not None
        box = tuple(
            voxels + 2 * extra
            for voxels, extra in zip(size, affine_margin(matrix, size), strict=True)
        )
        ones = torch.ones((1, *box))
        sampled, _ = sample_affine(ones, torch.zeros(box, dtype=torch.uint8), matrix, size)
        assert sampled.min() > 0.999  # no zeros drawn in from outside


@pytest.mark.parametrize(
    "name", ["noise", "blur", "brightness", "contrast", "gamma", "low_resolution"]
)
def test_each_intensity_change_changes_the_image_repeatably(name: str) -> None:
    changing = augmentation(**{f"{name}_probability": 1.0})
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 12, 10, 8)).astype("f"))
    before = image.clone()
    first = changing.change_intensities(np.random.default_rng(5), image)
    assert type(first) is torch.Tensor and first.dtype == torch.float32
    assert first.shape == image.shape and torch.isfinite(first).all()
    assert not torch.equal(first, image)
    assert torch.equal(image, before)
    assert torch.equal(changing.change_intensities(np.random.default_rng(5), image), first)
    assert not torch.equal(changing.change_intensities(np.random.default_rng(6), image), first)


def test_constant_patches_survive_every_change() -> None:
    everything = Augmentation(AugmentationSettings.model_validate(ALWAYS))
    changed = everything.change_intensities(np.random.default_rng(0), torch.zeros(1, 8, 8, 8))
    assert torch.isfinite(changed).all()


def test_only_the_named_axes_are_mirrored() -> None:
    mirroring = augmentation(mirror_axes=("x", "z"))
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    label = image[0].to(torch.uint8)
    seen = set()
    for seed in range(40):
        flipped, classes = mirroring.mirror(np.random.default_rng(seed), image, label)
        assert torch.equal(flipped[0].to(torch.uint8), classes)
        seen.add(tuple(flipped[0, 0, 0].tolist()))
    forms = [image, image.flip(1), image.flip(3), image.flip(1, 3)]
    assert seen == {tuple(form[0, 0, 0].tolist()) for form in forms}


def test_refuses_a_scaling_range_that_is_none() -> None:
    with pytest.raises(ConfigError, match="scaling_range"):
        augmentation(scaling_range=(1.4, 0.7))
