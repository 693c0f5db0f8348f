import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import threading
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from tests.images.samples import blob_label, held_image, write_msd, write_nnunet, write_volume
from unet3d import terminal
from unet3d.config import DataSettings
from unet3d.datasets.dataset import load_dataset
from unet3d.errors import DatasetError, VolumeError
from unet3d.images.image import Image
from unet3d.preparation import preprocess
from unet3d.preparation.cache import Cache
from unet3d.preparation.check import examine
from unet3d.preparation.normalization import ChannelNormalization
from unet3d.preparation.prepared_image import prepare_image, prepare_label
from unet3d.preparation.preprocess import (
    ct_normalization,
    plan_preprocessing,
    prepare_cases,
    stored_image,
)


@pytest.fixture
def settings(tmp_path):
    return DataSettings(cache=tmp_path / "cache")


def with_(settings, **changes):
    return settings.model_copy(update=changes)


def prepare(dataset, settings, num_workers=0):
    preprocessing, _ = plan_preprocessing(dataset, settings)
    return prepare_cases(dataset.cases, preprocessing, settings.cache, num_workers)


def arrays(cases):
    return [(case.image().tobytes(), case.label().tobytes()) for case in cases]


def forbid_reading(monkeypatch):
    def refuse(*_):
        raise AssertionError("a volume was read again")

    monkeypatch.setattr(Image, "read", refuse)
    monkeypatch.setattr(preprocess, "read_label", refuse)
    monkeypatch.setattr(hashlib, "file_digest", refuse)


def test_plans_the_median_spacing_and_shape(tmp_path, settings, monkeypatch):
    root = write_msd(tmp_path / "data", num_cases=3, shape=(10, 20, 8), spacing_mm=(1, 1, 2))
    for kind in ("imagesTr", "labelsTr"):
        write_volume(root / kind / "case_2.nii.gz", np.zeros((30, 20, 8), np.uint8), (0.5, 1, 6))
    dataset = load_dataset(root)
    plan, fingerprint = plan_preprocessing(dataset, settings)
    assert plan.spacing_mm == fingerprint.spacing_mm == (1.0, 1.0, 2.0)
    assert fingerprint.shape == (10, 20, 8)
    assert plan.channels == (ChannelNormalization(kind="z-score"),)
    assert plan.label_names == ("background", "left", "right")
    geometries = examine(dataset).geometries
    with monkeypatch.context() as patch:  # headers that the checks have read are not read again
        patch.delattr(preprocess, "open_image")
        assert plan_preprocessing(dataset, settings, geometries) == (plan, fingerprint)
    plan, fingerprint = plan_preprocessing(dataset, with_(settings, spacing_mm="native"))
    assert plan.spacing_mm is None
    assert fingerprint.spacing_mm == (1.0, 1.0, 2.0)
    plan, fingerprint = plan_preprocessing(dataset, with_(settings, spacing_mm=(2.0, 1.0, 1.0)))
    assert plan.spacing_mm == (2.0, 1.0, 1.0)
    assert fingerprint.shape == (5, 20, 16) and fingerprint.num_voxels == 3 * 5 * 20 * 16


def write_in_zeros(root, boxes, shape, spacing_mm):
    """Write a data set; each image is zero outside of a box."""
    write_msd(root, num_cases=len(boxes), shape=shape, spacing_mm=spacing_mm)
    for number, box in enumerate(boxes):
        image = np.zeros(shape, np.float32)
        image[box] = np.random.default_rng(number).normal(100, 10, image[box].shape)
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image, spacing_mm)
    return load_dataset(root)


BOX = (slice(4, 20), slice(3, 23), slice(2, 12))


