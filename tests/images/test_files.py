import sys
from pathlib import Path
from types import SimpleNamespace

import nibabel as nib
import numpy as np
import pytest

from tests.images.samples import refusal
from unet3d.images import files
from unet3d.images.files import (
    FORMATS,
    SUFFIXES,
    Format,
    can_be_written,
    is_volume_file,
    members,
    stands_for_volume,
    volume_stem,
    written_suffix,
)
from unet3d.images.geometry import geometry_of_affine
from unet3d.images.image import open_image
from unet3d.images.labels import read_label, write_label
from unet3d.images.source import Source

ARRAY = np.arange(4 * 5 * 6, dtype=np.int16).reshape(4, 5, 6)


def test_names():
    for suffix in SUFFIXES:
        assert is_volume_file(Path(f"folder/scan.1{suffix}"))
        assert is_volume_file(Path(f"SCAN{suffix.upper()}"))
        assert volume_stem(Path(f"folder/scan.1{suffix}")) == "scan.1"
        assert can_be_written(Path(f"SCAN{suffix.upper()}")) == suffix.endswith(
            (".nii", ".nii.gz", ".tif", ".tiff", ".zarr", ".h5", ".hdf5")
        )
    for name in ("scan.txt", "scan.nii.txt", "nii", "scan.gz"):
        assert not is_volume_file(Path(name))
        assert not stands_for_volume(Path(name))


@pytest.mark.parametrize("kind", [nib.Nifti1Pair, nib.Nifti2Pair])
@pytest.mark.parametrize("suffixes", [(".hdr", ".img"), (".HDR", ".IMG"), (".HDR", ".img")])
def test_pairs_are_found_and_read_in_any_case_of_letters(tmp_path, suffixes, kind):
    both = tuple(tmp_path / f"scan.1{suffix}" for suffix in suffixes)
    nib.save(kind(ARRAY, np.diag([2.0, 3.0, 4.0, 1.0])), tmp_path / "new.hdr")
    for suffix, path in zip(("hdr", "img"), both, strict=True):
        (tmp_path / f"new.{suffix}").rename(path)
    for path in both:
        assert members(path) == both
        assert stands_for_volume(path) == (path == both[0])
        np.testing.assert_array_equal(open_image(path).whole()[0], ARRAY)
        np.testing.assert_array_equal(read_label(path).array, ARRAY)
        assert open_image(path).geometry.spacing_mm == (2, 3, 4)


def test_pairs_whose_names_differ_by_case_alone_are_kept_apart(tmp_path):
    quiet, loud = (tmp_path / "a.hdr", tmp_path / "a.img"), (tmp_path / "a.HDR", tmp_path / "a.IMG")
    for path in (*quiet, *loud):
        path.touch()
    assert [members(path) for path in (*quiet, *loud)] == [quiet, quiet, loud, loud]


def test_half_a_pair_stands_alone_and_cannot_be_read(tmp_path):
    for suffix, partner in ((".hdr", "img"), (".HDR", "img"), (".img", "hdr"), (".Img", "hdr")):
        path = tmp_path / f"half{suffix}"
        path.write_bytes(b"something")
        assert members(path) == (path,)
        assert stands_for_volume(path)
        assert f"lacks its partner half.{partner}; a pair needs" in refusal(path, open_image)
        path.unlink()


@pytest.mark.parametrize("suffix", [".nii", ".nIi", ".NII.GZ", ".nii.GZ"])
def test_files_are_read_and_written_in_any_case_of_letters(tmp_path, suffix):
    gz = suffix.lower().endswith(".gz")
    nib.save(nib.Nifti1Image(ARRAY, np.eye(4)), tmp_path / ("a.nii.gz" if gz else "a.nii"))
    path = next(tmp_path.iterdir()).rename(tmp_path / f"scan{suffix}")
    np.testing.assert_array_equal(open_image(path).whole()[0], ARRAY)
    label = tmp_path / f"label{suffix}"
    write_label(label, ARRAY, open_image(path).geometry)
    assert {*tmp_path.iterdir()} == {path, label}
    assert (label.read_bytes()[:2] == b"\x1f\x8b") == gz
    np.testing.assert_array_equal(read_label(label).array, ARRAY)


# nibabel leaves an uncompressed .mgh file open until the garbage collector closes it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", [".mGz", ".MGH"])
def test_mgh_files_are_read_in_any_case_of_letters(tmp_path, suffix):
    plain = tmp_path / f"new{suffix.lower()}"
    nib.save(nib.MGHImage(ARRAY.astype(np.int32), np.eye(4)), plain)
    path = plain.rename(tmp_path / f"scan{suffix}")
    np.testing.assert_array_equal(open_image(path).whole()[0], ARRAY)


def test_analyze_files_are_refused(tmp_path):
    nib.save(nib.AnalyzeImage(ARRAY, np.eye(4)), tmp_path / "old.hdr")
    (tmp_path / "old.img").rename(tmp_path / "old.IMG")
    assert "such as Analyze 7.5, convert it to NIfTI" in refusal(tmp_path / "old.hdr", open_image)


def test_a_format_is_a_module_and_a_line_of_the_table(tmp_path, monkeypatch):
    """The format stores Z, X, Y: its module says so, and everything else works."""
    affine = np.array([[0, 2.0, 0, 5], [0, 0, 3, 6], [4, 0, 0, 7], [0, 0, 0, 1]])

    def open_file(path, reading):
        voxels = np.load(path)[..., None]
        geometry = geometry_of_affine(path, voxels.shape, affine)
        return Source(geometry, voxels.dtype, lambda scratch: voxels)

    def write_labels(path, stored, geometry, names):
        np.testing.assert_array_equal(geometry.as_stored().affine, affine)
        np.save(path, stored)

    module = SimpleNamespace(
        open_file=open_file, members=lambda path: (path,), write_labels=write_labels
    )
    monkeypatch.setitem(sys.modules, "unet3d.images.plain", module)
    line = Format("plain", (".npy",), written=(".npy",))
    monkeypatch.setattr(files, "FORMATS", (*FORMATS, line))
    monkeypatch.setattr(files, "SUFFIXES", (*SUFFIXES, ".npy"))
    monkeypatch.setattr(files, "WRITTEN_SUFFIXES", (".npy",))
    scan, label = tmp_path / "scan.npy", tmp_path / "label.npy"
    np.save(scan, ARRAY)
    image = open_image(scan)
    np.testing.assert_array_equal(image.whole()[0], ARRAY.transpose(1, 2, 0))
    assert image.geometry.spacing_mm == (2, 3, 4) and stands_for_volume(scan)
    write_label(label, (image.whole()[0] > 50).astype(np.uint8), image.geometry)
    np.testing.assert_array_equal(np.load(label), ARRAY > 50)
    np.testing.assert_array_equal(read_label(label).array, image.whole()[0] > 50)
    assert written_suffix(scan) == ".npy" and written_suffix(tmp_path / "a.nrrd") == ".nii.gz"
