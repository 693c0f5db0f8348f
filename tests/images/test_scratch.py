"""Memory for voxels: in RAM, or in files without names."""

import contextlib
import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.faults import small_disk
from tests.resident import resident_kib
from unet3d.errors import VolumeError
from unet3d.images.scratch import Scratch, forget_pages, new_mapped, parts
from unet3d.memory import host

SHAPE = (30, 20, 10)


def test_an_array_keeps_what_is_written(tmp_path):
    for folder, order in itertools.product((None, tmp_path), "CF"):
        scratch = Scratch(folder)
        assert scratch.is_memory == (folder is None)
        for dtype in ("u1", "<i2", ">f4", "f8", "?"):
            array = scratch.empty(SHAPE, dtype, "a scan", order)
            assert (array.shape, array.dtype) == (SHAPE, np.dtype(dtype))
            assert array.flags[f"{order}_CONTIGUOUS"] and array.flags.writeable
            values = np.random.default_rng(0).integers(0, 2, SHAPE).astype(dtype)
            array[...] = values
            forget_pages(array)
            np.testing.assert_array_equal(array, values)


def test_files_have_no_name_and_are_gone_with_the_array(tmp_path):
    def held():
        lines = Path("/proc/self/maps").read_text().splitlines()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                lines.append(os.readlink(f"/proc/self/fd/{number}"))
        return [line for line in lines if str(tmp_path) in line]

    array = Scratch(tmp_path).empty((2**20,), "u1", "a scan")
    array[:] = 7
    assert not list(tmp_path.iterdir())
    assert {line.split()[-1] for line in held()} == {"(deleted)"}
    del array
    assert not held()


def test_the_space_of_a_file_is_taken_at_once(tmp_path):
    array = new_mapped(tmp_path / "a.npy", (2**20,), np.dtype("u1"))
    status = (tmp_path / "a.npy").stat()
    assert status.st_blocks * 512 >= status.st_size > array.nbytes
    array[:] = np.arange(2**20) % 251
    del array
    assert (np.load(tmp_path / "a.npy") == np.arange(2**20) % 251).all()


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(VolumeError, match=r"a scan takes 5.859 KiB of .*absent: No such file"):
        Scratch(tmp_path / "absent").empty(SHAPE, "u1", "a scan")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(VolumeError) as caught:
        Scratch(tmp_path).empty((2**20, 3), "<i2", "scan.nii.gz: reading 5 voxels")
    assert str(caught.value) == (
        f"scan.nii.gz: reading 5 voxels takes 6 MiB of {tmp_path}: No space left on device; name "
        "another folder with --scratch"
    )
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        new_mapped(tmp_path / "a.npy", (3,), np.dtype("u1"))


def fill(disk):
    """Take most of a disk of 1 MiB, then more than is left, then the same after space is freed."""
    small_disk.mount(disk, "size=1m")
    scratch = Scratch(disk)
    first = scratch.empty((600, 1024), "u1", "the first")
    first[:] = 3  # the space was reserved, so nothing fails
    with pytest.raises(VolumeError, match="the second takes 600 KiB of .*: No space left on"):
        scratch.empty((600, 1024), "u1", "the second")
    del first
    scratch.empty((600, 1024), "u1", "the third")[:] = 4


def test_a_small_disk_is_an_error_and_not_a_signal(tmp_path):
    """If a file's space is not reserved, writing to its pages ends the process by SIGBUS."""
    ended = warm.run_call(fill, tmp_path)
    if "no namespaces" in ended.stderr:
        pytest.skip("a small disk needs user and mount namespaces")
    assert ended.returncode == 0, ended.stderr


def test_memory_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "SMALL_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 2**20 - 1)
    with pytest.raises(VolumeError, match="a scan takes 1 MiB of memory.*predict --scratch DIR"):
        Scratch().empty((2**19,), "<i2", "a scan")
    assert Scratch(tmp_path).empty((2**19,), "<i2", "a scan").shape == (2**19,)


def test_small_arrays_may_stay_in_memory_and_large_ones_have_a_file(tmp_path):
    scratch = Scratch(tmp_path, in_memory_bytes=1000)
    assert not isinstance(scratch.empty((10, 10, 10), "u1", "labels"), np.memmap)
    assert isinstance(scratch.empty((10, 10, 11), "u1", "labels"), np.memmap)


@pytest.mark.parametrize("order", ["C", "F"])
def test_parts_cover_an_array_in_its_memory_order_and_leave_no_pages(order, tmp_path):
    array = Scratch(tmp_path).empty((40, 100, 1024), "u1", "labels", order)
    array[...] = 1
    forget_pages(array)
    seen = array.transpose(1, 2, 0)[::-1]
    axis, most = (2, 0) if order == "C" else (1, 0)
    for part in parts(seen, part_bytes=2**19):
        assert seen[part].size <= 2**19
        seen[part] += 1
        most = max(most, resident_kib(tmp_path))
        whole = [(0, size) for size in seen.shape]
        assert [(s.start, s.stop) == w for s, w in zip(part, whole, strict=True)].count(False) == 1
        assert (part[axis].start, part[axis].stop) != whole[axis]
    assert (array == 2).all()
    assert most < 1000
    empty = np.zeros((3, 0, 2))
    assert [empty[part].size for part in parts(empty)] in ([0], [])


@pytest.mark.parametrize("kind", ["scratch", "new", "read"])
def test_pages_are_given_back_and_their_content_stays(kind, tmp_path):
    shape, values = (64, 2**14), np.random.default_rng(0).integers(0, 256, (64, 2**14), np.uint8)
    values.tofile(tmp_path / "a.raw")
    array = {
        "read": lambda: np.memmap(tmp_path / "a.raw", np.uint8, "r", 0, shape),
        "new": lambda: new_mapped(tmp_path / "a.npy", shape, np.dtype("u1")),
        "scratch": lambda: Scratch(tmp_path).empty(shape, "u1", "a scan"),
    }[kind]()
    if kind != "read":
        array[...] = values
    # The array as code may hold it: itself, a part, transposed, strided, or of another type.
    strided = np.lib.stride_tricks.as_strided(array, (5, 5), (array.strides[0], 1))
    turned, signed = np.asarray(array).T[::-1], array.reshape(-1).view(np.int8)[::3]
    for seen in (array, array[3:5], turned, strided, signed):
        np.testing.assert_array_equal(array, values)
        assert resident_kib(tmp_path) >= 1000
        forget_pages(seen)
        assert resident_kib(tmp_path) < 100
    np.testing.assert_array_equal(array, values)


def test_changes_that_are_nowhere_else_are_not_forgotten(tmp_path):
    np.zeros(2**16, np.uint8).tofile(tmp_path / "a.raw")
    private = np.memmap(tmp_path / "a.raw", np.uint8, "c")
    private[:] = 5
    forget_pages(private[10:])
    assert (private == 5).all()
    held = np.full(1000, 5)
    forget_pages(held)
    assert (held == 5).all()
