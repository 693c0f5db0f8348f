import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.volumes.samples import write_json, write_msd, write_volume
from unet3d.volumes.check import Finding, check_dataset, check_headers
from unet3d.volumes.dataset import load_dataset

SHAPE = (12, 14, 10)


def messages(findings: list[Finding], case: str = "case_1") -> str:
    """Return what is said of one case, having seen that nothing is said of the others."""
    assert {finding.case for finding in findings} <= {case}, findings
    assert all("\n" not in finding.message for finding in findings)
    return " | ".join(f"{finding.severity}: {finding.message}" for finding in findings)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_msd(tmp_path, shape=SHAPE)


def test_a_sound_data_set_has_no_findings(root: Path) -> None:
    assert check_dataset(load_dataset(root)) == []


def test_names_a_missing_file(root: Path) -> None:
    (root / "labelsTr/case_1.nii.gz").unlink()
    said = messages(check_headers(load_dataset(root)))
    assert said.startswith("error: ") and "labelsTr/case_1.nii.gz is missing" in said


def test_names_files_that_no_case_uses(root: Path) -> None:
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
    said = messages(check_headers(load_dataset(root)))
    assert "error" in said and "a label map is 3-D" in said


@pytest.mark.parametrize(
    ("values", "unknown"), [((0, 127, 255), "127, 255"), ((0, -1), "-1"), ((0, 1, 7), "7")]
)
def test_names_label_values_that_dataset_json_lacks(
    root: Path, values: tuple[int, ...], unknown: str
) -> None:
    label = np.resize(np.array(values, np.int16), SHAPE)
    write_volume(root / "labelsTr/case_1.nii.gz", label)
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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_names_nan_and_infinity(root: Path, value: float) -> None:
    image = np.ones(SHAPE, np.float32)
    image[0, 0, :3] = value
    write_volume(root / "imagesTr/case_1.nii.gz", image)
    said = messages(check_dataset(load_dataset(root)))
    assert said.startswith("error: ") and "3 voxels" in said


def test_warns_of_empty_labels_and_constant_images(root: Path) -> None:
    write_volume(root / "labelsTr/case_1.nii.gz", np.zeros(SHAPE, np.uint8))
    write_volume(root / "imagesTr/case_1.nii.gz", np.full(SHAPE, 7, np.float32))
    said = messages(check_dataset(load_dataset(root)))
    assert "error" not in said
    assert "warning" in said and "is empty" in said and "is 7 in every voxel" in said


def test_names_unreadable_files(root: Path) -> None:
    damaged = root / "imagesTr/case_1.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    assert str(damaged) in messages(check_dataset(load_dataset(root)))
    damaged.write_bytes(b"")
    assert "is empty (0 bytes)" in messages(check_headers(load_dataset(root)))


def test_a_fault_of_the_grid_hides_no_fault_of_the_voxels(root: Path) -> None:
    image = np.ones((*SHAPE, 2), np.float32)
    image[0, 0, :3, 0] = np.nan
    write_volume(root / "imagesTr/case_1.nii.gz", image)
    label = np.resize(np.array([0, 1, 7], np.uint8), (12, 14, 9))
    write_volume(root / "labelsTr/case_1.nii.gz", label)
    findings = check_dataset(load_dataset(root))
    messages(findings)
    said = [finding.message for finding in findings]
    assert len(said) == 4
    assert "has 2 channel(s)" in said[0]
    assert "not on the grid" in said[1]
    assert "3 voxels" in said[2]
    assert "value(s) 7, but" in said[3]


def test_a_file_that_cannot_be_read_hides_no_fault_of_the_others(root: Path) -> None:
    (root / "imagesTr/case_1.nii.gz").unlink()
    write_volume(root / "labelsTr/case_1.nii.gz", np.full(SHAPE, 7, np.uint8))
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 2
    assert "case_1.nii.gz is missing" in said and "value(s) 7, but" in said

    write_msd(root, shape=SHAPE)
    (root / "labelsTr/case_1.nii.gz").write_bytes(b"")
    write_volume(root / "imagesTr/case_1.nii.gz", np.full(SHAPE, np.nan, np.float32))
    said = messages(check_dataset(load_dataset(root)))
    assert said.count("error: ") == 2
    assert "is empty (0 bytes)" in said and "NaN" in said


