"""Patch, batch and levels that unet3d and nnU-Net choose for twelve data sets, side by side.

    python benchmarks/plans.py --json benchmarks/results/plans-DATE.json

Both planners see the same: medians of shape and spacing, and numbers of cases, channels and
classes. Where nnunetv2 is installed its own planner chooses; else what an earlier record holds of
it is shown, with --known. No GPU is needed, and no data.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import io
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from common import command

from unet3d.config import Config, Shape, Spacing, load_config
from unet3d.planning.network_plan import plan_fingerprint
from unet3d.volumes.preprocess import Fingerprint

# Shape and spacing along X, Y, Z of the median case, cases, channels, classes. Of the Medical
# Segmentation Decathlon, ACDC and KiTS 2019, as in nnU-Net's papers (arXiv 1809.10486, table 1, and
# 1904.08128, appendix), rounded.
DATA_SETS: dict[str, tuple[Shape, Spacing, int, int, int]] = {
    "BrainTumour": ((138, 169, 138), (1.0, 1.0, 1.0), 484, 4, 4),
    "Heart": ((232, 320, 115), (1.25, 1.25, 1.37), 20, 1, 2),
    "Liver": ((512, 512, 482), (0.77, 0.77, 1.0), 131, 1, 3),
    "Hippocampus": ((35, 50, 36), (1.0, 1.0, 1.0), 260, 1, 3),
    "Prostate": ((319, 320, 20), (0.625, 0.625, 3.6), 32, 2, 3),
    "Lung": ((512, 512, 252), (0.79, 0.79, 1.24), 63, 1, 2),
    "Pancreas": ((512, 512, 96), (0.8, 0.8, 2.5), 281, 1, 3),
    "HepaticVessel": ((512, 512, 150), (0.8, 0.8, 1.5), 303, 1, 3),
    "Spleen": ((512, 512, 187), (0.79, 0.79, 1.6), 41, 1, 2),
    "Colon": ((512, 512, 150), (0.78, 0.78, 3.0), 126, 1, 2),
    "ACDC": ((216, 256, 13), (1.56, 1.56, 5.0), 200, 1, 4),
    "KiTS19": ((512, 512, 527), (0.78, 0.78, 0.78), 210, 1, 3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--known", type=Path, help="record with nnU-Net's choices")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    known = json.loads(arguments.known.read_text()) if arguments.known else None
    config = load_config(None, arguments.changes)
    record: dict[str, Any] = {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nnunetv2": known["nnunetv2"] if known else importlib.metadata.version("nnunetv2"),
        "memory_gib": config.patches.memory_gib,
        "data_sets": {},
    }
    for name, (shape, spacing_mm, num_cases, num_channels, num_classes) in DATA_SETS.items():
        data = {
            "shape": list(shape),
            "spacing_mm": list(spacing_mm),
            "num_cases": num_cases,
            "num_channels": num_channels,
            "num_classes": num_classes,
        }
        theirs = known["data_sets"][name]["nnunet"] if known else chosen_by_nnunet(data)
        record["data_sets"][name] = data | {"nnunet": theirs, "unet3d": chosen_here(config, data)}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(table(record)))


def fingerprint_of(data: dict[str, Any]) -> Fingerprint:
    """Return a data set of which all cases are the median one."""
    shape, spacing_mm = tuple(data["shape"]), tuple(data["spacing_mm"])
    return Fingerprint(
        spacing_mm=spacing_mm,
        shape=shape,
        shapes=frozenset([shape]),
        num_cases=data["num_cases"],
    )


def chosen_here(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    """Return what is planned with some settings."""
    network = plan_fingerprint(
        config, fingerprint_of(data), data["num_channels"], data["num_classes"]
    )
    assert network.limits is not None
    return {
        "patch_size": list(network.size),
        "batch_size": network.batch_size,
        "num_levels": network.topology.num_levels,
        "needed_bytes": network.limits.needed_bytes,
        "patch_limit": network.limits.patch,
        "batch_limit": network.limits.batch,
    }


def chosen_by_nnunet(data: dict[str, Any]) -> dict[str, Any]:
    """Return what nnU-Net's default planner chooses for its configuration 3d_fullres."""
    with tempfile.TemporaryDirectory() as folder:
        for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
            os.environ[variable] = folder
        name = "Dataset001_Median"
        base = Path(folder) / name
        (base / "imagesTr").mkdir(parents=True)
        (base / "labelsTr").mkdir()
        description = {
            "channel_names": {str(channel): "MRI" for channel in range(data["num_channels"])},
            "labels": {str(label): label for label in range(data["num_classes"])},
            "numTraining": data["num_cases"],
            "file_ending": ".nii.gz",
        }
        (base / "dataset.json").write_text(json.dumps(description))
        # nnU-Net's axes are Z, Y, X. Only medians enter what is asked for below.
        shape, spacing_mm = data["shape"][::-1], data["spacing_mm"][::-1]
        fingerprint = {
            "shapes_after_crop": [shape],
            "spacings": [spacing_mm],
            "median_relative_size_after_cropping": 1.0,
        }
        (base / "dataset_fingerprint.json").write_text(json.dumps(fingerprint))
        with contextlib.redirect_stdout(io.StringIO()):
            return _ask_nnunet(name, data)


def _ask_nnunet(name: str, data: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner

    planner: Any = default_experiment_planner.ExperimentPlanner(name)
    forward, _ = planner.determine_transpose()
    spacing = np.array(planner.determine_fullres_target_spacing())[forward]
    shape = np.array(data["shape"][::-1], dtype=float)[forward]
    num_voxels = float(np.prod(shape)) * data["num_cases"]
    plan = planner.get_plans_for_configuration(spacing, shape, "", num_voxels, {})
    patch = [0, 0, 0]
    for axis, size in zip(forward, plan["patch_size"], strict=True):
        patch[2 - axis] = int(size)
    return {
        "patch_size": patch,
        "batch_size": int(plan["batch_size"]),
        "num_levels": int(plan["architecture"]["arch_kwargs"]["n_stages"]),
    }


def table(record: dict[str, Any]) -> list[str]:
    """Return a record as a table in Markdown."""
    lines = [
        "| data set | median shape | nnU-Net | unet3d | voxels in a step | limited by |",
        "|---|---|---|---|---|---|",
    ]
    words = {"memory": "memory", "median": "median volume", "data": "5 %", "least": "5 %"}
    for name, data in record["data_sets"].items():
        ours, theirs = data["unet3d"], data["nnunet"]
        voxels = [math.prod(one["patch_size"]) * one["batch_size"] for one in (ours, theirs)]
        limits = dict.fromkeys(words[ours[key]] for key in ("patch_limit", "batch_limit"))
        lines.append(
            f"| {name} | {_times(data['shape'])} "
            f"| {theirs['batch_size']} of {_times(theirs['patch_size'])} "
            f"| {ours['batch_size']} of {_times(ours['patch_size'])} "
            f"| {voxels[0] / voxels[1]:.1f} x | {', '.join(limits)} |"
        )
    return lines


def _times(sizes: list[int]) -> str:
    return "x".join(map(str, sizes))


if __name__ == "__main__":
    main()
