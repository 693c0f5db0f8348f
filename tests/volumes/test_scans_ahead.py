"""The next scan is read while one is in use, where it has room, and errors come at their turn."""

import gzip
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.volumes.samples import noise, write_volume
from unet3d.errors import VolumeError
from unet3d.volumes import scans_ahead
from unet3d.volumes.scans import Scan, read_scan, stamps
from unet3d.volumes.scans_ahead import ScansAhead
from unet3d.volumes.scratch import Scratch

SHAPE = (12, 11, 10)
SCAN_BYTES = 12 * 11 * 10 * 4


def scan_of(path: Path) -> Scan:
    return Scan(images=(path,), output=path.with_name("unused.nii.gz"))


def name_of(scan: Scan) -> str:
    return scan.images[0].name.split(".")[0]


@pytest.fixture
def scans(tmp_path):
    """Four scans, packed."""
    return [
        scan_of(write_volume(tmp_path / f"{name}.nii.gz", noise(SHAPE, seed)))
        for seed, name in enumerate("abcd")
    ]


class Reading:
    """What is read, and by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.in_main: list[str] = []
        self._condition = threading.Condition()

        def noted(scan: Scan, scratch: Scratch) -> object:
            with self._condition:
                self.read.append(name_of(scan))
                if threading.current_thread() is threading.main_thread():
                    self.in_main.append(name_of(scan))
                self._condition.notify_all()
            return read_scan(scan, scratch)

        monkeypatch.setattr(scans_ahead, "read_scan", noted)

    def wait_for(self, *names: str) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self.read == list(names), 10)


@pytest.fixture
def reading(monkeypatch):
    return Reading(monkeypatch)


def take_all(scans: list[Scan], scratch: Scratch, monkeypatch: Any, available: int) -> None:
    """Take every scan, where so much memory is available."""
    monkeypatch.setattr(scans_ahead, "available_bytes", lambda: available)
    ahead = ScansAhead(scans, scratch)
    ahead.begin()
    for number, scan in enumerate(scans):
        assert_is(ahead.take(number), number, scan)


def assert_is(found: scans_ahead.ReadScan, seed: int, scan: Scan) -> None:
    np.testing.assert_array_equal(found.image.voxels.whole()[0], noise(SHAPE, seed))
    assert found.stamps == stamps(scan)


def test_the_next_scan_is_read_while_one_is_in_use(scans, reading):
    ahead = ScansAhead(scans, Scratch())
    assert reading.read == []
    ahead.begin()
    assert reading.wait_for("a")
    for number, scan in enumerate(scans):
        assert_is(ahead.take(number), number, scan)
        assert reading.wait_for(*"abcd"[: number + 2])  # and no more than one
    assert reading.in_main == []


def test_no_scans_or_no_beginning_are_fine(scans, reading):
    ScansAhead([], Scratch()).begin()
    assert_is(ScansAhead(scans[:1], Scratch()).take(0), 0, scans[0])
    assert reading.read == ["a"]


@pytest.mark.parametrize(("available", "is_early"), [(4 * SCAN_BYTES, 1), (4 * SCAN_BYTES - 1, 0)])
def test_a_scan_that_takes_much_of_the_memory_is_read_when_it_is_needed(
    scans, reading, available, is_early, monkeypatch
):
    take_all(scans, Scratch(), monkeypatch, available)
    assert reading.read == list("abcd")
    assert reading.in_main == ([] if is_early else list("abcd"))


def test_what_takes_no_memory_is_read_whatever_its_size(scans, reading, tmp_path, monkeypatch):
    take_all(scans, Scratch(tmp_path), monkeypatch, 0)
    for number, scan in enumerate(scans):
        path = scan.images[0].with_suffix("")
        path.write_bytes(gzip.decompress(scan.images[0].read_bytes()))
        scans[number] = scan_of(path)  # which is mapped
    take_all(scans, Scratch(), monkeypatch, 0)
    assert reading.in_main == []


def test_a_scan_that_nobody_takes_is_no_other_one(scans, reading):
    """As where its results have appeared meanwhile."""
    damaged = scans[3].images[0]
    damaged.write_bytes(damaged.read_bytes()[:-200])
    ahead = ScansAhead(scans, Scratch())
    ahead.begin()
    assert_is(ahead.take(0), 0, scans[0])
    assert reading.wait_for("a", "b")
    assert_is(ahead.take(2), 2, scans[2])
    with pytest.raises(VolumeError, match=r"d\.nii\.gz"):  # when it is its turn
        ahead.take(3)
    assert sorted(reading.read) == list("abcd")


def test_stamps_are_older_than_what_was_read(scans, monkeypatch):
    """A file that is written while it is read, or after, is seen to be another."""

    def written(scan, scratch):
        image = read_scan(scan, scratch)
        write_volume(scan.images[0], noise(SHAPE, 9))
        return image

    monkeypatch.setattr(scans_ahead, "read_scan", written)
    found = ScansAhead(scans, Scratch()).take(0)
    assert found.stamps != stamps(scans[0])
