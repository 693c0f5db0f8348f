import json

import nibabel as nib
import numpy as np
import pytest

from tests.command_line import refusal, run
from tests.images.samples import blob_label, msd_entry, write_msd, write_volume
from unet3d.datasets.dataset import load_dataset
from unet3d.memory import host
from unet3d.preparation.check import examine

SHAPE = (12, 14, 10)
RAMP = np.arange(12 * 14 * 10, dtype=np.float32).reshape(SHAPE)
LABEL = blob_label(SHAPE)


def found_in(root, spacing_mm="median", watch=None):
    return examine(load_dataset(root), spacing_mm, watch).findings


def assert_finds(root, *expected, case="case_1", **more):
    """Check that the findings have these severities and words, given as ``"severity: words"``."""
    findings = found_in(root, **more)
    said = [f"{finding.severity}: {finding.message}" for finding in findings]
    assert len(said) == len(expected), said
    for finding, line, wanted in zip(findings, said, expected, strict=True):
        severity, words = wanted.split(": ", 1)
        assert line.startswith(f"{severity}: ") and words in line and line.isprintable(), line
        assert finding.case == case


def write_case(root, image=RAMP, label=LABEL, affine=None):
    """Write the files of case_1: arrays, bytes as they are, or None for no file."""
    for folder, content in (("imagesTr", image), ("labelsTr", label)):
        path = root / folder / "case_1.nii.gz"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is None:
            path.unlink()
        else:
            nib.save(nib.Nifti1Image(content, np.eye(4) if affine is None else affine), path)


def with_voxel(value):
    image = RAMP.copy()
    image[2, 3, 4] = value
    return image


def labels_of(*values, dtype=np.int16):
    return np.resize(np.array(values, dtype), SHAPE)


@pytest.fixture
def root(tmp_path):
    return write_msd(tmp_path, shape=SHAPE)


@pytest.mark.parametrize(
    ("image", "label", "expected"),
    [
        (RAMP, LABEL, []),
        (RAMP, LABEL[..., :9], ["error: 12x14x10 and 12x14x9 differ; bring both to"]),
        (np.stack([RAMP] * 2, 3), LABEL, ["error: dataset.json names 1: MRI; correct one of"]),
        (RAMP, np.stack([LABEL] * 2, 3), ["error: is 4-D with 2 channels; a label map is 3-D"]),
        (
            RAMP,
            labels_of(0, 127, 255),
            ["error: holds values that dataset.json does not name: 127, 255 (it names 0, 1, 2)"],
        ),
        (RAMP, labels_of(0.4, 1.4, dtype=np.float32), ["error: not integer labels"]),
        (with_voxel(np.nan), LABEL, ["error: has 1 of 1680 voxels that are NaN or infinite"]),
        (
            np.full_like(RAMP, 7),
            np.zeros_like(LABEL),
            ["warning: is 7 in every voxel of channel 0", "warning: every voxel is background"],
        ),
        # A fault hides no other fault.
        (
            np.stack([with_voxel(np.nan), RAMP], 3),
            labels_of(0, 1, 7)[..., :9],
            [
                "error: 2 channels",
                "error: not on the grid",
                "error: NaN",
                "error: does not name: 7",
            ],
        ),
        (with_voxel(np.nan), b"", ["error: is empty (0 bytes)", "error: NaN"]),
        (
            None,
            labels_of(7),
            ["error: imagesTr/case_1.nii.gz is missing", "error: does not name: 7"],
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)
def test_says_what_is_wrong_with_a_case(root, image, label, expected):
    write_case(root, image, label)
    assert_finds(root, *expected, watch=print)


def test_says_which_file_lacks_the_number_of_its_channel(tmp_path):
    files = ["imagesTr/case_0000.nii.gz", "imagesTr/case_1.nii.gz", "labelsTr/case.nii.gz"]
    description = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "left": 1}}
    for name in (*files, "labelsTr/case_1.nii.gz"):
        write_volume(tmp_path / name, LABEL)
    text = json.dumps({**description, "file_ending": ".nii.gz"})
    (tmp_path / "dataset.json").write_text(text)
    missing, unused = (finding.message for finding in found_in(tmp_path))
    assert "case_1_0000.nii.gz is missing; rename case_1.nii.gz, or take the case" in missing
    assert unused.endswith("imagesTr/case_1.nii.gz belongs to no case and is not used")


