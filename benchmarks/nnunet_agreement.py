"""How far our segmentations with a model of nnU-Net agree with those that nnU-Net has made.

    python benchmarks/nnunet_agreement.py MODEL SCANS FOUND [--precision float32,bfloat16] [--tta]
        [--folds 0,1] [--device cuda:0] [--json FILE]

MODEL is a folder of nnU-Net's results, SCANS its input (``case_0000.nii.gz``, ...), FOUND what
``nnUNetv2_predict`` wrote for it (``case.nii.gz``), with ``--disable_tta`` unless ``--tta`` is
given. Dice is that of all voxels of all cases together, which does not let small ones count most.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from common import command

import unet3d


def compare(arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Segment every scan that nnU-Net has segmented, and count."""
    folds = [int(fold) for fold in arguments.folds.split(",")] if arguments.folds else None
    segmenter = unet3d.load(
        arguments.model,
        folds=folds,
        devices=arguments.device,
        precision=precision,
        tta=arguments.tta,
    )
    labels = sorted(segmenter.label_names)
    num_equal = num_voxels = 0
    common = dict.fromkeys(labels, 0)
    either = dict.fromkeys(labels, 0)
    began = time.perf_counter()
    files = sorted(arguments.found.glob("*.nii.gz"))
    for file in files:
        case = file.name.removesuffix(".nii.gz")
        channels = sorted(arguments.scans.glob(f"{case}_[0-9][0-9][0-9][0-9].nii.gz"))
        ours = np.asarray(segmenter.segment(channels).dataobj)
        theirs = np.asarray(nib.load(file).dataobj)
        num_equal += int((ours == theirs).sum())
        num_voxels += theirs.size
        for label in labels:
            common[label] += int(((ours == label) & (theirs == label)).sum())
            either[label] += int((ours == label).sum() + (theirs == label).sum())
    return {
        "precision": precision,
        "mirrored": arguments.tta,
        "cases": len(files),
        "voxels": num_voxels,
        "equal_voxels": num_equal / num_voxels,
        "dice": {
            segmenter.label_names[label]: 2 * common[label] / either[label]
            for label in labels
            if either[label]
        },
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Compare, and print a line for each precision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("scans", type=Path)
    parser.add_argument("found", type=Path)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--tta", action="store_true")
    parser.add_argument("--folds", help="such as 0,1; default: all of the model")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [compare(arguments, precision) for precision in arguments.precision.split(",")]
    print(f"{'precision':>10} {'equal %':>10}  Dice")
    for row in rows:
        dice = ", ".join(f"{name} {value:.5f}" for name, value in row["dice"].items())
        print(f"{row['precision']:>10} {100 * row['equal_voxels']:>10.4f}  {dice}")
    if arguments.json is not None:
        record = {
            "command": command(),
            "device": arguments.device,
            "torch": torch.__version__,
            "unet3d": unet3d.__version__,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
