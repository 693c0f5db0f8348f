"""The next scan is read while one is in use, if there is memory; errors come in the scan's turn."""

import gzip
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.images.samples import noise, write_volume
from tests.networks import random_checkpoint
from unet3d.errors import VolumeError
from unet3d.images.scratch import Scratch
from unet3d.inference import scans as scans_module
from unet3d.inference.measuring import measured
from unet3d.inference.scans import Scan, ScansAhead, read_scan

SHAPE = (12, 11, 10)
SCAN_BYTES = 12 * 11 * 10 * 4
TURNS = ((0, 1), (1, 2), (2, 3), (3, None))
"""Each scan and the following one."""


def scan_of(path):
    return Scan(images=(path,), output=path.with_name("unused.nii.gz"))


@pytest.fixture
def scans(tmp_path):
    """Four compressed scans."""
    return [
        scan_of(write_volume(tmp_path / f"{name}.nii.gz", noise(SHAPE, seed)))
        for seed, name in enumerate("abcd")
    ]


@pytest.fixture
def reading(monkeypatch):
    """Which scans are read, and which of them by the main thread."""
    condition, read, in_main = threading.Condition(), [], []

    def noted(scan, scratch):
        with condition:
            name = scan.images[0].name.split(".")[0]
            read.append(name)
            if threading.current_thread() is threading.main_thread():
                in_main.append(name)
            condition.notify_all()
        return read_scan(scan, scratch)

    def wait_for(*names):
        with condition:
            return condition.wait_for(lambda: read == list(names), 10)

    monkeypatch.setattr(scans_module, "read_scan", noted)
    return SimpleNamespace(read=read, in_main=in_main, wait_for=wait_for)


def ahead_of(scans, scratch=None):
    preprocessing = random_checkpoint().preprocessing
    return ScansAhead(scans, scratch or Scratch(), lambda image: measured(image, preprocessing))


def assert_is(taken, seed):
    voxels = noise(SHAPE, seed)
    np.testing.assert_array_equal(taken.image.whole()[0], voxels)
    normalised = (voxels - voxels.mean(dtype=np.float64)) / voxels.std(dtype=np.float64)
    np.testing.assert_allclose(taken.found.whole()[0], normalised, rtol=0, atol=1e-5)


def test_the_next_scan_is_read_while_one_is_in_use(scans, reading):
    ahead = ahead_of(scans)
    assert reading.read == []
    ahead.begin(0)
    assert reading.wait_for("a")
    for number, following in TURNS:
        assert_is(ahead.take(number, following), number)
        assert reading.wait_for(*"abcd"[: number + 2])  # only one scan ahead
    assert reading.in_main == []
    ahead_of([]).begin(None)  # no scans, or ``begin`` was not called
    assert_is(ahead_of(scans[:1]).take(0, None), 0)


def test_a_scan_that_takes_much_of_the_memory_is_read_when_it_is_needed(
    scans, reading, tmp_path, monkeypatch
):
    mapped = []
    for scan in scans:
        path = scan.images[0].with_suffix("")
        path.write_bytes(gzip.decompress(scan.images[0].read_bytes()))
        mapped.append(scan_of(path))
    for given, scratch, available, is_early in (
        (scans, Scratch(), 4 * SCAN_BYTES, True),
        (scans, Scratch(), 4 * SCAN_BYTES - 1, False),
        (scans, Scratch(tmp_path), 0, True),
        (mapped, Scratch(), 0, True),
    ):
        monkeypatch.setattr(scans_module, "available_bytes", lambda most=available: most)
        reading.read.clear()
        reading.in_main.clear()
        ahead = ahead_of(given, scratch)
        ahead.begin(0)
        for number, following in TURNS:
            assert_is(ahead.take(number, following), number)
        assert reading.read == list("abcd")
        assert reading.in_main == ([] if is_early else list("abcd"))


def test_a_scan_that_nobody_takes_is_no_other_one(scans, reading):
    """A scan may be skipped, such as one whose results have appeared meanwhile."""
    damaged = scans[3].images[0]
    damaged.write_bytes(damaged.read_bytes()[:-200])
    ahead = ahead_of(scans)
    ahead.begin(0)
    assert_is(ahead.take(0, 1), 0)
    assert reading.wait_for("a", "b")
    assert_is(ahead.take(2, 3), 2)
    with pytest.raises(VolumeError, match=r"d\.nii\.gz"):  # in its turn
        ahead.take(3, None)
    assert sorted(reading.read) == list("abc")
