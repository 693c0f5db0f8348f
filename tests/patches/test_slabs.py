"""Slabs of batches, joined, equal the batches of a loader without slabs."""

from functools import partial
from itertools import pairwise, product
from unittest import mock

import numpy as np
import pytest
import torch

from tests.patches.known_cases import PLAIN, make_loader, patch_settings
from tests.products import by_night
from unet3d.config import AugmentationSettings
from unet3d.errors import DeviceError
from unet3d.patches.augment.cut import Slab, shape_of
from unet3d.patches.patches import PatchSampler
from unet3d.preparation.cache import Cache

MOVING = ("rotation", "scaling")
LINEAR = ("noise", "blur", "brightness", "low_resolution")
MEASURED = ("contrast", "inverted_gamma", "gamma")


def drawn(*names, probability=1.0):
    """Return settings with which only these changes are drawn."""
    values = {
        f"{name}_probability": probability if name in names else 0.0
        for name in (*MOVING, *LINEAR, *MEASURED)
    }
    return AugmentationSettings.model_validate({**values, "mirror_axes": ["x", "y", "z"]})


SETTINGS = {
    "off": PLAIN,
    "mirrored": drawn(),
    "moved": drawn(*MOVING),
    "linear": drawn(*MOVING, *LINEAR),
    "everything": drawn(*MOVING, *LINEAR, *MEASURED),
    "sometimes": drawn(*MOVING, *LINEAR, *MEASURED, probability=0.4),
}
SMALL = (20, 18, 21)
WIDE = (45, 18, 35)
SHAPES = ((33, 30, 29), (26, 34, 20), (17, 21, 40), (40, 24, 31))


def real_cases(folder, shapes=SHAPES, spacing_mm=(1.0, 1.1, 0.9)):
    store, rng = Cache(folder), np.random.default_rng(0)
    for number, shape in enumerate(shapes):
        image = rng.normal(size=(2, *shape)).astype(np.float32)
        label = rng.integers(0, 4, shape).astype(np.uint8)
        store.save_case(f"real{number}", image, label, spacing_mm, 4)
    return [store.load_case(f"real{number}", f"case_{number}") for number in range(len(shapes))]


def slab_of(fractions, shape):
    """Return a slab's planes, uneven and in any number, in the form that a rank gets."""
    first, last = (round(fraction * shape[0]) for fraction in fractions)
    return range(first, last)


def slabs(*fractions):
    return [partial(slab_of, both) for both in pairwise((0.0, *fractions, 1.0))]


def loader(cases, augmentation, size=SMALL, stride=(1, 1, 1), **settings):
    given = {"num_steps": 2, "seed": 3, "size": size, "stride": stride, **settings}
    return make_loader(cases, patch_settings(augmentation), **given)


def check(whole, shards):
    for batch, *parts in zip(whole, *shards, strict=True):
        assert {part.planes for part in parts} == {batch.image.shape[2]}
        assert {(part.names, part.weight) for part in parts} == {(batch.names, batch.weight)}
        image = torch.cat([part.image for part in parts], dim=2)
        torch.testing.assert_close(image, batch.image, rtol=0, atol=1e-6)
        target = torch.cat([part.target for part in parts], dim=1)
        assert torch.equal(target, batch.target)
        assert batch.planes is None


BY_DAY = {("off", None), ("mirrored", WIDE), ("moved", None), ("linear", WIDE)}
BY_DAY |= {("everything", None), ("everything", SMALL), ("sometimes", WIDE)}
ALL = [
    pytest.param(*one, marks=() if one in BY_DAY else pytest.mark.nightly)
    for one in product(SETTINGS, (SMALL, WIDE, None))
]


@pytest.mark.parametrize(("name", "size"), ALL, ids=str)
def test_slabs_are_those_of_the_whole_batch(tmp_path, name, size):
    """Patches in cases, patches larger than cases, and whole cases of several shapes."""
    cases = real_cases(tmp_path)
    for stride in ((1, 1, 1), (4, 2, 2)) if size is None else ((1, 1, 1),):
        whole = list(loader(cases, SETTINGS[name], size, stride).epoch(1))
        shards = [
            list(loader(cases, SETTINGS[name], size, stride, slab=slab).epoch(1))
            for slab in slabs(0.15, 0.2, 0.7)
        ]
        check(whole, shards)


@pytest.mark.parametrize("spacing_mm", [(0.7, 0.7, 4.0), (4.0, 0.8, 0.7), (1.0, 5.0, 25.0)])
def test_thick_slices_are_divided(tmp_path, spacing_mm):
    cases = real_cases(tmp_path, spacing_mm=spacing_mm)
    for name in ("linear", "sometimes"):
        whole = list(loader(cases, SETTINGS[name]).epoch(0))
        shards = [list(loader(cases, SETTINGS[name], slab=slab).epoch(0)) for slab in slabs(0.35)]
        check(whole, shards)


@pytest.mark.parametrize("size", [(20, 18, 21), *by_night(None)], ids=str)
def test_replicas_share_batches_and_shards_their_patches(tmp_path, size):
    """With workers, with fewer patches in a batch than replicas, and after a resume."""
    cases = real_cases(tmp_path)
    given = {"size": size, "batch_size": 3 if size else 1}
    for replica in range(2):
        own = {**given, "rank": replica, "num_ranks": 2}
        whole = list(loader(cases, SETTINGS["sometimes"], **own).epoch(2))
        assert min(batch.num_samples for batch in whole) == given["batch_size"] // 2 + (not replica)
        shards = []
        for slab in slabs(0.6):
            batches = loader(cases, SETTINGS["sometimes"], **own, slab=slab, num_workers=2)
            shards.append(list(batches.epoch(2, 1)))
            batches.close()
        check(whole[1:], shards)


def test_a_slab_that_cannot_be_is_an_error_in_one_line(tmp_path):
    no_slab = mock.Mock(side_effect=DeviceError("too few planes"))
    with pytest.raises(DeviceError, match="too few planes"):
        next(loader(real_cases(tmp_path), SETTINGS["off"], slab=no_slab).epoch(0))


def test_only_what_a_slab_needs_is_read(tmp_path):
    """The whole patch only if intensities are measured and the numbers are not gathered."""
    cases = real_cases(tmp_path, [(60, 40, 40)])
    size = (40, 20, 20)
    slab = Slab(planes=range(10), num_planes=40)

    def planes(name, gathers):
        settings = patch_settings(SETTINGS[name])
        sampler = PatchSampler(
            cases=cases, settings=settings, size=size, stride=(1, 1, 1), batch_size=1, seed=0
        )
        cut = sampler.cut(0, 0, slab, gathers=gathers)
        assert shape_of(cut.extent.part) == (10, 20, 20) and cut.label.shape == cut.image.shape[1:]
        return len(cut.label), shape_of(cut.extent.made)[0]

    assert planes("off", False) == planes("mirrored", False) == (10, 10)
    assert 10 < planes("linear", False)[1] <= 10 + 4 + 4
    assert planes("linear", False)[0] < 30
    assert planes("everything", False)[1] == 40
    assert planes("everything", True) == planes("linear", True)
