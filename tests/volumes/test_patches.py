import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage

from tests.volumes.known_cases import PLAIN, known_volume, make_cases
from unet3d.config import AugmentationSettings, PatchSettings, Shape
from unet3d.volumes.augment import Slab
from unet3d.volumes.cache import Cache, PreparedCase
from unet3d.volumes.packed_label import pack_label
from unet3d.volumes.patches import CutBatch, PatchSampler


@dataclass
class Patch:
    image: torch.Tensor
    target: torch.Tensor


def make_sampler(cases: list[PreparedCase], settings: PatchSettings, size: Shape) -> PatchSampler:
    return PatchSampler(
        cases=cases, settings=settings, size=size, stride=(2, 2, 2), batch_size=1, seed=0
    )


def patch_of(sampler: PatchSampler, epoch: int, index: int) -> Patch:
    cut = sampler.cut(epoch, index)
    batch = CutBatch(cuts=(cut,), shape=cut.size).augmented()
    return Patch(batch.image[0], batch.target[0])


def places(patch: torch.Tensor, shape: Shape) -> tuple[npt.NDArray[np.intp], ...]:
    return np.unravel_index(patch.numpy().astype(int) - 1, shape)


def test_a_patch_is_a_true_block_of_the_volume(tmp_path: Path) -> None:
    """Reshaping a volume into patches gives the right number of voxels, from all over the place."""
    shape, size = (12, 10, 14), (6, 4, 8)
    label = np.random.default_rng(0).integers(0, 4, shape).astype(np.uint8)
    cases = make_cases(tmp_path, [shape], [label])
    settings = PatchSettings(augmentation=PLAIN)
    sampler = make_sampler(cases, settings, size)
    for index in range(40):
        patch = patch_of(sampler, 0, index)
        corner = [int(place.flat[0]) for place in places(patch.image[0], shape)]
        box = tuple(slice(first, first + n) for first, n in zip(corner, size, strict=True))
        np.testing.assert_array_equal(patch.image[0].numpy(), known_volume(shape)[0][box])
        np.testing.assert_array_equal(patch.target.numpy(), label[box])
    # A patch as large as its volume is the volume.
    sampler = make_sampler(cases, settings, shape)
    whole = patch_of(sampler, 0, 0)
    np.testing.assert_array_equal(whole.image.numpy(), known_volume(shape))


def test_the_tails_of_a_volume_are_reached(tmp_path: Path) -> None:
    shape = (7, 9, 5)  # no multiples of the patch
    cases = make_cases(tmp_path, [shape])
    settings = PatchSettings(augmentation=PLAIN)
    sampler = make_sampler(cases, settings, (4, 4, 4))
    seen = np.zeros(shape, int)
    for index in range(400):
        seen[places(patch_of(sampler, 0, index).image[0], shape)] += 1
    assert (seen > 0).all()


def test_foreground_patches_are_centred_on_a_random_class(tmp_path: Path) -> None:
    shape = (30, 30, 30)
    label = np.zeros(shape, np.uint8)
    label[15, 15, 15] = 1  # one voxel of 27,000
    label[3:12, 3:28, 3:28] = 3
    cases = make_cases(tmp_path, [shape], [label])
    settings = PatchSettings(foreground_fraction=1.0, augmentation=PLAIN)
    sampler = make_sampler(cases, settings, (4, 4, 4))
    centres = Counter(int(patch_of(sampler, 0, index).target[2, 2, 2]) for index in range(300))
    assert set(centres) == {1, 3}
    assert 110 < centres[1] < 190
    never = PatchSettings(foreground_fraction=0.0, augmentation=PLAIN)
    sampler = make_sampler(cases, never, (4, 4, 4))
    found = sum(bool((patch_of(sampler, 0, index).target == 1).any()) for index in range(300))
    assert found < 10


def test_foreground_at_a_border_keeps_the_patch_inside(tmp_path: Path) -> None:
    label = np.zeros((9, 9, 9), np.uint8)
    label[8, 0, 8] = 2
    cases = make_cases(tmp_path, [(9, 9, 9)], [label])
    settings = PatchSettings(foreground_fraction=1.0, augmentation=PLAIN)
    sampler = make_sampler(cases, settings, (4, 4, 4))
    patch = patch_of(sampler, 0, 0)
    assert patch.image.min() >= 1
    assert patch.target[3, 0, 3] == 2


def test_small_volumes_are_padded_not_cropped(tmp_path: Path) -> None:
    shape = (3, 8, 5)
    label = np.full(shape, 2, np.uint8)
    cases = make_cases(tmp_path, [shape], [label])
    settings = PatchSettings(augmentation=PLAIN)
    sampler = make_sampler(cases, settings, (8, 8, 8))
    patch = patch_of(sampler, 0, 0)
    np.testing.assert_array_equal(patch.image[0, 2:5, :, 1:6].numpy(), known_volume(shape)[0])
    assert (patch.image == 0).sum() == 8**3 - np.prod(shape)
    assert (patch.target == 2).sum() == np.prod(shape)


