"""Further scans and models, compared with nnU-Net itself if it is installed.

nnU-Net's own command segments them in a new process, in float32 on the CPU.
"""

import json
import os
import shutil
import subprocess
import sys

import nibabel as nib
import numpy as np
import pytest

import unet3d
from tests.command_line import run
from tests.nnunet.recordings import KINDS, assert_agree, labels_of, model_of, plans_of
from tests.recorded.nnunet import phantoms
from tests.recorded.nnunet.phantoms import Scan

pytest.importorskip("nnunetv2")

MAX_SECONDS = 600
"""Time limit of nnU-Net's command, on a busy machine."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(MAX_SECONDS + 300),
    pytest.mark.usefixtures("float32"),
]

COMMAND = "from nnunetv2.inference.predict_from_raw_data import predict_entry_point as main; main()"

FOLDS = {"isotropic": ("0", "1"), "thick_slices": ("0",), "regions": ("all",)}

NUM_VALUES = {"isotropic": 4, "thick_slices": 3, "regions": 4}
"""Number of labels of each kind, with the background."""

SCANS = {
    "isotropic": (
        Scan("large", 21, (71, 58, 64), (0.8, 1.0, 0.9)),
        Scan("coarse", 23, (22, 25, 19), (2.1, 1.9, 2.4), axes="LPS"),
        Scan("sheared", 24, (41, 33, 39), (1.2, 1.0, 1.4), "PSR", tilt_degrees=-20, shear=-0.3),
        Scan("thick", 25, (40, 42, 12), (1.1, 1.2, 4.1), axes="RPS"),
        Scan("thin", 26, (40, 3, 38), (1.2, 1.3, 1.2)),
    ),
    "thick_slices": (
        Scan("large", 31, (19, 81, 66), (4.0, 0.9, 0.8)),
        Scan("few_slices", 32, (4, 61, 50), (9.0, 1.1, 1.3), axes="SRP"),
        Scan("isotropic", 33, (36, 38, 37), (1.5, 1.5, 1.5)),
        Scan("other_axis", 34, (52, 14, 49), (1.2, 4.9, 1.2)),
        Scan("tilted", 35, (13, 45, 52), (5.5, 1.2, 1.2), tilt_degrees=8),
    ),
    "regions": (
        Scan("large", 41, (66, 58, 61), (1.0, 1.1, 1.2)),
        Scan("turned", 42, (37, 40, 43), (1.4, 1.6, 1.5), axes="IPL"),
        Scan("thick", 44, (48, 46, 13), (1.3, 1.4, 4.5), tilt_degrees=5),
    ),
}

MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 2e-4, 0.02
"""Limits for probabilities: we write float16, and nnU-Net computes them from float16 logits."""


def write_scans(kind, folder):
    """Write the scans of a kind, and return the files of each."""
    draw = getattr(phantoms, kind)
    return {scan.name: phantoms.write(scan, draw(scan)[0], folder) for scan in SCANS[kind]}


def segment_with_nnunet(model, scans, output, folds, *options):
    """Run ``nnUNetv2_predict``, which finds the model in its folder of results."""
    results = output.with_name(f"{output.name}_results")
    shutil.copytree(model, results / "Dataset001_Phantoms" / model.name)
    trainer, plans, configuration = model.name.split("__")
    command = (
        *(sys.executable, "-c", COMMAND, "-i", scans, "-o", output, "-d", "Dataset001_Phantoms"),
        *("-tr", trainer, "-p", plans, "-c", configuration, "-f", *folds, "-device", "cpu"),
        *("-npp", "0", "-nps", "0", *options),  # everything in one process
    )
    variables = {f"nnUNet_{name}": str(results) for name in ("raw", "preprocessed", "results")}
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables, "nnUNet_compile": "f", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
    )
    assert done.returncode == 0, done.stderr


def loaded(folder, names, ending=""):
    return {name: nib.load(folder / f"{name}{ending}.nii.gz") for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_scans_and_their_probabilities_are_those_of_nnunet(kind, tmp_path):
    files = write_scans(kind, tmp_path / "scans")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    segment_with_nnunet(
        model_of(kind), tmp_path / "scans", theirs, FOLDS[kind], "--save_probabilities"
    )
    ours.mkdir()
    options = ("--checkpoint", model_of(kind), "--devices", "cpu", "--probabilities", "-o", ours)
    assert run("predict", tmp_path / "scans", *options) == 0
    # A scan with one channel is named after its file.
    ending = "_seg" if kind == "regions" else "_0000_seg"
    assert_agree(loaded(ours, files, ending), loaded(theirs, files))
    for name in files:
        probabilities = np.load(ours / f"{name}{ending}.npy").astype(np.float32)
        expected = np.load(theirs / f"{name}.npz")["probabilities"]
        differences = np.abs(probabilities - expected)
        assert differences.mean() <= MEAN_DIFFERENCE, (name, differences.mean())
        assert differences.max() <= LARGEST_DIFFERENCE, (name, differences.max())


def resampling(**changes):
    """Return changes of the plans that resample images and logits in another way."""

    def change(plans, plan):
        plan["resampling_fn_data_kwargs"] |= changes
        plan["resampling_fn_probabilities_kwargs"] |= {
            name: value for name, value in changes.items() if name != "order"
        }

    return change


def without_a_word_of_slices(plans, plan):
    """Leave it to the default of nnU-Net's function whether slices are resampled one by one."""
    for of in ("data", "probabilities"):
        del plan[f"resampling_fn_{of}_kwargs"]["force_separate_z"]


def without_masks(plans, plan):
    plan["normalization_schemes"] = ["ZScoreNormalization"] * 4
    plan["use_mask_for_norm"] = [False] * 4


def read_by(reader):
    """Return changes of the plans by which another class reads files."""
    return lambda plans, plan: plans.update(image_reader_writer=reader)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(pytest.param(kind, None, id=f"{kind} as it is") for kind in KINDS),
        pytest.param("thick_slices", resampling(order_z=1), id="linear across slices"),
        pytest.param("thick_slices", resampling(force_separate_z=False), id="never slice by slice"),
        pytest.param("thick_slices", without_a_word_of_slices, id="by default"),
        pytest.param("isotropic", resampling(force_separate_z=True), id="always slice by slice"),
        pytest.param("isotropic", resampling(order=1), id="linear"),
        pytest.param("isotropic", read_by("NibabelIOWithReorient"), id="read in RAS"),
        pytest.param("regions", read_by("SimpleITKIOWithReorient"), id="turned to RAS by ITK"),
        pytest.param("thick_slices", read_by("NibabelIO"), id="slices read by nibabel"),
        pytest.param("regions", without_masks, id="no mask"),
    ],
)
def test_a_model_segments_further_scans_as_nnunet_does(kind, change, tmp_path):
    model = shutil.copytree(model_of(kind), tmp_path / model_of(kind).name)
    plans = plans_of(model)
    if change is not None:
        change(plans, plans["configurations"]["3d_fullres"])
        assert plans != plans_of(model)
        (model / "plans.json").write_text(json.dumps(plans))
    files = write_scans(kind, tmp_path / "scans")
    theirs = tmp_path / "theirs"
    segment_with_nnunet(model, tmp_path / "scans", theirs, FOLDS[kind], "--disable_tta")
    segmenter = unet3d.load(model, devices="cpu", tta=False)
    expected = loaded(theirs, files)
    values = {value for image in expected.values() for value in np.unique(labels_of(image))}
    assert len(values) == NUM_VALUES[kind]
    assert_agree({name: segmenter.segment(paths) for name, paths in files.items()}, expected)
