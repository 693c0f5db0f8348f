"""The cache folder after damage, deletions and other processes' work."""

import errno
import json
import logging
import os
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import warm
from tests.images.itk_headers import written
from tests.mutations import damaged, property_test
from unet3d.atomic import PREFIX
from unet3d.errors import CacheError, Unet3dError, VolumeError
from unet3d.preparation.cache import Cache

IMAGE = np.arange(2 * 4 * 5 * 6, dtype=np.float32).reshape(2, 4, 5, 6)
LABEL = (IMAGE[0] % 3).astype(np.uint8)
ARRAYS = ("image.npy", "label.npy", "foreground.npy", "components.npy")
FILES = (*ARRAYS, "meta.json")


def save(cache, image=IMAGE):
    cache.save_case("key", image, LABEL, (1.0, 1.5, 2.0), 3)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Return an entry without damage."""
    folder = tmp_path_factory.mktemp("cache")
    save(Cache(folder))
    return folder / "prepared" / "key"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return a cache for damaged entries, which does not wait for the disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield Cache(tmp_path_factory.mktemp("damaged"))


def assert_is_sound(case):
    np.testing.assert_array_equal(case.image(), IMAGE)
    np.testing.assert_array_equal(case.label(), LABEL)
    assert case.shape == LABEL.shape and case.spacing_mm == (1.0, 1.5, 2.0)
    found = case.foreground()
    assert sum(found.num_components) == len(found.ends) and found.num_components[0] == 0
    np.testing.assert_array_equal(np.sort(found.voxels), np.flatnonzero(LABEL))


def assert_is_repaired(cache, sound, damage):
    """Damage a copy of an entry, and check that it is read as it was written, or made anew."""
    folder = cache.folder / "prepared" / "key"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    damage(folder)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("unet3d.preparation.cache").addHandler(handler)
    try:
        case = cache.load_case("key", "case")
    finally:
        logging.getLogger("unet3d.preparation.cache").removeHandler(handler)
    if case is None:
        (line,) = said
        assert "is damaged (" in line and line.isprintable() and len(line) < 500
        save(cache)
        case = cache.load_case("key", "case")
    assert_is_sound(case)


@partial(property_test, share=0.5)
@given(data=st.data())
def test_a_damaged_record_is_never_used(cache, sound, data):
    content = data.draw(damaged((sound / "meta.json").read_bytes()))
    assert_is_repaired(cache, sound, lambda entry: (entry / "meta.json").write_bytes(content))


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_size_is_never_used(cache, sound, name):
    size = (sound / name).stat().st_size
    for other in (0, 1, 64, size - 1, size + 1, 2**40):
        assert_is_repaired(cache, sound, lambda entry, to=other: os.truncate(entry / name, to))


REPLACEMENTS = (
    lambda path: None,
    os.mkdir,
    os.mkfifo,
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: shutil.copy(next(path.parent.glob("*o*")), path),
)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_of_the_entry_is_not_waited_for(cache, sound, name):
    def replace(entry, make):
        (entry / name).unlink()
        make(entry / name)

    for make in REPLACEMENTS:
        assert_is_repaired(cache, sound, partial(replace, make=make))


@pytest.mark.parametrize(
    "damage", [shutil.rmtree, lambda entry: os.truncate(entry / "image.npy", 9)]
)
def test_what_is_damaged_during_a_run_is_named(cache, sound, damage):
    assert_is_repaired(cache, sound, lambda entry: None)
    case = cache.load_case("key", "case")
    damage(cache.folder / "prepared" / "key")
    with pytest.raises(CacheError, match=r"image\.npy is gone or damaged .*; run again") as caught:
        case.image()
    assert "\n" not in str(caught.value)


def test_arrays_are_read_only_maps(sound):
    case = Cache(sound.parent.parent).load_case("key", "case")
    for array in (case.image(), case.label()):
        assert not array.flags.writeable and not array.flags.owndata
    assert case.label().dtype == np.uint8


def test_several_writers_repair_one_entry(cache, sound):
    folder = cache.folder / "prepared" / "key"
    with ThreadPoolExecutor(4) as writers:
        for _ in range(5):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(sound, folder)
            os.truncate(folder / "image.npy", 100)
            list(writers.map(lambda _: save(cache), range(4)))
            assert_is_sound(cache.load_case("key", "case"))
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_the_digest_of_a_pair_is_that_of_both_files(tmp_path):
    cache = Cache(tmp_path / "cache")
    header, voxels = paths = [tmp_path / name for name in ("a.hdr", "a.img")]
    header.write_bytes(b"header")
    voxels.write_bytes(b"voxels")
    digests = [cache.digest(header)]
    for path in paths:
        path.write_bytes(b"others")
        digests.append(cache.digest(header))
        assert cache.digest(voxels) == digests[-1]
    assert len(set(digests)) == 3


def test_digests_are_taken_again_where_they_are_damaged_or_the_file_has_changed(tmp_path, caplog):
    path = written(tmp_path / "scan.nii", bytes(1000))
    store, status = Cache(tmp_path / "cache"), path.stat()
    before = store.digest(path)
    (note,) = (tmp_path / "cache" / "contents").iterdir()
    tree = json.loads(note.read_text())
    for number, damage in enumerate(
        (
            lambda: note.write_text(json.dumps({**tree, "sha256": "0" * 64})),
            lambda: note.write_text(json.dumps({**tree, "path": "00"})),
            lambda: note.write_text(json.dumps({**tree, "size": "0"})),
            lambda: note.write_text("[" * 100_000),
            lambda: os.truncate(note, 2**40),
        )
    ):
        damage()
        assert store.digest(path) == before
        assert len(caplog.records) == number + 1
    path.write_bytes(bytes(999) + b"1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time stay the same
    assert store.digest(path) != before


@contextmanager
def full_disk():
    """Let no file grow beyond 1000 bytes; NumPy reports such an error without the system's text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path):
    cache = Cache(tmp_path / "cache")
    large = np.zeros((1, 40, 40, 40), np.float32)
    with full_disk(), pytest.raises(CacheError) as caught:
        cache.save_case("key", large, large[0].astype(np.uint8), (1, 1, 1), 2)
    said = str(caught.value)
    assert str(cache.folder) in said and "set data.cache" in said
    assert "None" not in said and "\n" not in said
    assert cache.load_case("key", "case") is None and not cache.has_case("key")
    assert list((cache.folder / "prepared").iterdir()) == []


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_an_entry_that_cannot_be_put_in_place_is_none(tmp_path, broken, monkeypatch):
    cache = Cache(tmp_path / "cache")

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, broken, fail)
        with pytest.raises(CacheError, match=r"cannot write .*: Input/output error; set data\."):
            save(cache)
    assert list((cache.folder / "prepared").iterdir()) == []
    save(cache)
    save(cache, IMAGE + 1)  # as if a slower process wrote the same entry
    assert_is_sound(cache.load_case("key", "case"))


def write_until_it_is_named(folder):
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(Cache(folder))


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(tmp_path):
    ended = warm.run_call(write_until_it_is_named, tmp_path)
    assert ended.returncode == -signal.SIGKILL
    (leftover,) = (tmp_path / "prepared").iterdir()
    phantom = tmp_path / f"{PREFIX}{'0' * 32}-phantom"
    phantom.mkdir()
    os.utime(phantom, (0, 0))  # a leftover of another machine, long ago
    assert Cache(tmp_path).load_case("key", "case") is None
    assert not leftover.exists() and not phantom.exists()


def test_what_the_cache_reports_can_be_fixed_by_the_user(tmp_path):
    assert issubclass(CacheError, Unet3dError)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot write the cache folder .*file.*data\.cache"):
        Cache(tmp_path / "file")
    with pytest.raises(VolumeError, match=r"cannot read .*missing\.nii: No such file"):
        Cache(tmp_path / "cache").digest(tmp_path / "missing.nii")
