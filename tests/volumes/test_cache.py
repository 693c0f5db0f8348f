import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.volumes.samples import write_json, write_msd
from unet3d.atomic import PREFIX
from unet3d.config import DataSettings
from unet3d.errors import CacheError, Unet3dError, VolumeError
from unet3d.volumes.cache import Cache, foreground_voxels
from unet3d.volumes.dataset import load_dataset
from unet3d.volumes.preprocess import plan_preprocessing, prepare_cases

IMAGE = np.zeros((1, 4, 5, 6), np.float32)
LABEL = np.zeros((4, 5, 6), np.uint8)


def save_pair(folder: Path, header: str, voxels: str, value: int) -> None:
    array = np.arange(12 * 14 * 10, dtype=np.float32).reshape(12, 14, 10) % (value + 2)
    nib.save(nib.Nifti1Pair(array, np.eye(4)), folder / "new.hdr")
    os.replace(folder / "new.hdr", folder / f"pair{header}")
    os.replace(folder / "new.img", folder / f"pair{voxels}")


PAIRS = pytest.mark.parametrize(
    ("header", "voxels"),
    [(".hdr", ".img"), (".HDR", ".IMG"), (".hdr", ".IMG"), (".Hdr", ".img")],
)


@PAIRS
def test_the_digest_of_a_pair_is_that_of_both_files(
    tmp_path: Path, header: str, voxels: str
) -> None:
    cache = Cache(tmp_path / "cache")
    paths = [tmp_path / f"pair{header}", tmp_path / f"pair{voxels}"]
    save_pair(tmp_path, header, voxels, 1)
    before = cache.digest(paths[0])
    assert cache.digest(paths[1]) == before
    headers = paths[0].read_bytes()
    save_pair(tmp_path, header, voxels, 2)
    assert paths[0].read_bytes() == headers  # the voxels alone have changed
    after = cache.digest(paths[0])
    assert after != before
    assert cache.digest(paths[1]) == after


@PAIRS
def test_a_pair_with_other_voxels_is_prepared_anew(
    tmp_path: Path, header: str, voxels: str
) -> None:
    root = write_msd(tmp_path / "data", num_cases=1)
    tree = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "left", "2": "right"},
        "training": [{"image": f"imagesTr/pair{header}", "label": "labelsTr/case_0.nii.gz"}],
    }
    write_json(root / "dataset.json", tree)
    settings = DataSettings(cache=tmp_path / "cache")
    prepared = []
    for value in (1, 2):
        save_pair(root / "imagesTr", header, voxels, value)
        dataset = load_dataset(root)
        plan, _ = plan_preprocessing(dataset, settings)
        (case,) = prepare_cases(dataset.cases, plan, settings.cache, 0)
        prepared.append(case.image().copy())
    assert np.abs(prepared[1] - prepared[0]).max() > 0.1


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 1000 bytes, which NumPy reports without the system's text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
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
def test_an_entry_that_cannot_be_put_in_place_is_none(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, broken, fail)
        with pytest.raises(CacheError, match=r"cannot write .*: Input/output error; set data\."):
            cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    assert list((cache.folder / "prepared").iterdir()) == []
    cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    assert cache.load_case("key", "case") is not None


def test_an_entry_is_flushed_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    flushed = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    names = {path.name for path in flushed}
    assert names >= {"image.npy", "label.npy", "foreground.npy", "entry.json"}
    assert any(name.startswith(PREFIX) for name in names)
    assert flushed[-1] == cache.folder / "prepared"


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from tests.volumes.test_cache import IMAGE, LABEL
from unet3d.volumes.cache import Cache
cache = Cache(Path(sys.argv[1]))
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert ended.returncode == -signal.SIGKILL
    cache = Cache(tmp_path)
    assert cache.load_case("key", "case") is None
    (leftover,) = (tmp_path / "prepared").iterdir()
    phantom = tmp_path / f"{PREFIX}{'0' * 32}-phantom"
    phantom.mkdir()
    for folder in (leftover, phantom):
        os.utime(folder, (0, 0))
    Cache(tmp_path)
    assert not leftover.exists() and not phantom.exists()


def test_an_entry_that_is_there_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.save_case("key", IMAGE, LABEL, (1, 1, 1), 2)
    cache.save_case("key", IMAGE + 1, LABEL, (1, 1, 1), 2)  # as if another process were slower
    case = cache.load_case("key", "case")
    assert case is not None and not case.image().any()


def test_what_the_cache_reports_can_be_fixed_by_the_user(tmp_path: Path) -> None:
    assert issubclass(CacheError, Unet3dError)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot write the cache folder .*file.*data\.cache"):
        Cache(tmp_path / "file")
    with pytest.raises(VolumeError, match=r"cannot read .*missing\.nii: No such file"):
        Cache(tmp_path / "cache").digest(tmp_path / "missing.nii")


def test_foreground_voxels_are_those_of_each_class() -> None:
    label = np.zeros((3, 4, 5), np.uint8)
    label[1, 2, 3] = label[2, 0, 0] = 2
    voxels = foreground_voxels(label, 4)
    assert [array.tolist() for array in voxels] == [[], [], [33, 40], []]
    label_and_ignored = np.where(label, label, 4).astype(np.uint8)
    assert all(map(np.array_equal, foreground_voxels(label_and_ignored, 4), voxels))
    assert (
        np.argwhere(label).tolist() == np.transpose(np.unravel_index(voxels[2], (3, 4, 5))).tolist()
    )


@pytest.mark.parametrize(("size", "dtype"), [(255, np.uint8), (256, np.uint16), (2**16, np.uint32)])
def test_foreground_voxels_are_of_the_smallest_type_that_holds_them(
    size: int, dtype: type[np.unsignedinteger]
) -> None:
    label = np.zeros((1, 1, size), np.uint8)
    label[0, 0, -1] = 1
    _, voxels = foreground_voxels(label, 2)
    assert voxels.dtype == dtype and voxels.tolist() == [size - 1]