@pytest.mark.parametrize("target_mm", ["native", (1.5, 0.8, 2.0)], ids=str)
def test_image_and_label_map_are_cut_to_what_is_not_zero(tmp_path, settings, target_mm):
    settings = with_(settings, spacing_mm=target_mm)
    dataset = write_in_zeros(tmp_path / "data", [BOX], (30, 24, 16), (1, 1, 2))
    plan, fingerprint = plan_preprocessing(dataset, settings)
    assert plan.crops_to_nonzero
    (case,) = prepare_cases(dataset.cases, plan, settings.cache, 0)
    root = tmp_path / "cut"
    write_msd(root, num_cases=1)
    for kind in ("imagesTr", "labelsTr"):
        array = np.asarray(nib.load(tmp_path / "data" / kind / "case_0.nii.gz").dataobj)[BOX]
        write_volume(root / kind / "case_0.nii.gz", array, spacing_mm=(1, 1, 2))
    cut = load_dataset(root)
    of_cut, fingerprint_of_cut = plan_preprocessing(cut, settings)
    (expected,) = prepare_cases(cut.cases, of_cut, settings.cache, 0)
    assert arrays([case]) == arrays([expected])
    assert fingerprint == fingerprint_of_cut


def test_the_outside_is_masked_where_cropping_takes_a_quarter_of_the_median_case(
    tmp_path, settings
):
    for number, (planes, normalization, kind) in enumerate(
        [
            ((10, 23, 30), "auto", "z-score"),
            ((10, 22, 30), "auto", "z-score-inside"),
            ((12, 12, 30), "none", "none"),
            ((12, 12, 30), "ct", "ct"),
        ]
    ):
        boxes = [(slice(0, number), slice(None), slice(None)) for number in planes]
        dataset = write_in_zeros(tmp_path / f"{number}", boxes, (30, 6, 6), (1, 1, 1))
        plan, _ = plan_preprocessing(dataset, with_(settings, normalization=normalization))
        assert [channel.kind for channel in plan.channels] == [kind]


@pytest.mark.parametrize(
    ("dtype", "spacing_mm", "kind"),
    [("u1", 1e-5, "ct"), ("u2", 1e-5, "ct"), ("i2", 1e-5, "z-score"), ("u1", 1.0, "z-score")],
)
def test_volumes_of_microscopes_are_scaled_by_percentiles_of_the_data_set(
    tmp_path, settings, dtype, spacing_mm, kind
):
    """The statistics are of all voxels, and every case has the same weight."""
    rng = np.random.default_rng(3)
    root = write_msd(tmp_path / "data", num_cases=3, shape=(12, 9, 7))
    images = [rng.integers(1, 250, (12, 9, size)).astype(dtype) for size in (7, 7, 21)]
    for number, image in enumerate(images):
        size = (spacing_mm,) * 3
        write_volume(root / f"imagesTr/case_{number}.nii.gz", image, size)
        write_volume(root / f"labelsTr/case_{number}.nii.gz", (image > 99).astype("u1"), size)
    dataset = load_dataset(root)
    plan, _ = plan_preprocessing(dataset, settings)
    (how,) = plan.channels
    assert how.kind == kind
    chosen, _ = plan_preprocessing(dataset, with_(settings, normalization="percentiles"))
    if kind == "ct":
        assert chosen.channels == plan.channels
    values = np.concatenate([*(image.ravel() for image in images[:2] * 3), images[2].ravel()])
    values = np.sort(values.astype(np.float64))
    (how,) = chosen.channels
    assert (how.mean, how.std) == pytest.approx((values.mean(), values.std()))
    assert (how.low, how.high) == tuple(np.quantile(values, [0.005, 0.995], method="inverted_cdf"))