def test_image_and_target_move_together(tmp_path: Path) -> None:
    """Rotated and scaled, the image still lies where the label is."""
    grid = np.stack(np.meshgrid(*(np.arange(40),) * 3, indexing="ij"))
    label = (((grid - 20) ** 2).sum(0) < 100).astype(np.uint8)
    label[20:] *= 2
    store = Cache(tmp_path)
    store.save_case("ball", label[None].astype(np.float32), label, (1.0, 1.0, 1.0), 3)
    case = store.load_case("ball", "ball")
    assert case is not None
    moving = AugmentationSettings(
        **{f"{name}_probability": 0 for name in ("noise", "blur", "brightness", "contrast")},
        **{f"{name}_probability": 0 for name in ("gamma", "inverted_gamma", "low_resolution")},
        rotation_probability=1,
        scaling_probability=1,
        mirror_axes=("x", "y", "z"),
    )
    settings = PatchSettings(augmentation=moving)
    sampler = make_sampler([case], settings, (32, 32, 32))
    sizes = set()
    for index in range(20):
        patch = patch_of(sampler, 0, index)
        assert type(patch.image) is torch.Tensor and patch.target.dtype == torch.uint8
        close = (patch.image[0] - patch.target).abs() < 0.75
        assert close.float().mean() > 0.97
        assert set(patch.target.unique().tolist()) == {0, 1, 2}
        sizes.add(int((patch.target > 0).sum()))
    assert max(sizes) > 2 * min(sizes)  # the scaling is there


def test_a_patch_reads_only_its_own_bytes(tmp_path: Path) -> None:
    shape = (400, 200, 200)  # 64 MB; the file is a hole on disk
    folder = tmp_path / "sparse"
    folder.mkdir()
    np.lib.format.open_memmap(folder / "image.npy", mode="w+", dtype="f4", shape=(1, *shape))
    np.save(folder / "label.npy", pack_label(np.zeros(shape, np.uint8)))
    case = PreparedCase(
        name="sparse", folder=folder, spacing_mm=(1.0, 1.0, 1.0), num_components=(0, 0)
    )
    settings = PatchSettings(augmentation=PLAIN)
    sampler = make_sampler([case], settings, (16, 16, 16))
    patch_of(sampler, 0, 0)
    start = time.perf_counter()
    np.array(case.image())
    whole_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for index in range(10):
        patch_of(sampler, 0, index)
    assert (time.perf_counter() - start) / 10 < whole_seconds / 2


def test_a_turned_patch_is_scipys_affine_transform(tmp_path: Path) -> None:
    """From case to patch: the box, its margin and the place of the patch in it are right."""
    shape, size = (40, 36, 44), (18, 14, 16)
    rng = np.random.default_rng(0)
    image = rng.normal(size=shape).astype(np.float32)
    label = (ndimage.gaussian_filter(image, 2) > 0).astype(np.uint8)
    store = Cache(tmp_path)
    store.save_case("key", image[None], label, (1.0, 1.0, 1.0), 2)
    case = store.load_case("key", "case")
    assert case is not None
    nothing = {f"{n}_probability": 0 for n in ("noise", "blur", "brightness", "contrast", "gamma")}
    turning = AugmentationSettings(
        **nothing,
        inverted_gamma_probability=0,
        low_resolution_probability=0,
        rotation_probability=1,
        scaling_probability=1,
        mirror_axes=("y",),
    )
    settings = PatchSettings(augmentation=turning)
    sampler = make_sampler([case], settings, size)
    stored = np.asarray(case.image()[0], np.float64)
    for index in range(10):
        cut = sampler.cut(0, index)
        patch = patch_of(sampler, 0, index)
        # The drawn map, in voxels of the case: found again from where the box was cut.
        matches = sliding_start(stored, cut.image[0].double().numpy())
        offset = np.array(cut.placement.offset) + matches
        expected = ndimage.affine_transform(
            stored, cut.placement.matrix, offset, size, order=1, mode="grid-constant"
        )
        np.testing.assert_allclose(patch.image[0], expected, atol=1e-5)
        classes = [
            ndimage.affine_transform(
                (label == number).astype(float),
                cut.placement.matrix,
                offset,
                size,
                order=1,
                mode="grid-constant",
            )
            for number in (0, 1)
        ]
        certain = np.abs(classes[1] - classes[0]) > 1e-4
        inside = classes[0] + classes[1] > 1 - 1e-9
        wanted = (classes[1] > classes[0]).astype(np.uint8)
        chosen = certain & inside
        np.testing.assert_array_equal(patch.target.numpy()[chosen], wanted[chosen])


def sliding_start(stored: npt.NDArray[np.float64], box: npt.NDArray[np.float64]) -> list[int]:
    """Return where a box of a volume of different numbers was cut."""
    (start,) = np.argwhere(stored == box[0, 0, 0])
    x, y, z = (int(first) for first in start)
    found = stored[x : x + box.shape[0], y : y + box.shape[1], z : z + box.shape[2]]
    np.testing.assert_array_equal(found, box)
    return [x, y, z]


def test_a_cut_takes_no_more_than_its_region_needs(tmp_path: Path) -> None:
    cases = make_cases(tmp_path, [(40, 30, 30)])
    settings = PatchSettings(augmentation=PLAIN)
    sampler = make_sampler(cases, settings, (16, 16, 16))
    slab = sampler.cut(0, 0, Slab(planes=range(4, 8), num_planes=16))
    assert slab.image.shape == (1, 4, 16, 16) and slab.size == (16, 16, 16)
    whole = sampler.cut(0, 0)
    assert torch.equal(slab.image, whole.image[:, 4:8])
