"""Batches of windows: the best size, single windows if they do not fit, and only then an error."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.images.samples import noise, write_volume
from tests.inference.blending import blended
from tests.mutations import property_test
from tests.networks import place, random_checkpoint, reseeded, set_to
from tests.products import by_night
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.datasets.labels import Region
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError
from unet3d.images.image import open_image
from unet3d.images.scratch import Scratch
from unet3d.inference.image_slab import Planes
from unet3d.inference.networks import Networks
from unet3d.inference.placing import PlacedNetworks
from unet3d.inference.volume_logits import VolumeLogits
from unet3d.inference.windows import Windows, longest_axis, window_starts


def scan_of(array, folder):
    return open_image([write_volume(folder / "scan.nii", array)])


def placed(networks, *devices, **settings):
    """Return networks placed on the CPU, cut over several devices or not, and their logits."""
    mode = "model" if len(devices) > 1 else "none"
    parallel = ParallelSettings(mode=mode, devices=devices or ("cpu",))
    inference = InferenceSettings(**settings)
    networks = Networks.of(*(set_to(one, inference) for one in networks.described))
    where = PlacedNetworks(networks, parallel, Group(Ranks()))
    return where, VolumeLogits(networks, where, Group(Ranks()))


def all_logits(logits, image, windows_done=lambda *_: None):
    slabs = logits.slabs(image, windows_done)
    return torch.cat(list(slabs), 1 + longest_axis(image.shape))


class Memory:
    """Fails forward passes for lack of memory, and records the batch size of each."""

    def __init__(self, predictor, monkeypatch, fits):
        self.tried, self.fits = [], fits
        predict = predictor.executor.predict

        def limited(image):
            self.tried.append(len(image))
            if not self.fits(image):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
            return predict(image)

        monkeypatch.setattr(predictor.executor, "predict", limited)


def test_a_warm_up_asks_for_no_memory_of_the_host(monkeypatch):
    """It uses windows of an imaginary volume, whose size must not be refused."""
    _, logits = placed(Networks.of(random_checkpoint()))
    monkeypatch.setattr(PlacedNetworks, "is_replayable", True)
    monkeypatch.setattr("unet3d.inference.windows.shortage", lambda _: "takes more than there is")
    logits.warm_up()


@pytest.mark.parametrize("late", [True, *by_night(False)])
def test_windows_that_do_not_fit_together_are_computed_one_by_one(
    late, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="unet3d")
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 5 * 16**3)
    scan = scan_of(noise((60, 24, 20)), tmp_path)
    one = place(random_checkpoint(), inference=InferenceSettings(batch_size=1))
    expected = one.segment(scan, probabilities=tmp_path / "one.npy")
    predictor = place(random_checkpoint())
    memory = Memory(predictor, monkeypatch, lambda image: late or len(image) == 1)

    def windows_done(done, total):
        if done >= 10:  # other programs take memory when some planes are done
            memory.fits = lambda image: len(image) == 1

    found = predictor.segment(scan, windows_done, probabilities=tmp_path / "several.npy")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "several.npy"), np.load(tmp_path / "one.npy"))
    num_windows = len(memory.tried) - (3 if late else 1)
    assert memory.tried == [5] * (3 if late else 1) + [1] * num_windows
    (told,) = [line for line in caplog.messages if "per forward pass" in line]
    assert told == "5 windows per forward pass do not fit; trying one"
    # The next scan does not try again.
    memory.tried.clear()
    np.testing.assert_array_equal(predictor.segment(scan), expected)
    assert set(memory.tried) == {1}


@pytest.mark.parametrize(
    ("patch_size", "settings", "max_voxels", "tried", "message"),
    [
        ((16, 16, 16), {}, 0, [5, 1], "windows of 16x16x16 voxels do not fit on cpu"),
        ((16, 16, 16), {"batch_size": 3}, 0, [3], "windows of 16x16x16 voxels do not fit on cpu"),
        (None, {}, 0, [1], "windows of 60x24x20 .*use a smaller inference.window"),
        # If the whole volume is requested, it is not cut into windows.
        ((16, 16, 16), {"window": "whole"}, 16**3, [1], "windows of 60x24x20"),
    ],
    ids=str,
)
def test_memory_too_small_for_any_window_or_what_was_asked_for_is_explained(
    patch_size, settings, max_voxels, tried, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 5 * 16**3)
    checkpoint = random_checkpoint(patch_size=patch_size)
    predictor = place(checkpoint, inference=InferenceSettings(**settings))
    memory = Memory(predictor, monkeypatch, lambda image: image.numel() <= max_voxels)
    with pytest.raises(DoesNotFitError, match=message):
        predictor.segment(scan_of(noise((60, 24, 20)), tmp_path))
    assert memory.tried == tried


def test_of_several_networks_the_one_that_does_not_fit_is_tried_one_by_one(tmp_path, monkeypatch):
    """Also if another network, with larger windows, has begun meanwhile."""
    monkeypatch.setattr("unet3d.inference.windows.CPU_VOXELS", 3 * 8**3)
    scan = scan_of(noise((40, 16, 16)), tmp_path)
    small = random_checkpoint(patch_size=(8, 8, 8), dtype=torch.float64)
    networks = Networks.of(small, replace(small, patch_size=(16, 16, 16)))
    expected = place(networks).segment(scan)
    predictor = place(networks)
    memory = Memory(predictor, monkeypatch, lambda image: True)

    def windows_done(done, total):
        if 1 in memory.tried:  # a window of the second network
            memory.fits = lambda image: len(image) == 1

    np.testing.assert_array_equal(predictor.segment(scan, windows_done), expected)
    assert memory.tried[0] == 3 and set(memory.tried[memory.tried.index(1) + 2 :]) == {1}


# Folds, whose logits are added up together


def folds(count):
    first = random_checkpoint(patch_size=(16, 16, 12), dtype=torch.float64)
    return [first, *(reseeded(first, seed) for seed in range(1, count))]


@pytest.mark.parametrize(
    ("shape", "batch_size", "devices", "sizes"),
    [
        ((18, 17, 24), 3, ("cpu",), [(16, 16, 12), (8, 8, 8), (16, 16, 12)]),
        *by_night(
            ((21, 28, 20), 3, ("cpu",), [(16, 16, 12)] * 3),
            ((17, 18, 36), 100, ("cpu", "cpu"), [(16, 16, 12)] * 3),
        ),
    ],
    ids=str,
)
def test_the_mean_of_folds_is_that_of_what_each_of_them_says(shape, batch_size, devices, sizes):
    array = torch.from_numpy(noise(shape))[None].double()
    members = [replace(one, patch_size=size) for one, size in zip(folds(3), sizes, strict=True)]
    networks, shown = Networks.of(*members), []
    _, logits = placed(networks, *devices, averaging="logits", batch_size=batch_size)
    found = all_logits(logits, Planes.of(array), lambda *done: shown.append(done))
    each = [
        blended(
            network.build_model().eval(),
            array,
            Windows.of(shape, network.topology, size, 0.5, 1, [torch.device("cpu")]),
        )
        for network, size in zip(members, sizes, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=1e-6, atol=1e-6)
    cpu = torch.device("cpu")
    of_each = [Windows.of(shape, networks[0].topology, size, 0.5, 1, [cpu]) for size in sizes]
    total = sum(len(windows.starts) for windows in of_each)
    assert shown[0] == (0, total) and shown[-1] == (total, total)
    assert [done for done, _ in shown] == sorted({done for done, _ in shown})


def test_folds_take_the_memory_of_one_and_turns_a_row_of_windows_long(monkeypatch):
    needed, loaded = [], []
    monkeypatch.setattr(
        "unet3d.inference.sliding_window.refuse_beyond_memory", lambda n, *_: needed.append(n)
    )
    where, logits = placed(Networks.of(*folds(3)), averaging="logits", batch_size=1)
    load_into = where._load_into

    def noted(executor, index):
        loaded.append(index)
        load_into(executor, index)

    monkeypatch.setattr(where, "_load_into", noted)
    image = Planes.of(torch.from_numpy(noise((18, 16, 42)))[None].double())
    all_logits(logits, image)
    # Three classes in float64, for as many planes as a window has, once.
    assert needed == [18 * 16 * 12 * 3 * 8]
    # All networks are loaded once before the first window.
    assert loaded == [1, 2] + [0, 1, 2] * len(window_starts(42, 12, 0.5))


# Windows that are skipped


REGIONS = (
    Region(name="whole", values=(1, 2), written=2),
    Region(name="core", values=(1,), written=1),
)


@pytest.mark.parametrize("regions", [(), REGIONS], ids=["classes", "regions"])
def test_a_body_in_air_is_segmented_as_without_skipping(regions, tmp_path, monkeypatch):
    """Equal where all windows of a voxel are computed; background where none is."""
    checkpoint = random_checkpoint(regions=regions)
    array = np.full((96, 16, 16), -1000, np.int16)
    array[:40] = noise((40, 16, 16))
    scan = scan_of(array, tmp_path)
    path = tmp_path / "a.npy"
    every, skipping = place(checkpoint), place(checkpoint, skips_empty=True)
    computed = [Memory(one, monkeypatch, lambda image: True) for one in (every, skipping)]
    expected = every.segment(scan)
    found = skipping.segment(scan, probabilities=path)
    # Windows of 16 start at 0, 8, ..., 80; the last one that has voxels of the body starts at 32.
    assert [sum(one.tried) for one in computed] == [11, 5]
    np.testing.assert_array_equal(found[:40], expected[:40])
    assert not found[48:].any() and expected[48:].any()
    assert len(np.unique(found)) == 3
    outside = np.load(path).T[48:]
    certain = [0, 0] if regions else [1, 0, 0]
    assert (np.abs(outside.astype(float) - certain) < 1e-3).all()


# Wherever voxels are


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scans")


@partial(property_test, share=0.2)
@given(
    shape=st.tuples(*[st.integers(1, 20)] * 3),
    overlap=st.floats(0, 0.6),
    num_classes=st.integers(2, 5),
    batch_size=st.one_of(st.just("auto"), st.integers(1, 7)),
    dtype=st.sampled_from([np.int16, np.float32]),
    name=st.sampled_from(["a.nii", "a.nii.gz"]),
    has_scratch=st.booleans(),
)
def test_what_is_read_in_parts_is_segmented_as_in_memory(
    folder, shape, overlap, num_classes, batch_size, dtype, name, has_scratch
):
    checkpoint = random_checkpoint(
        label_values=tuple(range(num_classes)),
        patch_size=(8, 8, 8),
        dtype=torch.float64,
        channels=(2, 3),
    )
    windows = Windows.of(shape, checkpoint.topology, (8, 8, 8), overlap, 1, [torch.device("cpu")])
    assume(len(windows.starts) < 12)
    settings = InferenceSettings(overlap=overlap, batch_size=batch_size)
    array = noise(shape).astype(dtype)
    array.flat[0] += 1  # even a scan of one voxel is not empty
    scratch = Scratch(folder) if has_scratch else None
    scan = open_image([write_volume(folder / name, array)], scratch)
    found = place(checkpoint, inference=settings).segment(scan, scratch=scratch)
    wide = array.astype(np.float64)
    counted = wide[wide != 0]
    std = counted.std() if counted.std() > 1e-6 else np.abs(wide).max()
    prepared = torch.from_numpy((wide - counted.mean()) / std)
    with torch.no_grad():
        logits = blended(checkpoint.build_model().eval(), prepared[None], windows)
    # Almost equal logits may lead to other classes, because images are prepared in float32.
    strongest = logits.topk(2, dim=0).values
    is_clear = (strongest[0] - strongest[1] > 1e-4).numpy()
    np.testing.assert_array_equal(found[is_clear], logits.argmax(0).numpy()[is_clear])
