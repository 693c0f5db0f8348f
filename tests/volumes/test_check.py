import os
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.volumes.samples import blob_label, write_msd, write_volume
from unet3d.config import Spacing
from unet3d.memory import host
from unet3d.volumes.check import Finding, check_dataset, check_headers
from unet3d.volumes.dataset import load_dataset

SHAPE = (12, 14, 10)


def messages(findings: list[Finding], case: str = "case_1") -> str:
    """Return what is said of one case, having seen that nothing is said of the others."""
    assert {finding.case for finding in findings} <= {case}, findings
    assert all(finding.message.isprintable() for finding in findings)
    return " | ".join(f"{finding.severity}: {finding.message}" for finding in findings)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_msd(tmp_path, shape=SHAPE)


def test_names_files_that_no_case_uses(root: Path) -> None:
    assert check_dataset(load_dataset(root)) == []
    write_volume(root / "imagesTr/extra.nii.gz", np.ones((4, 4, 4)))
    (root / "imagesTr/._case_1.nii.gz").write_bytes(b"left by a Mac")
    (root / "imagesTr/notes.txt").write_text("not a volume")
    said = messages(check_headers(load_dataset(root)), "extra.nii.gz")
    assert said.startswith("warning: ") and "belongs to no case" in said


def test_names_grids_that_disagree(root: Path) -> None:
    write_volume(root / "labelsTr/case_1.nii.gz", np.zeros((12, 14, 9), np.uint8))
    said = messages(check_headers(load_dataset(root)))
    assert "error" in said and "12x14x10 and 12x14x9" in said
    affine = np.eye(4)
    affine[0, 3] = 5
    shifted = nib.Nifti1Image(np.zeros(SHAPE, np.uint8), affine)
    nib.save(shifted, root / "labelsTr/case_1.nii.gz")
    said = messages(check_headers(load_dataset(root)))
    assert "error" in said and "5 mm" in said


def test_names_four_axes_where_three_are_expected(root: Path) -> None:
    write_volume(root / "imagesTr/case_1.nii.gz", np.ones((*SHAPE, 2), np.float32))
    assert "has 2 channel(s) but dataset.json names 1: MRI" in messages(
        check_headers(load_dataset(root))
    )
    write_msd(root, shape=SHAPE)
    write_volume(root / "labelsTr/case_1.nii.gz", np.zeros((*SHAPE, 2), np.uint8))
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 1 and "a label map is 3-D" in said


@pytest.mark.parametrize(
    ("values", "unknown"), [((0, 127, 255), "127, 255"), ((0, -1), "-1"), ((0, 1, 7), "7")]
)
def test_names_label_values_that_dataset_json_lacks(
    root: Path, values: tuple[int, ...], unknown: str
) -> None:
    write_volume(root / "labelsTr/case_1.nii.gz", np.resize(np.array(values, np.int16), SHAPE))
    dataset = load_dataset(root)
    assert check_headers(dataset) == []
    said = messages(check_dataset(dataset))
    assert said.startswith("error: ") and f"value(s) {unknown}, but" in said


def test_rounds_labels_that_were_saved_as_floats(root: Path) -> None:
    label = np.resize(np.array([0, 1.0000002, 1.9999998], np.float32), SHAPE)
    write_volume(root / "labelsTr/case_1.nii.gz", label)
    assert check_dataset(load_dataset(root)) == []
    write_volume(root / "labelsTr/case_1.nii.gz", label + np.float32(0.4))
    assert "no integer labels" in messages(check_dataset(load_dataset(root)))


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (np.nan, "has 1 voxels of 1680 that are NaN or infinite"),
        (np.inf, "has 1 voxels of 1680 that are NaN or infinite"),
        (1e10, "has 1 voxels of 1680 with values up to"),
        (-3.4e38, "has 1 voxels of 1680 with values up to"),
    ],
)
def test_names_intensities_that_are_none(root: Path, value: float, fault: str) -> None:
    path = root / "imagesTr/case_1.nii.gz"
    array = np.asarray(nib.load(path).dataobj).copy()
    array[2, 3, 4] = value
    write_volume(path, array)
    said = messages(check_dataset(load_dataset(root)))
    assert said.startswith("error: ") and fault in said


def test_warns_of_empty_labels_and_constant_images(root: Path) -> None:
    write_volume(root / "labelsTr/case_1.nii.gz", np.zeros(SHAPE, np.uint8))
    write_volume(root / "imagesTr/case_1.nii.gz", np.full(SHAPE, 7, np.float32))
    said = messages(check_dataset(load_dataset(root)))
    assert "error" not in said
    assert "warning" in said and "is empty" in said and "is 7 in every voxel" in said


def test_ignored_voxels_are_known_but_no_label(tmp_path: Path) -> None:
    labels = {"0": "background", "1": "left", "2": "right", "5": "ignore"}
    root = write_msd(tmp_path / "data", labels=labels)
    some = blob_label(SHAPE)
    some[:, :, 4:] = 5
    write_volume(root / "labelsTr/case_0.nii.gz", some)
    write_volume(root / "labelsTr/case_1.nii.gz", np.where(some == 5, some, 0))
    (finding,) = check_dataset(load_dataset(root))
    assert (finding.case, finding.severity) == ("case_1", "warning")
    assert finding.message.endswith("is empty: every voxel is background or ignored")


