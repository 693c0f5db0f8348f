import errno
import os
import resource
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from tests import warm
from unet3d.atomic import PREFIX
from unet3d.errors import CacheError, Unet3dError, VolumeError
from unet3d.preparation.cache import Cache

IMAGE = np.zeros((1, 4, 5, 6), np.float32)
LABEL = np.zeros((4, 5, 6), np.uint8)


@pytest.mark.parametrize("names", [("a.hdr", "a.img"), ("a.Hdr", "a.IMG")])
def test_the_digest_of_a_pair_is_that_of_both_files(tmp_path, names):
    cache = Cache(tmp_path / "cache")
    header, voxels = paths = [tmp_path / name for name in names]
    header.write_bytes(b"header")
    voxels.write_bytes(b"voxels")
    digests = [cache.digest(header)]
    for path in paths:
        path.write_bytes(b"others")
        digests.append(cache.digest(header))
        assert cache.digest(voxels) == digests[-1]
    assert len(set(digests)) == 3


@contextmanager
def full_disk():
    """Let no file grow beyond 1000 bytes, which NumPy reports without the system's text."""
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
    for write in (
        lambda: cache.save_case("key", large, large[0].astype(np.uint8), (1, 1, 1), 2),
        lambda: cache.save_intensities("key", large.reshape(-1, 1)),
    ):
        with full_disk(), pytest.raises(CacheError) as caught:
            write()
        said = str(caught.value)
        assert str(cache.folder) in said and "set data.cache" in said
        assert "None" not in said and "\n" not in said
    assert cache.load_case("key", "case") is None
    assert cache.load_intensities("key") is None
    assert list((cache.folder / "prepared").iterdir()) == []
    assert list((cache.folder / "intensities").iterdir()) == []


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_an_entry_that_cannot_be_put_in_place_is_none(tmp_path, broken, monkeypatch):
    cache = Cache(tmp_path / "cache")

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, broken, fail)
        with pytest.raises(CacheError, match=r"cannot write .*: Input/output error; set data\."):
            cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    assert list((cache.folder / "prepared").iterdir()) == []
    cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    cache.save_case("key", IMAGE + 1, LABEL, (1, 1, 1), 2)  # as if another process were slower
    case = cache.load_case("key", "case")
    assert case is not None and not case.image().any()


def write_until_it_is_named(folder):
    os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Cache(folder).save_case("key", IMAGE, LABEL, (1, 1, 1), 2)


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(tmp_path):
    ended = warm.run_call(write_until_it_is_named, tmp_path)
    assert ended.returncode == -signal.SIGKILL
    (leftover,) = (tmp_path / "prepared").iterdir()
    phantom = tmp_path / f"{PREFIX}{'0' * 32}-phantom"
    phantom.mkdir()
    assert Cache(tmp_path).load_case("key", "case") is None
    assert not leftover.exists() and not phantom.exists()


def test_what_the_cache_reports_can_be_fixed_by_the_user(tmp_path):
    assert issubclass(CacheError, Unet3dError)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot write the cache folder .*file.*data\.cache"):
        Cache(tmp_path / "file")
    with pytest.raises(VolumeError, match=r"cannot read .*missing\.nii: No such file"):
        Cache(tmp_path / "cache").digest(tmp_path / "missing.nii")
