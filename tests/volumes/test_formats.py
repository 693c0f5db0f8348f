"""A volume is the same in every format: read by us, and by SimpleITK, in every orientation."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from tests.volumes.dicom_series import write_series
from tests.volumes.samples import refusal
from unet3d.errors import VolumeError
from unet3d.volumes.header import read_header, same_grid
from unet3d.volumes.nifti import Volume, open_channels, read_image, read_label, write_label

ARRAY = np.random.default_rng(0).integers(-1000, 3000, (4, 5, 6)).astype(np.int16)
SPACING_MM = (0.7, 0.8, 2.5)
ORIENTATIONS = [
    (axes, signs)
    for axes in itertools.permutations(range(3))
    for signs in itertools.product((1, -1), repeat=3)
]
OBLIQUE = ((0.3, -0.2, 0.5), (0.05, 0.02, -0.6), (-1.1, 0.7, 0.2))
"""Rotations about X, Y and Z in radians."""


def affine_along(axes: tuple[int, ...], signs: tuple[int, ...]) -> npt.NDArray[np.float64]:
    affine = np.eye(4)
    affine[:3, :3] = 0
    for stored, (axis, sign) in enumerate(zip(axes, signs, strict=True)):
        affine[axis, stored] = sign * SPACING_MM[stored]
    affine[:3, 3] = (12.5, -31.25, 103.5)
    return affine


def rotation(angles: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    turned = np.eye(4)
    turned[:3, :3] = nib.eulerangles.euler2mat(*angles)
    return turned


READER_OF = {".nrrd": "NrrdImageIO", ".mha": "MetaImageIO", ".mhd": "MetaImageIO"}
"""SimpleITK's; it would also try GDCM, of which pydicom has another one in this process."""

AFFINES = [
    # Each order of the axes, with all signs in turn.
    *(affine_along(*ORIENTATIONS[number]) for number in (0, 9, 18, 27, 36, 45)),
    *(
        rotation(angles) @ affine_along(*ORIENTATIONS[number])
        for angles, number in zip(OBLIQUE, (0, 13, 34), strict=True)
    ),
]


def write_itk(path: Path, array: npt.NDArray[Any], affine: npt.NDArray[np.float64]) -> Path:
    """Write an array (X, Y, Z) whose affine is that of NIfTI through SimpleITK."""
    sitk = pytest.importorskip("SimpleITK", reason="needs SimpleITK, of the extra dev")
    image = sitk.GetImageFromArray(np.ascontiguousarray(array.T))
    lps = np.diag([-1, -1, 1, 1]) @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    sitk.WriteImage(image, str(path))
    return path


def canonical(array: npt.NDArray[Any], affine: npt.NDArray[np.float64]) -> Any:
    return nib.as_closest_canonical(nib.Nifti1Image(array, affine))


def compare(volume: Volume, affine: npt.NDArray[np.float64], folder: Path) -> None:
    """Compare a volume with the one that nibabel makes of the same array, and with its NIfTI."""
    expected = canonical(ARRAY, affine)
    np.testing.assert_array_equal(volume.array[0], expected.get_fdata())
    np.testing.assert_allclose(volume.header.affine, expected.affine, atol=1e-5)
    nib.save(nib.Nifti1Image(ARRAY, affine), folder / "reference.nii")
    reference = read_image(folder / "reference.nii")
    np.testing.assert_array_equal(volume.array, reference.array)
    assert same_grid(volume.header, reference.header, tolerance_mm=1e-4) is None
    assert volume.header.spacing_mm == reference.header.spacing_mm


@pytest.mark.parametrize("affine", AFFINES)
def test_it_lies_where_nibabel_and_simpleitk_say(tmp_path, affine):
    sitk = pytest.importorskip("SimpleITK", reason="needs SimpleITK, of the extra dev")
    labels = (ARRAY > 1000).astype(np.uint8)
    for name in ("scan.nrrd", "scan.mha", "scan.mhd"):
        path = write_itk(tmp_path / name, ARRAY, affine)
        volume = read_image(path)
        compare(volume, affine, tmp_path)
        # A segmentation lies voxel on voxel on the scan, for SimpleITK too.
        ras = np.asanyarray(canonical(labels, affine).dataobj)
        write_label(tmp_path / "seg.nii.gz", ras, volume.header)
        scan = sitk.ReadImage(str(path), imageIO=READER_OF[path.suffix])
        # Its axes as they are stored are those of SimpleITK, in reverse.
        stored = open_channels([path]).as_stored()
        np.testing.assert_array_equal(stored.voxels.whole()[0].T, sitk.GetArrayFromImage(scan))
        assert stored.header.exact_mm == scan.GetSpacing()
        written = sitk.ReadImage(str(tmp_path / "seg.nii.gz"), imageIO="NiftiImageIO")
        np.testing.assert_array_equal(
            sitk.GetArrayFromImage(written), sitk.GetArrayFromImage(scan) > 1000
        )
        np.testing.assert_allclose(written.GetOrigin(), scan.GetOrigin(), atol=1e-4)
        np.testing.assert_allclose(written.GetSpacing(), scan.GetSpacing(), atol=1e-5)
        np.testing.assert_allclose(written.GetDirection(), scan.GetDirection(), atol=1e-5)
        np.testing.assert_array_equal(read_label(tmp_path / "seg.nii.gz").array, ras)


