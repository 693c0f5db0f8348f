"""Awkward files on the command line: segmented on their own grid, or refused in one line."""

import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.command_line import error_line, run
from tests.images.samples import loaded, write_json
from tests.networks import write_checkpoint
from unet3d.images.files import volume_stem

# Files that a network with one channel cannot segment, and words of the reason. It can segment all
# others.
CHANNELS = "but the network was trained on 1 (channel 0)"
REFUSED = {
    "natural/sct_mt_mtr.nii.gz": "633 of 8000 voxels that are NaN or infinite",
    "natural/sct_dmri_dmri.nii.gz": f"7 channels, {CHANNELS}",
    "natural/sct_fmri_fmri_tsnr.nii.gz": "408 of 27744 voxels that are NaN or infinite",
    "natural/sct_fmri_fmri_r.nii.gz": f"30 channels, {CHANNELS}",
    "natural/sct_qmri_venc.nii.gz": f"3 channels, {CHANNELS}",
    "natural/sct_mt_warp_t22mt1.nii.gz": "5 axes (40x40x5x1x3)",
    "natural/nib_functional.nii": f"20 channels, {CHANNELS}",
    "natural/nib_resampled_anat_moved.nii": "153 of 1071 voxels that are NaN or infinite",
    "natural/nib_example4d.nii.gz": f"2 channels, {CHANNELS}",
    "natural/nib_example_nifti2.nii.gz": f"2 channels, {CHANNELS}",
    "natural/nib_test.mgz": f"2 channels, {CHANNELS}",
    "derived/analyze_image.hdr": "such as Analyze 7.5, convert it to NIfTI",
    "derived/nan_inf_image.nii.gz": "5356 of 62475 voxels that are NaN or infinite",
    "derived/twochannel_image.nii.gz": f"2 channels, {CHANNELS}",
    "derived/truncated_image.nii.gz": "Compressed file ended before",
    "derived/empty_file.nii.gz": "is empty (0 bytes)",
}

# Files that store one scan in many ways.
SAME_SCAN = [
    *("plain_image.nii", "pair_image.hdr", "nifti2_image.nii.gz", "mgh_image.mgz"),
    *("bigendian_image.nii.gz", "float64_image.nii.gz", "singleton4d_image.nii.gz"),
    *("LPS_image.nii.gz", "LAS_image.nii.gz", "ASR_image.nii.gz", "SPL_image.nii.gz"),
    *("oblique20_image.nii.gz", "qformonly_image.nii.gz"),
]


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """The command, with a network whose spacing is coarse, to save time."""
    folder = tmp_path_factory.mktemp("network")
    checkpoint = write_checkpoint(
        folder / "random.pt", spacing_mm=(3.0, 3.0, 3.0), patch_size=(24, 24, 24)
    )
    return ("predict", "--checkpoint", checkpoint, "--devices", "cpu", "--overlap", 0)


@pytest.fixture(scope="module")
def expected(test_data, predicting, tmp_path_factory):
    """The segmentation of the scan that is stored in many ways."""
    output = tmp_path_factory.mktemp("expected") / "seg.nii.gz"
    assert run(*predicting, test_data / "awkward/derived/ref_image.nii.gz", "-o", output) == 0
    return segmented(output)


def segmented(path):
    return np.asarray(nib.as_closest_canonical(nib.load(path)).dataobj)


def manifest():
    """List the files when tests are collected; without the data each test skips itself."""
    root = Path(__file__).resolve().parent.parent.parent
    folder = Path(os.environ.get("UNET3D_TEST_DATA", root / "shared" / "data"))
    try:
        lines = (folder / "awkward" / "MANIFEST.tsv").read_text().splitlines()
    except FileNotFoundError:
        return sorted(REFUSED)
    return [line.split("\t")[0] for line in lines]


def test_the_tables_name_files_of_the_manifest(test_data):
    assert set(manifest()) >= {*REFUSED, *(f"derived/{name}" for name in SAME_SCAN)}
    assert len(manifest()) == 72


@pytest.mark.parametrize("name", manifest())
def test_a_file_is_segmented_or_refused(test_data, name, predicting, expected, tmp_path, capsys):
    path = test_data / "awkward" / name
    output = tmp_path / f"{volume_stem(path)}.nii.gz"
    status = run(*predicting, path, "-o", output)
    captured = capsys.readouterr()
    if name in REFUSED:
        assert status == 1
        line = error_line(captured.err)
        assert str(path) in line and REFUSED[name] in line
        assert captured.out in ("", f"using {predicting[2]}\n")  # headers are read first
        assert not output.exists()
        return
    assert status == 0, captured.err
    assert captured.err == ""
    assert captured.out.startswith(f"using {predicting[2]}\n{path} -> {output}")
    scan, segmentation = loaded(path), nib.load(output)
    assert segmentation.shape == scan.shape[:3]
    np.testing.assert_allclose(segmentation.affine, scan.affine, atol=1e-5)
    np.testing.assert_allclose(
        segmentation.header.get_zooms(), scan.header.get_zooms()[:3], rtol=1e-5
    )
    assert segmentation.get_data_dtype() == np.uint8
    if isinstance(scan, nib.Nifti1Pair):
        for code in ("qform_code", "sform_code"):
            assert segmentation.header[code] == scan.header[code]
    if path.name in SAME_SCAN:
        assert len(np.unique(expected)) == 3
        np.testing.assert_array_equal(segmented(output), expected)