def test_no_fault_hides_another(root: Path) -> None:
    image = np.ones((*SHAPE, 2), np.float32)
    image[0, 0, :3, 0] = np.nan
    write_volume(root / "imagesTr/case_1.nii.gz", image)
    label = np.resize(np.array([0, 1, 7], np.uint8), (12, 14, 9))
    write_volume(root / "labelsTr/case_1.nii.gz", label)
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 4
    assert re.search(r"has 2 channel\(s\).*not on the grid.*3 voxels.*value\(s\) 7, but", said)
    # Nor does a file that cannot be read.
    write_msd(root, shape=SHAPE)
    (root / "imagesTr/case_1.nii.gz").unlink()
    write_volume(root / "labelsTr/case_1.nii.gz", np.full(SHAPE, 7, np.uint8))
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 2
    assert "imagesTr/case_1.nii.gz is missing" in said and "value(s) 7, but" in said

    write_msd(root, shape=SHAPE)
    (root / "labelsTr/case_1.nii.gz").write_bytes(b"")
    write_volume(root / "imagesTr/case_1.nii.gz", np.full(SHAPE, np.nan, np.float32))
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 2
    assert "is empty (0 bytes)" in said and "NaN" in said


def test_the_other_file_of_a_pair_is_not_unnamed(root: Path) -> None:
    image = nib.load(root / "imagesTr/case_1.nii.gz")
    nib.save(nib.Nifti1Pair(image.dataobj, image.affine), root / "imagesTr/new.hdr")
    (root / "imagesTr/new.hdr").rename(root / "imagesTr/case_1.Hdr")
    (root / "imagesTr/new.img").rename(root / "imagesTr/case_1.IMG")
    (root / "imagesTr/case_1.nii.gz").unlink()
    for named in (".Hdr", ".IMG"):
        tree = (root / "dataset.json").read_text()
        tree = re.sub(r"imagesTr/case_1[\w.]+", f"imagesTr/case_1{named}", tree)
        (root / "dataset.json").write_text(tree)
        assert check_dataset(load_dataset(root)) == []


@pytest.mark.parametrize("spacing_mm", [(100, 100, 100), (1, 1, 1e8)])
def test_names_a_case_that_would_not_fit_in_memory(
    root: Path, spacing_mm: Spacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 2**30)
    for folder in ("imagesTr", "labelsTr"):
        array = np.ones(SHAPE, np.uint8)
        array[0] = 0
        write_volume(root / folder / "case_1.nii.gz", array, spacing_mm)
    for check in (check_headers, check_dataset):
        said = messages(check(load_dataset(root)))
        assert said.startswith(f"error: {root}/imagesTr/case_1.nii.gz: 12x14x10 voxels of ")
        assert "would become" in said and "this machine has 1 GiB available" in said
    assert "are the units in its header right?" in messages(
        check_headers(load_dataset(root), "native")
    )
    coarse = check_headers(load_dataset(root), (2e3, 2e3, 2e8))
    assert "memory" not in " ".join(finding.message for finding in coarse)


def test_names_a_spacing_that_no_scan_has_or_that_is_in_another_unit(root: Path) -> None:
    write_volume(root / "imagesTr/case_1.nii.gz", np.ones(SHAPE, np.float32), (1e30, 1, 1))
    assert "spacing 1e+30x1x1 mm, which no scan has" in messages(check_headers(load_dataset(root)))
    write_msd(root, shape=SHAPE)
    for folder in ("imagesTr", "labelsTr"):
        path = root / folder / "case_1.nii.gz"
        array = np.asarray(nib.load(path).dataobj)
        write_volume(path, array, (0.02, 0.02, 0.02))
    said = messages(check_headers(load_dataset(root), (0.1, 0.1, 0.1)))
    assert said.startswith("warning: ") and "0.02x0.02x0.02 mm, but the median" in said


def test_warns_of_a_tilted_gantry(root: Path) -> None:
    degrees = 15
    affine = np.eye(4)
    affine[1:3, 1] = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    for folder in ("imagesTr", "labelsTr"):
        path = root / folder / "case_1.nii.gz"
        nib.save(nib.Nifti1Image(np.asarray(nib.load(path).dataobj), affine), path)
    said = messages(check_dataset(load_dataset(root)))
    assert said.startswith("warning: ") and said.count("warning") == 1
    assert f"miss a right angle by {degrees} degrees" in said


def test_pipes_and_loops_are_findings_like_any_other(root: Path) -> None:
    path = root / "imagesTr/case_1.nii.gz"
    path.unlink()
    os.mkfifo(path)
    assert "case_1.nii.gz is a pipe, not a file" in messages(check_dataset(load_dataset(root)))
    path.unlink()
    path.symlink_to(path.name)
    assert "symbolic links" in messages(check_dataset(load_dataset(root)))
