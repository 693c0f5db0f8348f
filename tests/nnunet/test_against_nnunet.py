"""Further scans and models, compared with nnU-Net itself where it is installed.

Its own command segments them in a process of its own, in float32 on the CPU.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

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
"""Of nnU-Net's command, on a busy machine."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(MAX_SECONDS + 300),
    pytest.mark.usefixtures("float32"),
]

COMMAND = "from nnunetv2.inference.predict_from_raw_data import predict_entry_point as main; main()"

DRAW = {
    "isotropic": phantoms.isotropic,
    "thick_slices": phantoms.thick_slices,
    "regions": phantoms.regions,
}

FOLDS = {"isotropic": ("0", "1"), "thick_slices": ("0",), "regions": ("all",)}

NUM_VALUES = {"isotropic": 4, "thick_slices": 3, "regions": 4}
"""With the background."""

SCANS = {
    "isotropic": (
        Scan("large", 21, (71, 58, 64), (0.8, 1.0, 0.9)),
        Scan("fits", 22, (32, 32, 32), (1.25, 1.2, 1.3)),
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
        Scan("as_planned", 36, (12, 46, 50), (4.8, 1.2, 1.3)),
    ),
    "regions": (
        Scan("large", 41, (66, 58, 61), (1.0, 1.1, 1.2)),
        Scan("turned", 42, (37, 40, 43), (1.4, 1.6, 1.5), axes="IPL"),
        Scan("as_planned", 43, (40, 42, 41), (1.5, 1.5, 1.5)),
        Scan("thick", 44, (48, 46, 13), (1.3, 1.4, 4.5), tilt_degrees=5),
    ),
}

MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 2e-4, 0.02
"""Of probabilities: ours are written in float16, and nnU-Net's are of logits in float16."""


def write_scans(kind: str, folder: Path) -> dict[str, list[Path]]:
    """Write the scans of a kind, and return the files of each."""
    return {scan.name: phantoms.write(scan, DRAW[kind](scan)[0], folder) for scan in SCANS[kind]}


def segment_with_nnunet(
    model: Path, scans: Path, output: Path, folds: Sequence[str], *options: str
) -> None:
    """Run ``nnUNetv2_predict`` where it finds the model among its results."""
    results = output.with_name(f"{output.name}_results")
    shutil.copytree(model, results / "Dataset001_Phantoms" / model.name)
    trainer, plans, configuration = model.name.split("__")
    command = (
        *(sys.executable, "-c", COMMAND, "-i", scans, "-o", output, "-d", "Dataset001_Phantoms"),
        *("-tr", trainer, "-p", plans, "-c", configuration, "-f", *folds, "-device", "cpu"),
        *("-npp", "0", "-nps", "0", *options),  # all in this one process
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


def loaded(folder: Path, names: Iterable[str], ending: str = "") -> dict[str, nib.Nifti1Image]:
    return {name: nib.load(folder / f"{name}{ending}.nii.gz") for name in names}


def assert_agrees_with_nnunet(kind: str, model: Path, folder: Path) -> None:
    """Segment all scans of a kind with both, without mirror images."""
    files = write_scans(kind, folder / "scans")
    segment_with_nnunet(model, folder / "scans", folder / "theirs", FOLDS[kind], "--disable_tta")
    segmenter = unet3d.load(model, devices="cpu", tta=False)
    expected = loaded(folder / "theirs", files)
    values = {value for image in expected.values() for value in np.unique(labels_of(image))}
    assert len(values) == NUM_VALUES[kind]
    found = {name: segmenter.segment(paths) for name, paths in files.items()}
    assert_agree(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_further_scans_are_segmented_as_nnunet_does(kind, tmp_path):
    assert_agrees_with_nnunet(kind, model_of(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_scans_and_their_probabilities_are_those_of_nnunet(kind, tmp_path):
    files = write_scans(kind, tmp_path / "scans")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    segment_with_nnunet(
        model_of(kind), tmp_path / "scans", theirs, FOLDS[kind], "--save_probabilities"
    )
    ours.mkdir()
    checkpoint = ("--checkpoint", model_of(kind), "--devices", "cpu")
    scans = tmp_path / "scans"
    assert run("predict", scans, *checkpoint, "--probabilities", "-o", ours) == 0
    # The name of a scan with one channel is that of its file.
    ending = "_seg" if kind == "regions" else "_0000_seg"
    assert_agree(loaded(ours, files, ending), loaded(theirs, files))
    for name in files:
        probabilities = np.load(ours / f"{name}{ending}.npy").astype(np.float32)
        expected = np.load(theirs / f"{name}.npz")["probabilities"]
        differences = np.abs(probabilities - expected)
        assert differences.mean() <= MEAN_DIFFERENCE, (name, differences.mean())
        assert differences.max() <= LARGEST_DIFFERENCE, (name, differences.max())


Plans = dict[str, Any]
Change = Callable[[Plans, Plans], None]
"""Of plans, and of their configuration."""


def resampling(**changes: Any) -> Change:
    """Return what changes how images and logits are resampled."""

    def change(plans: Plans, plan: Plans) -> None:
        plan["resampling_fn_data_kwargs"] |= changes
        plan["resampling_fn_probabilities_kwargs"] |= {
            name: value for name, value in changes.items() if name != "order"
        }

    return change


def without_a_word_of_slices(plans: Plans, plan: Plans) -> None:
    """Leave whether slices are resampled one by one to the default of nnU-Net's function."""
    for of in ("data", "probabilities"):
        del plan[f"resampling_fn_{of}_kwargs"]["force_separate_z"]


def without_masks(plans: Plans, plan: Plans) -> None:
    plan["normalization_schemes"] = ["ZScoreNormalization"] * 4
    plan["use_mask_for_norm"] = [False] * 4


def read_by(reader: str) -> Change:
    """Return what changes how files are read."""
    return lambda plans, plan: plans.update(image_reader_writer=reader)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
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
def test_a_model_with_other_plans_segments_as_nnunet_does(kind, change, tmp_path):
    model = shutil.copytree(model_of(kind), tmp_path / model_of(kind).name)
    plans = plans_of(model)
    change(plans, plans["configurations"]["3d_fullres"])
    assert plans != plans_of(model)
    (model / "plans.json").write_text(json.dumps(plans))
    assert_agrees_with_nnunet(kind, model, tmp_path)