@pytest.mark.parametrize("affine", AFFINES)
def test_slices_lie_where_their_positions_say(tmp_path, affine):
    pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")
    folder = write_series(tmp_path / "series", ARRAY, affine)
    volume = read_image(folder)
    compare(volume, affine, tmp_path)
    # Slices follow each other along the vector product of row and column, as GDCM has them.
    along = 1 if np.linalg.det(affine) > 0 else -1
    stored = open_channels([folder]).as_stored()
    np.testing.assert_array_equal(stored.voxels.whole()[0], ARRAY[..., ::along])
    np.testing.assert_allclose(stored.header.affine[:3, 2], along * affine[:3, 2], atol=1e-6)
    labels = np.asanyarray(canonical((ARRAY > 1000).astype(np.uint8), affine).dataobj)
    write_label(tmp_path / "seg.nii.gz", labels, volume.header)
    written = nib.load(tmp_path / "seg.nii.gz")
    assert int(written.header["qform_code"]) == int(written.header["sform_code"]) == 1
    np.testing.assert_array_equal(written.get_fdata(), ARRAY[..., ::along] > 1000)
    np.testing.assert_allclose(written.affine, stored.header.affine, atol=1e-5)


READ_BY_SIMPLEITK = """
import sys
import numpy as np
import SimpleITK as sitk
for folder in sys.argv[1:]:
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(folder))
    image = reader.Execute()
    sitk.WriteImage(image, folder + ".nii")
"""


def test_gdcm_reads_the_same_of_a_series(tmp_path):
    pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")
    pytest.importorskip("SimpleITK", reason="needs SimpleITK, of the extra dev")
    folders = []
    scalings: list[tuple[Any, Any]] = [(None, None), (1, -1024), (0.37, 1.5)]
    for number, (slope, intercept) in enumerate(scalings):
        for kind, bits in (("<i2", 16), ("<u2", 16), ("<u2", 12)):
            array = (ARRAY.astype(int) % 2**bits if kind == "<u2" else ARRAY).astype(kind)
            name = f"{number}{kind[1]}{bits}"
            more = {"BitsStored": bits, "HighBit": bits - 1}
            affine = rotation(OBLIQUE[number % 3]) @ affine_along((0, 1, 2), (-1, -1, 1))
            scaling = {"RescaleSlope": slope, "RescaleIntercept": intercept}
            folders.append(write_series(tmp_path / name, array, affine, **more, **scaling))
    # In a process of its own: its GDCM and that of pydicom do not go together.
    command = [sys.executable, "-c", READ_BY_SIMPLEITK, *map(str, folders)]
    subprocess.run(command, check=True, timeout=120)
    for folder in folders:
        volume, reference = read_image(folder), read_image(folder.with_name(f"{folder.name}.nii"))
        assert same_grid(volume.header, reference.header) is None
        np.testing.assert_allclose(volume.array, reference.array, rtol=1e-6)


def test_what_is_no_volume_is_refused(tmp_path):
    (tmp_path / "scan.txt").write_text("no scan")
    with pytest.raises(VolumeError, match=r"scan\.txt is not named like a volume.*\.nrrd, \.mha"):
        read_header(tmp_path / "scan.txt")
    with pytest.raises(VolumeError, match="is a folder without DICOM slices"):
        read_header(tmp_path)
    (tmp_path / "IM1").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(VolumeError, match="IM1 is one DICOM file; name the folder"):
        read_header(tmp_path / "IM1")


def test_only_dicom_needs_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("pydicom", reason="needs pydicom, of the extra itk")
    affine = np.diag([1.0, 1, 1, 1])
    nib.save(nib.Nifti1Image(ARRAY, affine), tmp_path / "scan.nii.gz")
    write_itk(tmp_path / "scan.nrrd", ARRAY, affine)
    write_itk(tmp_path / "scan.mha", ARRAY, affine)
    write_series(tmp_path / "slices", ARRAY)
    for name in [*sys.modules, "gdcm"]:
        if name.split(".")[0] in ("pydicom", "gdcm", "SimpleITK"):
            monkeypatch.setitem(sys.modules, name, None)
    for name in ("scan.nii.gz", "scan.nrrd", "scan.mha"):
        assert read_image(tmp_path / name).array.sum() == ARRAY.sum()
    refused = refusal(tmp_path / "slices")
    assert "needs pydicom, which is not installed: pip install" in refused