def test_names_files_that_no_case_uses(root):
    write_volume(root / "imagesTr/extra.nii.gz", np.ones((4, 4, 4)))
    (root / "imagesTr/._case_1.nii.gz").write_bytes(b"left by a Mac")
    (root / "imagesTr/notes.txt").write_text("not a volume")
    write_case(root, label=labels_of(7))  # a fault that only reading voxels would find
    assert_finds(root, "warning: belongs to no case", case="extra.nii.gz")


def test_ignored_voxels_are_known_but_no_label(tmp_path):
    labels = {"0": "background", "1": "left", "2": "right", "5": "ignore"}
    root = write_msd(tmp_path / "data", labels=labels)
    some = LABEL.copy()
    some[:, :, 4:] = 5
    write_volume(root / "labelsTr/case_0.nii.gz", some)
    write_case(root, label=np.where(some == 5, some, 0))
    assert_finds(root, "warning: is empty: every voxel is background or ignored", watch=print)


@pytest.mark.parametrize("named", [".HDR", ".IMG"])
def test_the_other_file_of_a_pair_is_not_unnamed(tmp_path, named):
    entries = [msd_entry(0), msd_entry(1, image=f"imagesTr/pair{named}"), msd_entry(2)]
    root = write_msd(tmp_path, training=entries)
    (root / "imagesTr/case_1.nii.gz").unlink()
    nib.save(nib.Nifti1Pair(RAMP, np.eye(4)), root / "imagesTr/new.hdr")
    (root / "imagesTr/new.hdr").rename(root / "imagesTr/pair.HDR")
    (root / "imagesTr/new.img").rename(root / "imagesTr/pair.IMG")
    assert found_in(root, watch=print) == []


@pytest.mark.parametrize(
    ("spacing_mm", "reason"),
    [((100, 100, 100), "this machine has 1 GiB available"), ((1, 1, 1e8), "far too many; fix")],
)
def test_names_a_case_that_would_not_fit_in_memory(root, spacing_mm, reason, monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 2**30)
    write_case(root, affine=np.diag([*spacing_mm, 1]))
    for watch in (None, print):
        (message,) = (finding.message for finding in found_in(root, watch=watch))
        assert message.startswith(f"{root}/imagesTr/case_1.nii.gz: 12x14x10 voxels of ")
        assert "would become" in message and reason in message
    unit = "warning: are the units in its header right?"
    assert_finds(root, unit, spacing_mm="native")
    coarse = found_in(root, (2e3, 2e3, 2e8))
    assert "memory" not in " ".join(finding.message for finding in coarse)


def test_names_grids_that_no_scan_has(root):
    write_volume(root / "imagesTr/case_1.nii.gz", RAMP, (1e30, 1, 1))
    wanted = "error: impossible affine: it begins at 0x0x0 mm, and its spacing is 1e+30x1x1"
    assert_finds(root, wanted)
    write_volume(root / "imagesTr/case_1.nii.gz", RAMP, (1, 1, 1.5))
    assert_finds(root, "error: 4.5 mm apart")
    write_case(root, affine=np.diag([0.02, 0.02, 0.02, 1]))
    unit = "warning: 0.02 x 0.02 x 0.02 mm, but the median"
    assert_finds(root, unit, spacing_mm=(0.1, 0.1, 0.1))
    tilted = np.eye(4)
    tilted[1:3, 1] = np.cos(np.radians(15)), np.sin(np.radians(15))
    write_case(root, affine=tilted)
    assert_finds(root, "warning: deviate from a right angle by 15 degrees")


def test_labels_are_those_of_the_settings(root, capsys, tmp_path):
    write_case(root, label=labels_of(0, 2))
    (tmp_path / "labels.yaml").write_text("data: {labels: {one: [left]}}")
    by_file = ("--config", tmp_path / "labels.yaml")
    for words in (by_file, ("--set", "data.labels={one: [left]}")):
        assert run("check", root, *words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith("  one       in 2 of 3 cases") for line in lines)
        assert not any(line.startswith(("  left", "  right")) for line in lines)
        empty = f"case_1: {root}/labelsTr/case_1.nii.gz is empty: every voxel is background"
        assert lines[-2:] == [f"warning  {empty}", "3 cases, 0 errors, 1 warning"]
    write_case(root, label=labels_of(0, 1, 7))
    said = refusal(capsys, "check", root, *by_file)
    assert "3 cases, 1 error, 0 warnings" in said


def test_loops_of_links_are_findings_like_any_other(root):
    path = root / "imagesTr/case_1.nii.gz"
    path.unlink()
    path.symlink_to(path.name)
    assert_finds(root, "error: symbolic links")