def test_a_label_map_of_four_axes_is_one_fault(root: Path) -> None:
    write_volume(root / "labelsTr/case_1.nii.gz", np.zeros((*SHAPE, 2), np.uint8))
    assert messages(check_dataset(load_dataset(root))).count("error: ") == 1


def test_names_what_is_wrong_with_the_awkward_files(test_data: Path, tmp_path: Path) -> None:
    derived = test_data / "awkward" / "derived"
    pairs = {
        "sound": ("ref_image.nii.gz", "ref_label.nii.gz"),
        "turned": ("LPS_image.nii.gz", "ASR_label.nii.gz"),
        "shifted": ("ref_image.nii.gz", "shifted_affine_label.nii.gz"),
        "short": ("ref_image.nii.gz", "wrongshape_label.nii.gz"),
        "empty": ("ref_image.nii.gz", "empty_label.nii.gz"),
        "grey": ("ref_image.nii.gz", "label_0_255.nii.gz"),
        "negative": ("ref_image.nii.gz", "neg_label.nii.gz"),
        "rounded": ("ref_image.nii.gz", "noisyfloat_label.nii.gz"),
        "nan": ("nan_inf_image.nii.gz", "ref_label.nii.gz"),
        "channels": ("twochannel_image.nii.gz", "ref_label.nii.gz"),
        "truncated": ("truncated_image.nii.gz", "ref_label.nii.gz"),
        "zero": ("empty_file.nii.gz", "ref_label.nii.gz"),
    }
    training = []
    for name, files in pairs.items():
        entry = {}
        for key, file in zip(("image", "label"), files, strict=True):
            (tmp_path / f"{name}_{key}.nii.gz").write_bytes((derived / file).read_bytes())
            entry[key] = f"{name}_{key}.nii.gz"
        training.append(entry)
    labels = {"background": 0, "Anterior": 1, "Posterior": 2}
    tree = {"modality": {"0": "MRI"}, "labels": labels, "training": training}
    dataset = load_dataset(write_json(tmp_path / "dataset.json", tree))
    found: dict[str, str] = {}
    for finding in check_dataset(dataset):
        name = finding.case.removesuffix("_label")
        assert name not in found, "one finding a fault"
        found[name] = f"{finding.severity}: {finding.message}"
    assert set(found) == set(pairs) - {"sound", "turned", "rounded"}
    assert all(
        said.startswith("warning" if name == "empty" else "error") for name, said in found.items()
    )
    assert "127, 255" in found["grey"]
    assert "value(s) 255" in found["negative"]  # its -1 became 255 when it was written
    assert "affines differ" in found["shifted"]
    assert "shapes" in found["short"]
    assert "NaN" in found["nan"]


@pytest.mark.parametrize(
    ("header", "voxels"), [(".HDR", ".IMG"), (".hdr", ".IMG"), (".Hdr", ".img")]
)
def test_the_other_file_of_a_pair_is_not_unnamed(root: Path, header: str, voxels: str) -> None:
    image = nib.load(root / "imagesTr/case_1.nii.gz")
    nib.save(nib.Nifti1Pair(image.dataobj, image.affine), root / "imagesTr/new.hdr")
    (root / "imagesTr/new.hdr").rename(root / f"imagesTr/case_1{header}")
    (root / "imagesTr/new.img").rename(root / f"imagesTr/case_1{voxels}")
    (root / "imagesTr/case_1.nii.gz").unlink()
    for named in (header, voxels):
        tree = json.loads((root / "dataset.json").read_text())
        tree["training"][1]["image"] = f"imagesTr/case_1{named}"
        write_json(root / "dataset.json", tree)
        assert check_dataset(load_dataset(root)) == []