def test_percentiles_of_many_voxels_are_of_a_sample_and_kept(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(preprocess, "MAX_INTENSITIES_PER_CASE", 400)
    root = write_msd(tmp_path / "data", num_cases=1, shape=(30, 20, 10))
    image = np.random.default_rng(0).normal(1000, 50, (30, 20, 10)).astype(np.uint16)
    for kind, array in (("images", image), ("labels", (image > 1000).astype("u1"))):
        write_volume(root / f"{kind}Tr/case_0.nii.gz", array, (1e-4,) * 3)
    dataset = load_dataset(root)
    plan, fingerprint = plan_preprocessing(dataset, settings)
    (how,) = plan.channels
    assert how.mean == pytest.approx(1000, abs=10) and how.std == pytest.approx(50, abs=8)
    assert how.low == pytest.approx(1000 - 2.58 * 50, abs=40)
    forbid_reading(monkeypatch)
    assert plan_preprocessing(dataset, settings) == (plan, fingerprint)


def test_ct_statistics_are_those_of_the_labelled_voxels(tmp_path, settings, monkeypatch):
    root = write_msd(tmp_path / "data", modality="CT")
    sizes = (12, 60, 360)
    for number, size in enumerate(sizes):  # divisors of the last, so repeating weighs alike
        label = np.zeros(12 * 14 * 10, np.uint8)
        label[:size] = 1
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label.reshape(12, 14, 10))
    dataset = load_dataset(root)
    inside = []
    for case, size in zip(dataset.cases, sizes, strict=True):
        label = np.asarray(nib.load(case.label).dataobj)
        of_case = nib.load(case.images[0]).get_fdata()[label > 0]
        inside.append(np.repeat(of_case, max(sizes) // size))
    expected = np.concatenate(inside)
    plan, fingerprint = plan_preprocessing(dataset, settings)
    assert fingerprint.shapes == {(12, 14, 10)}
    (channel,) = plan.channels
    assert channel.mean == pytest.approx(expected.mean(), rel=1e-5)
    assert channel.std == pytest.approx(expected.std(), rel=1e-5)
    low, high = np.percentile(expected, (0.5, 99.5), method="inverted_cdf")
    assert channel.low == pytest.approx(low, rel=1e-5)
    assert channel.high == pytest.approx(high, rel=1e-5)
    forbid_reading(monkeypatch)  # the second plan takes them from the cache
    assert plan_preprocessing(dataset, settings) == (plan, fingerprint)


def test_statistics_inside_labels_and_of_all_voxels_take_one_reading(tmp_path, monkeypatch):
    dataset = load_dataset(write_nnunet(tmp_path / "data"))
    examined, found_in_case = [], preprocess._found_in_case

    def noted(case, *counted):
        examined.append(case)
        return found_in_case(case, *counted)

    monkeypatch.setattr(preprocess, "_found_in_case", noted)
    store = Cache(tmp_path / "cache")
    _, found = preprocess._found_in_voxels(dataset, store, ["ct", "percentiles"])
    assert len(examined) <= len(dataset.cases)
    inside, voxels = [], []
    for case in dataset.cases:
        first, second, label = (nib.load(one).get_fdata() for one in (*case.images, case.label))
        inside.append(first[label > 0])
        voxels.append(second.ravel())
    for channel, values in zip(found, (inside, voxels), strict=True):
        assert channel.mean == pytest.approx(np.concatenate(values).mean(), rel=1e-5)


def test_ignored_voxels_have_no_part_in_ct_statistics(tmp_path, settings):
    labels = {"0": "background", "1": "left", "2": "right", "3": "ignore"}
    root = write_msd(tmp_path / "data", 1, modality="CT", labels=labels)
    label = blob_label((12, 14, 10))
    image = 100.0 + label.astype(np.float32)
    ignored = label == 0
    image[ignored] = -5000
    label[ignored] = 3
    write_volume(root / "imagesTr/case_0.nii.gz", image)
    write_volume(root / "labelsTr/case_0.nii.gz", label)
    channel = plan_preprocessing(load_dataset(root), settings)[0].channels[0]
    assert (channel.low, channel.high) == (101, 102)
    write_volume(root / "labelsTr/case_0.nii.gz", np.zeros((12, 14, 10), np.uint8))
    with pytest.raises(DatasetError, match="every label map is empty.*data.normalization"):
        plan_preprocessing(load_dataset(root), settings)


def test_few_labelled_voxels_have_statistics():
    one, none = np.full(1, -3.0, np.float32), np.empty(0, np.float32)
    expected = ChannelNormalization(kind="ct", low=-3, high=-3, mean=-3, std=1)
    assert ct_normalization([one]) == ct_normalization([none, one]) == expected


def test_images_are_stored_in_float16_where_that_loses_nothing():
    cases = [
        ("z-score", [0.1, -3.0, 16384.0], np.float16),
        ("ct", [0.1, -16400.0], np.float32),  # beyond the range for which float16 is used
        ("ct", [1e38, 0.0], np.float32),  # beyond the range of float16
        ("none", [0.0, 2049.0], np.float32),  # float16 has 2048 and 2050 only
    ]
    for kind, values, dtype in cases:
        image = np.array([[0] * len(values), values], np.float32).reshape(2, 1, 1, -1)
        channels = [ChannelNormalization(kind=one) for one in ("z-score", kind)]
        stored = stored_image(image, channels)
        assert stored.dtype == dtype
        exact = kind == "none" or dtype == np.float32
        np.testing.assert_allclose(stored.astype(np.float32), image, rtol=0 if exact else 2**-11)


def test_prepared_arrays_are_those_of_prepare_image(tmp_path, settings, monkeypatch):
    """Channels may have their own files; a second run reads no volume."""
    dataset = load_dataset(write_msd(tmp_path / "data", spacing_mm=(1, 1.5, 2)))
    second = dataset.cases[2].images[0]
    cases = tuple(replace(case, images=(*case.images, second)) for case in dataset.cases)
    dataset = replace(dataset, cases=cases, channel_names=("one", "other"))
    settings = with_(settings, spacing_mm=(1.2, 1.2, 1.2))
    plan, _ = plan_preprocessing(dataset, settings)
    prepared = prepare_cases(dataset.cases, plan, settings.cache, 0)
    assert [case.name for case in prepared] == ["case_0", "case_1", "case_2"]
    for case, source in zip(prepared, dataset.cases, strict=True):
        image = np.stack([nib.load(path).get_fdata(dtype=np.float32) for path in source.images])
        label = np.asarray(nib.load(source.label).dataobj)
        stored = case.image()
        assert not stored.flags.writeable and not stored.flags.owndata
        assert stored.dtype == np.float16
        expected = prepare_image(held_image(image, spacing_mm=(1, 1.5, 2)), plan)
        np.testing.assert_allclose(stored.astype(np.float32), expected, rtol=2**-11, atol=2**-25)
        np.testing.assert_array_equal(case.label(), prepare_label(label, (1, 1.5, 2), plan))
        assert case.spacing_mm == (1.2, 1.2, 1.2)
    forbid_reading(monkeypatch)
    assert arrays(prepare(dataset, settings)) == arrays(prepared)


def test_the_key_is_the_content_and_the_settings(tmp_path, settings):
    dataset = load_dataset(write_msd(tmp_path / "data", num_cases=1))
    (first,) = prepare(dataset, settings)
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "data", moved)
    (same,) = prepare(load_dataset(moved), settings)
    assert same.folder == first.folder
    coarse = with_(settings, spacing_mm=(2.0, 2.0, 2.0))
    (other,) = prepare(dataset, coarse)
    assert other.folder != first.folder
    assert other.image().shape == (1, 6, 7, 5)
    image = np.full((12, 14, 10), 5, np.float32)
    image[0] = 1
    write_volume(dataset.cases[0].images[0], image)
    (changed,) = prepare(dataset, settings)
    assert changed.folder != first.folder
    assert changed.image()[0, 0, 0, 0] < changed.image()[0, 5, 5, 5]


def test_damaged_entries_are_made_again(tmp_path, settings, caplog):
    dataset = load_dataset(write_msd(tmp_path / "data", num_cases=2))
    prepared = prepare(dataset, settings)
    before = arrays(prepared)
    entry, other = (case.folder for case in prepared)
    for damage in (  # how damage is detected is tested in ``test_cache``
        lambda: os.truncate(entry / "image.npy", 500),
        lambda: (shutil.rmtree(entry), shutil.copytree(other, entry)),
    ):
        damage()
        caplog.clear()
        assert arrays(prepare(dataset, settings)) == before
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        said = warning.getMessage()
        assert str(entry) in said and "is damaged (" in said and "\n" not in said
    caplog.clear()
    assert arrays(prepare(dataset, settings)) == before
    assert caplog.records == []


def test_the_box_of_a_changed_image_is_found_again_in_all_channels(tmp_path, settings, caplog):
    caplog.set_level("DEBUG")
    dataset = write_in_zeros(tmp_path / "data", [BOX], (30, 24, 16), (1, 1, 1))
    second = write_volume(tmp_path / "second.nii", np.zeros((30, 24, 16), np.float32))
    (case,) = dataset.cases
    case = replace(case, images=(*case.images, second))
    dataset = replace(dataset, cases=(case,), channel_names=("one", "other"))

    def shape():
        return plan_preprocessing(dataset, with_(settings, spacing_mm="native"))[1].shape

    assert shape() == shape() == (16, 20, 10)
    image = np.zeros((30, 24, 16), np.float32)
    image[29, 3, 0] = 1
    write_volume(second, image)
    assert shape() == (26, 20, 12)
    assert caplog.messages.count("reading 1 cases") == 2


@pytest.mark.parametrize("modality", ["MRI", "CT"])
def test_a_damaged_record_of_the_voxels_is_made_again(tmp_path, settings, modality, caplog):
    dataset = load_dataset(write_msd(tmp_path / "data", num_cases=1, modality=modality))
    before = plan_preprocessing(dataset, settings)
    (record,) = (tmp_path / "cache" / "planned").iterdir()
    tree = json.loads(record.read_text())
    for changes in ({"shapes": [[0, 1]]}, {"ct": "12"}, {"checksum": "0"}):
        caplog.clear()
        record.write_text(json.dumps({**tree, **changes}))
        assert plan_preprocessing(dataset, settings) == before
        (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
        assert str(record) in warning
    caplog.clear()
    assert plan_preprocessing(dataset, settings) == before and caplog.records == []


@pytest.mark.parametrize("modality", ["MRI", "CT"])
def test_only_new_cases_are_examined(tmp_path, settings, modality, monkeypatch):
    """Also if the first time was interrupted, or a case's record is damaged."""
    whole = load_dataset(write_msd(tmp_path / "data", num_cases=3, modality=modality))
    expected = plan_preprocessing(whole, with_(settings, cache=tmp_path / "other"))
    plan_preprocessing(replace(whole, cases=whole.cases[:2]), settings)
    records = sorted((tmp_path / "cache" / "examined").iterdir())
    records[0].write_text("{}")
    examined, examine = [], preprocess._found_in_case

    def noted(case, *counted):
        examined.append(case.name)
        return examine(case, *counted)

    monkeypatch.setattr(preprocess, "_found_in_case", noted)
    assert plan_preprocessing(whole, settings) == expected
    assert len(records) == len(examined) == 2 and whole.cases[2].name in examined


def test_what_another_process_has_prepared_by_now_is_not_read(tmp_path, settings, monkeypatch):
    dataset = load_dataset(write_msd(tmp_path / "data"))
    plan, _ = plan_preprocessing(dataset, settings)
    map_items = preprocess.map_items

    def begin_later(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(preprocess, "map_items", map_items)
            prepare_cases(dataset.cases, plan, settings.cache, 0)
        forbid_reading(monkeypatch)
        return map_items(*arguments)

    monkeypatch.setattr(preprocess, "map_items", begin_later)
    assert len(prepare_cases(dataset.cases, plan, settings.cache, 0)) == 3


def test_worker_processes_prepare_the_same(tmp_path, settings, forked_workers):
    root = write_msd(tmp_path / "data", num_cases=3)
    dataset = load_dataset(root)
    alone = DataSettings(cache=tmp_path / "alone")
    assert arrays(prepare(dataset, settings, num_workers=2)) == arrays(prepare(dataset, alone))
    assert multiprocessing.active_children() == []
    plan, _ = plan_preprocessing(dataset, settings)
    for number in range(2):
        write_volume(root / f"labelsTr/case_{number}.nii.gz", np.full((12, 14, 10), 7, np.uint8))
    with pytest.raises(VolumeError, match=r"labelsTr/case_0.nii.gz: .*does not name: 7"):
        prepare_cases(dataset.cases, plan, settings.cache, 2)


def test_a_case_that_cannot_be_prepared_is_named(tmp_path, settings):
    root = write_msd(tmp_path / "data")
    image, label = (root / folder / "case_1.nii.gz" for folder in ("imagesTr", "labelsTr"))
    dataset = load_dataset(root)
    plan, _ = plan_preprocessing(dataset, settings)

    def refused():
        with pytest.raises(VolumeError) as caught:
            prepare_cases(dataset.cases, plan, settings.cache, 0)
        return str(caught.value)

    write_volume(label, np.full((12, 14, 10), 7, np.uint8))
    assert re.search(r"labelsTr/case_1.nii.gz: .*does not name: 7", refused())
    write_volume(label, np.zeros((12, 14, 9), np.uint8))
    assert re.search(
        r"labelsTr/case_1.nii.gz: not on the grid of .*case_1.*; bring both", refused()
    )
    write_volume(label, np.zeros((12, 14, 10), np.uint8))
    for path in (image, label):
        volume = nib.load(path)
        volume.header.set_xyzt_units("meter")
        nib.save(volume, path)
    assert plan_preprocessing(dataset, settings)[1].spacing_mm == (1, 1, 1)
    assert re.search("case_1.nii.gz: .* would become 12000x14000x10000", refused())


def test_image_and_label_are_brought_together_at_45_degrees(tmp_path, settings):
    """At 45 degrees rounding decides which axis is called X, and it differs between files."""
    straight, oblique = write_msd(tmp_path / "straight"), write_msd(tmp_path / "oblique")
    for folder, noise in (("imagesTr", 1e-5), ("labelsTr", -1e-5)):
        affine = np.eye(4)
        affine[:3, :3] = Rotation.from_euler("z", 45 + noise, degrees=True).as_matrix()
        path = oblique / folder / "case_1.nii.gz"
        nib.save(nib.Nifti1Image(np.asarray(nib.load(path).dataobj), affine), path)
    plain, turned = (prepare(load_dataset(root), settings)[1] for root in (straight, oblique))
    image, label = np.asarray(turned.image()), np.asarray(turned.label())
    inside = [np.sort(case.image()[0][case.label() == 1]) for case in (plain, turned)]
    assert image.shape[1:] == label.shape
    np.testing.assert_allclose(inside[0], inside[1], rtol=2**-10)


def test_the_default_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache(None).folder == tmp_path / "xdg" / "unet3d"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Cache(None).folder == tmp_path / "home" / ".cache" / "unet3d"


def test_a_long_preparation_says_how_far_it_is(tmp_path, settings, monkeypatch, caplog):
    caplog.set_level("INFO")
    dataset = load_dataset(write_msd(tmp_path / "data"))
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.0)
    prepare(dataset, settings)
    hashing = ["hashing 3 cases: 1 done", "hashing 3 cases: 2 done"]
    assert caplog.messages == [
        *hashing,
        *("reading 3 cases: 1 done", "reading 3 cases: 2 done"),
        *hashing,  # takes no time now
        *("preparing 3 cases: 1 done", "preparing 3 cases: 2 done"),
    ]


def test_nobody_waits_for_images_that_are_no_longer_wanted(tmp_path, settings, monkeypatch):
    dataset = load_dataset(write_msd(tmp_path / "data"))
    reading, may_end = threading.Event(), threading.Event()

    def opened(images, **_):
        assert threading.current_thread().daemon  # so a process that ends does not wait either
        if images == dataset.cases[0].images:
            assert reading.wait(10)
            raise VolumeError("damaged")
        reading.set()
        assert may_end.wait(60)

    monkeypatch.setattr(preprocess, "open_image", opened)
    monkeypatch.setattr(preprocess, "num_cores", lambda: 2)
    with pytest.raises(VolumeError, match="damaged"):
        plan_preprocessing(dataset, settings)
    assert not may_end.is_set()
    may_end.set()
