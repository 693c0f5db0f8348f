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
        Scan(name="large", seed=21, shape=(71, 58, 64), spacing_mm=(0.8, 1.0, 0.9)),
        Scan(name="fits", seed=22, shape=(32, 32, 32), spacing_mm=(1.25, 1.2, 1.3)),
        Scan(name="coarse", seed=23, shape=(22, 25, 19), spacing_mm=(2.1, 1.9, 2.4), axes="LPS"),
        Scan(
            name="sheared",
            seed=24,
            shape=(41, 33, 39),
            spacing_mm=(1.2, 1.0, 1.4),
            axes="PSR",
            tilt_degrees=-20,
            shear=-0.3,
        ),
        Scan(name="thick", seed=25, shape=(40, 42, 12), spacing_mm=(1.1, 1.2, 4.1), axes="RPS"),
        Scan(name="thin", seed=26, shape=(40, 3, 38), spacing_mm=(1.2, 1.3, 1.2)),
    ),
    "thick_slices": (
        Scan(name="large", seed=31, shape=(19, 81, 66), spacing_mm=(4.0, 0.9, 0.8)),
        Scan(name="few_slices", seed=32, shape=(4, 61, 50), spacing_mm=(9.0, 1.1, 1.3), axes="SRP"),
        Scan(name="isotropic", seed=33, shape=(36, 38, 37), spacing_mm=(1.5, 1.5, 1.5)),
        Scan(name="other_axis", seed=34, shape=(52, 14, 49), spacing_mm=(1.2, 4.9, 1.2)),
        Scan(
            name="tilted", seed=35, shape=(13, 45, 52), spacing_mm=(5.5, 1.2, 1.2), tilt_degrees=8
        ),
        Scan(name="as_planned", seed=36, shape=(12, 46, 50), spacing_mm=(4.8, 1.2, 1.3)),
    ),
    "regions": (
        Scan(name="large", seed=41, shape=(66, 58, 61), spacing_mm=(1.0, 1.1, 1.2)),
        Scan(name="turned", seed=42, shape=(37, 40, 43), spacing_mm=(1.4, 1.6, 1.5), axes="IPL"),
        Scan(name="as_planned", seed=43, shape=(40, 42, 41), spacing_mm=(1.5, 1.5, 1.5)),
        Scan(name="thick", seed=44, shape=(48, 46, 13), spacing_mm=(1.3, 1.4, 4.5), tilt_degrees=5),
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
def test_further_scans_are_segmented_as_nnunet_does(kind: str, tmp_path: Path) -> None:
    assert_agrees_with_nnunet(kind, model_of(kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_mirrored_scans_and_their_probabilities_are_those_of_nnunet(
    kind: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("fold", ["0", "1"])
def test_a_fold_alone_is_that_of_nnunet(fold: str, tmp_path: Path) -> None:
    files = write_scans("isotropic", tmp_path / "scans")
    model = model_of("isotropic")
    segment_with_nnunet(model, tmp_path / "scans", tmp_path / "theirs", (fold,))
    segmenter = unet3d.load(model, folds=[int(fold)], devices="cpu")
    found = {name: segmenter.segment(paths) for name, paths in files.items()}
    assert_agree(found, loaded(tmp_path / "theirs", files))


def resampling(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Return what changes how images and logits are resampled."""

    def change(plans: dict[str, Any]) -> None:
        plan = plans["configurations"]["3d_fullres"]
        plan["resampling_fn_data_kwargs"] |= changes
        plan["resampling_fn_probabilities_kwargs"] |= {
            name: value for name, value in changes.items() if name != "order"
        }

    return change


def without_a_word_of_slices(plans: dict[str, Any]) -> None:
    """Leave whether slices are resampled one by one to the default of nnU-Net's function."""
    plan = plans["configurations"]["3d_fullres"]
    for of in ("data", "probabilities"):
        del plan[f"resampling_fn_{of}_kwargs"]["force_separate_z"]


def normalized(schemes: Sequence[str], masked: bool) -> Callable[[dict[str, Any]], None]:
    """Return what changes how the channels are normalised."""

    def change(plans: dict[str, Any]) -> None:
        plan = plans["configurations"]["3d_fullres"]
        plan["normalization_schemes"] = list(schemes)
        plan["use_mask_for_norm"] = [masked] * len(schemes)

    return change


def read_by(reader: str) -> Callable[[dict[str, Any]], None]:
    """Return what changes how files are read."""

    def change(plans: dict[str, Any]) -> None:
        plans["image_reader_writer"] = reader

    return change


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
        pytest.param("regions", normalized(["ZScoreNormalization"] * 4, False), id="no mask"),
    ],
)
def test_a_model_with_other_plans_segments_as_nnunet_does(
    kind: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    model = shutil.copytree(model_of(kind), tmp_path / model_of(kind).name)
    plans = plans_of(model)
    change(plans)
    assert plans != plans_of(model)
    (model / "plans.json").write_text(json.dumps(plans))
    assert_agrees_with_nnunet(kind, model, tmp_path)
