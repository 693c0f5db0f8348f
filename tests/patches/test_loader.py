import multiprocessing
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.patches.known_cases import LIVELY, known_volume, make_cases, make_loader, patch_settings
from unet3d.config import PatchSettings
from unet3d.errors import CacheError, ConfigError, DatasetError
from unet3d.patches.patches import PatchSampler


def loader(cases, size=(4, 4, 4), batch_size=2, stride=(2, 2, 2), **more):
    """Return a loader without augmentation; ``more`` may also have fields of its settings."""
    fields = {key: more.pop(key) for key in list(more) if key in PatchSettings.model_fields}
    settings = patch_settings(**fields)
    return make_loader(cases, settings, size=size, batch_size=batch_size, stride=stride, **more)


def same(left, right):
    return len(left) == len(right) and all(
        a.names == b.names and torch.equal(a.image, b.image) and torch.equal(a.target, b.target)
        for a, b in zip(left, right, strict=True)
    )


def test_what_was_waited_for_patches_is_told_once(tmp_path, monkeypatch):
    now = 0.0

    def slow(self, *where, **options):
        nonlocal now
        now += 1
        return cut(self, *where, **options)

    cut = PatchSampler.cut
    monkeypatch.setattr(PatchSampler, "cut", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    batches = loader(make_cases(tmp_path, [(6, 6, 6)] * 2), batch_size=2, num_steps=5)
    for _ in batches.epoch(0):
        now += 100  # a step, which is no wait for data
    assert batches.take_waited() == 2 * 4  # for all batches but the first
    assert batches.take_waited() == 0


def test_cases_are_drawn_with_replacement_for_full_batches(tmp_path):
    cases = make_cases(tmp_path, [(6, 6, 6)] * 5)
    batches = loader(cases, batch_size=4, num_steps=250)
    drawn = list(batches.epoch(0))
    assert len(drawn) == batches.num_steps == 250
    assert {len(batch.image) for batch in drawn} == {len(batch.names) for batch in drawn} == {4}
    counts = Counter(name for batch in drawn for name in batch.names)
    # Each of five cases is expected in 200 of 1,000 places, with a standard deviation of 12.6.
    assert len(counts) == 5 and all(140 < count < 260 for count in counts.values())
    in_a_row = sum(len(set(batch.names)) < 4 for batch in drawn)
    assert 0.7 < in_a_row / 250 < 0.9, "1 - 5*4*3*2/5^4 = 0.81 of the batches repeat a case"


def test_cases_and_patches_differ_between_epochs_and_seeds(tmp_path):
    cases = make_cases(tmp_path, [(20, 20, 20)] * 8)

    def names(epoch, **settings):
        return [name for batch in loader(cases, **settings).epoch(epoch) for name in batch.names]

    assert names(0) == names(0)
    assert names(0) != names(1)
    assert names(0, seed=1) != names(0)
    batches = loader(cases[:1], batch_size=1, num_steps=10)
    corners = {float(batch.image.flatten()[0]) for e in (0, 1) for batch in batches.epoch(e)}
    assert len(corners) >= 19


def test_the_last_patches_of_each_batch_are_on_foreground(tmp_path):
    """As in nnU-Net: the rounded share of a batch, and at least one patch if the share is not 0."""
    label = np.zeros((40, 40, 40), np.uint8)
    label[20, 20, 20] = 1  # hit by chance once in 64,000 patches
    cases = make_cases(tmp_path, [(40, 40, 40)] * 2, [label, label])
    of_a_third = {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 9: 3}  # numbers by batch size
    thirds = [(size, 0.33, number) for size, number in of_a_third.items()]
    for batch_size, fraction, expected in [*thirds, (4, 0.0, 0), (4, 1.0, 4), (4, 0.5, 2)]:
        batches = loader(cases, batch_size=batch_size, num_steps=2, foreground_fraction=fraction)
        for batch in batches.epoch(0):
            is_centred = [bool(target[2, 2, 2]) for target in batch.target]
            assert is_centred == [False] * (batch_size - expected) + [True] * expected


def test_the_same_patches_whatever_the_workers(tmp_path, forked_workers):
    labels = [np.random.default_rng(n).integers(0, 4, (9, 8, 7)).astype(np.uint8) for n in range(4)]
    cases = make_cases(tmp_path, [(9, 8, 7)] * 4, labels)
    alone = loader(cases, augmentation=LIVELY)
    with_workers = loader(cases, augmentation=LIVELY, num_workers=2)
    state = torch.get_rng_state()
    for epoch in (0, 1):  # the workers already cut the second epoch while the first one ends
        assert same(list(alone.epoch(epoch)), list(with_workers.epoch(epoch)))
    # An epoch that is left in the middle, then its rest, then another epoch: the workers yield no
    # stale patch, lose none, and make none twice.
    whole = list(alone.epoch(2))
    assert len(whole) == 6
    for first_step in (1, 5, 6):
        assert same(list(alone.epoch(2, first_step)), whole[first_step:])
    next(with_workers.epoch(2))
    assert same(list(with_workers.epoch(2, 1)), whole[1:])
    next(with_workers.epoch(3))
    assert same(list(alone.epoch(5)), list(with_workers.epoch(5)))
    assert torch.equal(torch.get_rng_state(), state), "training's own random state is left alone"


def test_whole_volumes_are_padded_to_the_stride_and_to_each_other(tmp_path):
    shapes = [(7, 8, 5), (12, 4, 6), (9, 9, 9)]
    cases = make_cases(tmp_path, shapes)
    batches = loader(cases, size=None, batch_size=2, stride=(4, 4, 2), num_steps=2)
    for batch in batches.epoch(0):
        used = [shapes[int(name[-1])] for name in batch.names]
        expected = [-(-max(s[a] for s in used) // n) * n for a, n in enumerate((4, 4, 2))]
        assert list(batch.image.shape[2:]) == list(batch.target.shape[1:]) == expected
        for image, shape in zip(batch.image[:, 0].numpy(), used, strict=True):
            assert (image != 0).sum() == np.prod(shape)
            first = np.argwhere(image)[0]
            box = tuple(slice(a, a + n) for a, n in zip(first, shape, strict=True))
            np.testing.assert_array_equal(image[box], known_volume(shape)[0])
            rests = np.array(expected) - first - shape  # as much zero padding after it as before it
            assert (np.abs(first - rests) <= 1).all()


def test_refuses_what_cannot_work(tmp_path):
    label = np.full((9, 9, 9), 3, np.uint16)
    cases = make_cases(tmp_path, [(9, 9, 9)], [label])
    with pytest.raises(ConfigError, match=r"10x8x8; .*multiples of 4x4x4, such as 12x8x8"):
        loader(cases, size=(10, 8, 8), stride=(4, 4, 4))
    with pytest.raises(DatasetError, match="no training cases"):
        loader([])
    (batch,) = loader(cases, num_steps=1).epoch(0)
    assert batch.target.dtype == torch.int64 and (batch.target == 3).all()  # as with many classes
    (cases[0].folder / "image.npy").write_bytes(b"damaged")
    for num_workers in (0, 1):
        said = ""
        try:  # the traceback in pytest.raises would keep the worker alive
            next(loader(cases, num_workers=num_workers).epoch(0))
        except CacheError as error:
            said = str(error)
        assert "gone or damaged" in said and "data.cache" in said and "\n" not in said
    assert multiprocessing.active_children() == []


def test_the_next_epoch_goes_on_with_what_is_queued(tmp_path, monkeypatch):
    """Workers restart only if another epoch than the next one is requested."""
    begun = []
    start = DataLoader.__iter__

    def noted(self):
        begun.append(self)
        return start(self)

    monkeypatch.setattr(DataLoader, "__iter__", noted)
    batches = loader(make_cases(tmp_path, [(9, 8, 7)] * 4))
    for epoch, expected in ((0, 1), (1, 1), (2, 1), (5, 2), (6, 2)):
        assert len(list(batches.epoch(epoch))) == 6
        assert len(begun) == expected


@pytest.mark.parametrize(("size", "num_ranks"), [((4, 4, 4), 3), ((4, 4, 4), 5), (None, 3)])
def test_ranks_make_their_share_of_each_batch_to_the_bit(tmp_path, size, num_ranks):
    cases = make_cases(tmp_path, [(9, 8, 7), (8, 8, 8), (5, 9, 7), (8, 6, 8), (7, 7, 7)])
    whole = list(loader(cases, size, batch_size=4, augmentation=LIVELY).epoch(1))
    ranks = [
        list(loader(cases, size, 4, augmentation=LIVELY, rank=rank, num_ranks=num_ranks).epoch(1))
        for rank in range(num_ranks)
    ]
    for number, batch in enumerate(whole):
        shares = [rank[number] for rank in ranks if rank[number].weight]
        for share in shares:
            assert share.weight == pytest.approx(len(share.image) * num_ranks / 4)
        assert batch.names == tuple(name for share in shares for name in share.names)
        assert torch.equal(batch.image, torch.cat([share.image for share in shares]))
        assert torch.equal(batch.target, torch.cat([share.target for share in shares]))
