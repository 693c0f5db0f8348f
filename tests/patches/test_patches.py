import os
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest
from scipy import ndimage

from tests.patches.known_cases import known_volume, make_cases, patch_settings, probable
from unet3d.errors import CacheError
from unet3d.patches.patches import CutBatch, PatchSampler
from unet3d.preparation.cache import Cache, PreparedCase


def make_sampler(cases, size, **settings):
    return PatchSampler(
        cases=cases,
        settings=patch_settings(**settings),
        size=size,
        stride=(2, 2, 2),
        batch_size=1,
        seed=0,
    )


def patch_of(sampler, epoch, index):
    """Return image and target of a patch."""
    cut = sampler.cut(epoch, index)
    batch = CutBatch(cuts=(cut,), shape=cut.extent.size).augmented()
    return batch.image[0], batch.target[0]


def places(patch, shape):
    return np.unravel_index(patch.numpy().astype(int) - 1, shape)


def test_a_patch_is_a_true_block_of_the_volume(tmp_path):
    """Reshaped volumes would have the right shape, but voxels from everywhere."""
    shape, size = (12, 10, 14), (6, 4, 8)
    label = np.random.default_rng(0).integers(0, 4, shape).astype(np.uint8)
    cases = make_cases(tmp_path, [shape], [label])
    sampler = make_sampler(cases, size)
    for index in range(40):
        image, target = patch_of(sampler, 0, index)
        corner = [int(place.flat[0]) for place in places(image[0], shape)]
        box = tuple(slice(first, first + n) for first, n in zip(corner, size, strict=True))
        np.testing.assert_array_equal(image[0].numpy(), known_volume(shape)[0][box])
        np.testing.assert_array_equal(target.numpy(), label[box])
    # A patch as large as its volume is the volume.
    image, _ = patch_of(make_sampler(cases, shape), 0, 0)
    np.testing.assert_array_equal(image.numpy(), known_volume(shape))


def test_the_tails_of_a_volume_are_reached(tmp_path):
    shape = (7, 9, 5)  # not multiples of the patch
    sampler = make_sampler(make_cases(tmp_path, [shape]), (4, 4, 4))
    seen = np.zeros(shape, int)
    for index in range(400):
        seen[places(patch_of(sampler, 0, index)[0][0], shape)] += 1
    assert (seen > 0).all()


def test_foreground_patches_are_centred_on_a_random_class(tmp_path):
    shape = (30, 30, 30)
    label = np.zeros(shape, np.uint8)
    label[15, 15, 15] = 1  # one voxel of 27,000
    label[3:12, 3:28, 3:28] = 3
    cases = make_cases(tmp_path, [shape], [label])
    sampler = make_sampler(cases, (4, 4, 4), foreground_fraction=1.0)
    centres = Counter(int(patch_of(sampler, 0, index)[1][2, 2, 2]) for index in range(300))
    assert set(centres) == {1, 3}
    assert 110 < centres[1] < 190
    sampler = make_sampler(cases, (4, 4, 4), foreground_fraction=0.0)
    found = sum(bool((patch_of(sampler, 0, index)[1] == 1).any()) for index in range(300))
    assert found < 10
    # At a border the patch stays inside.
    label = np.zeros((9, 9, 9), np.uint8)
    label[8, 0, 8] = 2
    cases = make_cases(tmp_path / "border", [(9, 9, 9)], [label])
    image, target = patch_of(make_sampler(cases, (4, 4, 4), foreground_fraction=1.0), 0, 0)
    assert image.min() >= 1
    assert target[3, 0, 3] == 2


@pytest.mark.parametrize("name", ["foreground", "components"])
def test_places_outside_of_the_volume_are_explained(tmp_path, name):
    label = (np.arange(8**3).reshape(8, 8, 8) % 5 == 0).astype(np.uint8)
    (case,) = make_cases(tmp_path, [(8, 8, 8)], [label])
    path = case.folder / f"{name}.npy"
    header, values = path.read_bytes()[:128], path.read_bytes()[128:]
    path.write_bytes(header + b"\xff" * len(values))
    with pytest.raises(CacheError, match="key0 is damaged; delete it and run again"):
        make_sampler([case], (4, 4, 4), foreground_fraction=1.0).cut(0, 0)


def test_small_volumes_are_padded_not_cropped(tmp_path):
    shape = (3, 8, 5)
    cases = make_cases(tmp_path, [shape], [np.full(shape, 2, np.uint8)])
    image, target = patch_of(make_sampler(cases, (8, 8, 8)), 0, 0)
    np.testing.assert_array_equal(image[0, 2:5, :, 1:6].numpy(), known_volume(shape)[0])
    assert (image == 0).sum() == 8**3 - np.prod(shape)
    assert (target == 2).sum() == np.prod(shape)


def test_a_patch_reads_only_its_own_bytes(tmp_path):
    shape = (400, 200, 200)  # 64 MB; the file is sparse and takes no space
    folder = tmp_path / "sparse"
    folder.mkdir()
    arrays = {"image": ((1, *shape), "<f4", 2**26), "label": (shape, "|u1", 2**24)}
    for name, (_, _, size) in arrays.items():
        (folder / f"{name}.npy").touch()
        os.truncate(folder / f"{name}.npy", size)
    notes = {"spacing_mm": (1, 1, 1), "num_components": (0, 0)}
    case = PreparedCase(name="sparse", folder=folder, arrays=arrays, **notes)
    sampler = make_sampler([case], (16, 16, 16), foreground_fraction=0)
    tracemalloc.start()
    try:
        cut = sampler.cut(0, 0)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cut.image.shape == (1, 16, 16, 16)
    assert most_bytes < 2**22


def test_a_turned_patch_is_scipys_affine_transform(tmp_path):
    """From case to patch: the box, its margin, and the patch's place in it are right."""
    shape, size = (40, 36, 44), (18, 14, 16)
    rng = np.random.default_rng(0)
    image = rng.normal(size=shape).astype(np.float32)
    label = (ndimage.gaussian_filter(image, 2) > 0).astype(np.uint8)
    store = Cache(tmp_path)
    store.save_case("key", image[None], label, (1.0, 1.0, 1.0), 2)
    case = store.load_case("key", "case")
    turning = probable(0, rotation_probability=1, scaling_probability=1, mirror_axes=("y",))
    sampler = make_sampler([case], size, augmentation=turning)
    stored = np.asarray(case.image()[0], np.float64)
    scales = []
    for index in range(10):
        cut = sampler.cut(0, index)
        found, target = patch_of(sampler, 0, index)
        matrix = cut.placement.matrix
        # The drawn map, in voxels of the case, reconstructed from where the box was cut.
        (start,) = np.argwhere(stored == float(cut.image[0, 0, 0, 0]))
        box = tuple(slice(a, a + n) for a, n in zip(start, cut.image.shape[1:], strict=True))
        np.testing.assert_array_equal(stored[box], cut.image[0].double().numpy())
        moved = partial(
            ndimage.affine_transform,
            matrix=matrix,
            offset=np.array(cut.placement.offset) + start,
            output_shape=size,
            order=1,
            mode="grid-constant",
        )
        np.testing.assert_allclose(found[0], moved(stored), atol=1e-5)
        outer, inner = (moved((label == number).astype(float)) for number in (0, 1))
        chosen = (np.abs(inner - outer) > 1e-4) & (outer + inner > 1 - 1e-9)
        np.testing.assert_array_equal(target.numpy()[chosen], (inner > outer)[chosen])
        scales.append(abs(np.linalg.det(matrix)))
    assert max(scales) > 1.5 * min(scales)  # scaling takes place