# Faults of data sets: the files of each case, and words of the finding, or None.
CASES = {
    "sound": ("ref_image.nii.gz", "ref_label.nii.gz", None),
    "turned": ("LPS_image.nii.gz", "ASR_label.nii.gz", None),
    "one slice": ("oneslice_image.nii.gz", "oneslice_label.nii.gz", None),
    "rounded": ("ref_image.nii.gz", "noisyfloat_label.nii.gz", None),
    "shifted": ("ref_image.nii.gz", "shifted_affine_label.nii.gz", "corners lie up to 8.66 mm"),
    "short": ("ref_image.nii.gz", "wrongshape_label.nii.gz", "shapes 35x51x35 and 35x51x34"),
    "empty": ("ref_image.nii.gz", "empty_label.nii.gz", "is empty: every voxel is background"),
    "constant": ("constant_image.nii.gz", "ref_label.nii.gz", "in every voxel of channel 0"),
    "grey": ("ref_image.nii.gz", "label_0_255.nii.gz", "does not name: 127, 255"),
    "nan": ("nan_inf_image.nii.gz", "ref_label.nii.gz", "NaN or infinite"),
    "channels": ("twochannel_image.nii.gz", "ref_label.nii.gz", "has 2 channels"),
    "truncated": ("truncated_image.nii.gz", "ref_label.nii.gz", "Compressed file ended before"),
    "unzipped": ("notgz_image.nii.gz", "ref_label.nii.gz", None),
    "nothing": ("empty_file.nii.gz", "ref_label.nii.gz", "is empty (0 bytes)"),
    "missing": ("ref_image.nii.gz", "", "is missing"),
}
WARNINGS = ("empty", "constant")
BEFORE_VOXELS = ("shifted", "short", "channels", "nothing", "missing")


@pytest.fixture
def broken(test_data, tmp_path):
    """A data set with every one of these faults."""
    derived, root = test_data / "awkward" / "derived", tmp_path / "broken data"
    training = []
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for case, (*sources, _) in CASES.items():
        entry = {kind: f"{kind}sTr/{case}.nii.gz" for kind in ("image", "label")}
        for file, source in zip(entry.values(), sources, strict=True):
            if source:
                shutil.copyfile(derived / source, root / file)
        training.append(entry)
    labels = {"0": "background", "1": "Anterior", "2": "Posterior"}
    tree = {"modality": {"0": "MRI"}, "labels": labels, "training": training}
    write_json(root / "dataset.json", tree)
    return root


def test_check_finds_every_fault(broken, tmp_path, capsys):
    assert run("check", broken, "--json", tmp_path / "findings.json") == 1
    captured = capsys.readouterr()
    num_errors = sum(words is not None for *_, words in CASES.values()) - len(WARNINGS)
    assert error_line(captured.err) == (
        f"Error: {broken}: {len(CASES)} cases, {num_errors} errors, {len(WARNINGS)} warnings; "
        "fix the errors before training"
    )
    findings = json.loads((tmp_path / "findings.json").read_text())["findings"]
    found = {finding["case"]: finding for finding in findings}
    assert len(found) == len(findings), "one finding a fault"
    assert found.keys() == {case for case, (*_, words) in CASES.items() if words}
    for case, finding in found.items():
        assert CASES[case][2] in finding["message"]
        assert f"{case}.nii.gz" in finding["message"]
        severity = "warning" if case in WARNINGS else "error"
        assert finding["severity"] == severity
        assert f"{severity:7}  {case}: {finding['message']}" in captured.out.splitlines()


def test_training_stops_at_what_headers_tell(broken, tmp_path, capsys):
    output = tmp_path / "run"
    cache = f"data.cache={tmp_path / 'cache'}"
    assert run("train", broken, "--output", output, "--devices", "cpu", "--set", cache) == 1
    line = error_line(capsys.readouterr().err)
    assert f"has {len(BEFORE_VOXELS)} faults; unet3d check lists all: " in line
    assert sum(f" {case}: " in line for case in BEFORE_VOXELS) == 5
