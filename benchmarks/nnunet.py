"""A trained model of nnU-Net in both programs, from file to file: time, memory and agreement.

    python benchmarks/nnunet.py MODEL --shape 512,512,400 --spacing 0.8 --json model.json
    python benchmarks/nnunet.py MODEL --scans FOLDER --mirrored --precision float32
    python benchmarks/nnunet.py MODEL --scans FOLDER --resampler default,torch
    python benchmarks/nnunet.py MODEL --scans FOLDER --found SEGMENTATIONS --precision auto,float32
    python benchmarks/nnunet.py MODEL --device cpu --threads 2 --shape 256,256,100 --spacing 1.5

MODEL is a folder such as ``nnUNetTrainer__nnUNetPlans__3d_fullres``; ``quality.py --keep`` leaves
one, and ``unet3d convert --to nnunet`` makes one from a network of ours. The scans are in a folder
(``case_0000.nii.gz``, ...), or one phantom of that shape and spacing.

Both commands segment the folder in separate processes, as a user starts them: nnU-Net by its entry
point for a folder, with its default workers, uncompiled unless ``nnUNet_compile`` is set; ours by
``unet3d predict``. Both use mirror images only with ``--mirrored``. With ``--resampler torch`` the
model's plans have PyTorch resample nnU-Net's logits to the scan, as its authors advise for slow
resampling; images are still resampled as in training. The ratio is our time over nnU-Net's time
with its fastest resampler. Without ``--threads`` each program chooses its number of cores; with it,
both have that many. Our first run compiles its kernels into an empty cache; the time is the median
of the other runs. Host memory is the peak of a process and its children together, GPU memory the
value of nvidia-smi. ``--found`` names existing segmentations by ``nnUNetv2_predict``; then nnU-Net
does not run.

With ``--precision float32`` ours computes in float32 without TF32. ``--nnunet-precision float32``
does the same in nnU-Net, which uses float16 on a GPU. It also adds up the logits of windows in
float32; nnU-Net adds them in float16, in which the logits of two labels are sometimes equal. The
agreement is the share of equal voxels, and the Dice of each label over the voxels of all cases
together, so that small cases do not dominate.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from common import (
    GIB,
    devices_named,
    new_parser,
    numbers,
    one_device,
    run_watched,
    seen_alone,
    shape,
    words,
    write_record,
)
from numpy.typing import NDArray
from prediction import summary, write_scan

ENTRY = """
import sys, multiprocessing, torch
from nnunetv2.inference.predict_from_raw_data import predict_entry_point_modelfolder as predict
if __name__ == "__main__":
    sys.argv[0] = "nnUNetv2_predict_from_modelfolder"
    {before}
    predict()
"""
"""Code that runs nnU-Net's command, even if its scripts are not installed."""

IN_FLOAT32 = [
    "lower = torch.autocast",
    "torch.autocast = lambda kind, **_: lower(kind, enabled=False)",
    "torch.half = torch.float32",
]
"""Code that makes nnU-Net compute windows, and add up their logits, in float32."""
TORCH_RESAMPLER = {
    "resampling_fn_probabilities": "resample_torch_fornnunet",
    "resampling_fn_probabilities_kwargs": {
        "is_seg": False,
        "force_separate_z": False,
        "memefficient_seg_resampling": False,
    },
}
"""Entries of plans, as nnU-Net's planners with this resampler write them
(``nnUNetPlannerResEncL_torchres``)."""
SET_THREADS = "multiprocessing.cpu_count = lambda: {threads}"
"""Code that sets nnU-Net's threads on a CPU, which it otherwise takes from the machine's cores."""


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--scans", type=Path, help="a folder; default: one phantom")
    parser.add_argument("--shape", type=shape, default="512,512,400", help="of the phantom")
    parser.add_argument("--spacing", type=float, default=0.8, help="of the phantom, in mm")
    parser.add_argument("--found", type=Path, help="nnU-Net's segmentations, made before")
    parser.add_argument("--folds", type=numbers, default="0")
    parser.add_argument("--mirrored", action="store_true")
    parser.add_argument("--precision", type=words, default="auto", help="of ours, such as auto")
    parser.add_argument("--resampler", type=words, default="default", help="default, torch or both")
    parser.add_argument("--nnunet-precision", choices=("auto", "float32"), default="auto")
    parser.add_argument("--device", default=one_device())
    parser.add_argument("--threads", type=int, help="cores of each program")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ours")
    parser.add_argument("--nnunet-repeats", type=int, default=1)
    return parser


def with_torch_resampler(model: Path, folder: Path) -> Path:
    """Return a new folder with a model of nnU-Net whose plans have PyTorch resample its logits."""
    shutil.copytree(model.absolute(), folder, copy_function=os.symlink)
    plans = json.loads((folder / "plans.json").read_text())
    for configuration in plans["configurations"].values():
        if "resampling_fn_probabilities" in configuration:  # otherwise it inherits the entries
            configuration |= TORCH_RESAMPLER
    (folder / "plans.json").unlink()  # a link
    (folder / "plans.json").write_text(json.dumps(plans))
    return folder


def command_of_nnunet(
    model: Path,
    scans: Path,
    out: Path,
    device: str,
    *,
    folds: Sequence[int | str] = (0,),
    mirrored: bool,
    before: Sequence[str] = (),
) -> tuple[list[object], dict[str, str]]:
    """Return nnU-Net's command that segments a folder, and its environment."""
    (place,) = devices_named((device,))
    said: list[object] = [sys.executable, "-c", ENTRY.format(before="; ".join(before) or "pass")]
    said += ["-i", scans, "-o", out, "-m", model, "-f", *folds]
    said += ["-device", place.type, "--disable_progress_bar"]
    said += [] if mirrored else ["--disable_tta"]
    environment = {f"nnUNet_{name}": str(out) for name in ("raw", "preprocessed", "results")}
    return said, environment | seen_alone(place)


def segment_by_nnunet(
    arguments: argparse.Namespace, model: Path, scans: Path, out: Path
) -> dict[str, Any]:
    """Segment a folder with nnU-Net's command."""
    if importlib.util.find_spec("nnunetv2") is None:
        return {"reason": "nnunetv2 is not installed"}
    before = list(IN_FLOAT32) if arguments.nnunet_precision == "float32" else []
    if arguments.threads is not None:
        before.append(SET_THREADS.format(threads=arguments.threads))
    said, environment = command_of_nnunet(
        model,
        scans,
        out,
        arguments.device,
        folds=arguments.folds,
        mirrored=arguments.mirrored,
        before=before,
    )
    environment |= without_tf32(arguments.nnunet_precision)
    runs = [
        run_watched(said, environment, arguments.threads) for _ in range(arguments.nnunet_repeats)
    ]
    return {"precision": arguments.nnunet_precision, **summary(runs)}


def segment_by_us(
    arguments: argparse.Namespace, precision: str, scans: Path, out: Path, kernels: Path
) -> dict[str, Any]:
    """Segment a folder with ``unet3d predict``; the first run compiles its kernels."""
    said = [sys.executable, "-m", "unet3d", "predict", scans, "--checkpoint", arguments.model]
    said += ["--folds", ",".join(map(str, arguments.folds)), "-o", out, "--overwrite"]
    said += ["--precision", precision, "--devices", arguments.device, "--no-postprocessing"]
    said += ["--tta" if arguments.mirrored else "--no-tta"]
    environment = {"TRITON_CACHE_DIR": str(kernels), **without_tf32(precision)}
    runs = [run_watched(said, environment, arguments.threads) for _ in range(arguments.repeats)]
    return {"precision": precision, **summary(runs)}


def without_tf32(precision: str) -> dict[str, str]:
    """Return environment variables for float32 without TF32."""
    return {"NVIDIA_TF32_OVERRIDE": "0"} if precision == "float32" else {}


def labels_of(folder: Path) -> dict[str, Path]:
    """Return the segmentations in a folder, by case name."""
    # Ours are named after the file of the first channel, nnU-Net's after the case.
    suffix = re.compile(r"(_0000)?(_seg)?\.nii\.gz$")
    return {suffix.sub("", file.name): file for file in folder.glob("*.nii.gz")}


def agreement(ours: Path, theirs: Path) -> dict[str, Any]:
    """Return the share of voxels that are equal in two folders, and each label's Dice."""
    found, reference = labels_of(ours), labels_of(theirs)
    names = sorted(set(found) & set(reference))
    num_equal = num_voxels = 0
    both, either = Counter[int](), Counter[int]()
    for name in names:
        a, b = (np.asanyarray(nib.load(one[name]).dataobj) for one in (found, reference))
        num_voxels += a.size
        num_equal += int((a == b).sum())
        both.update(voxels_of_labels(a[a == b]))
        either.update(voxels_of_labels(a))
        either.update(voxels_of_labels(b))
    return {
        "num_cases": len(names),
        "equal_voxels": num_equal / max(1, num_voxels),
        "different_voxels": num_voxels - num_equal,
        "dice": {str(label): 2 * both[label] / either[label] for label in sorted(either) if label},
    }


def voxels_of_labels(labels: NDArray[Any]) -> dict[int, int]:
    """Return how many voxels each label has."""
    return {label: int(n) for label, n in enumerate(np.bincount(labels.ravel())) if n}


def line_of(who: str, row: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "reason" in row:
        return f"{who:22} {row['reason']}"
    line = f"{who:22}{row['seconds']:8.1f}{row['first_seconds']:9.1f}"
    line += f"{row['host_bytes'] / GIB:8.2f}{row['gpu_bytes'] / GIB:8.2f}"
    line += f"{row['ratio']:8.3f}" if "ratio" in row else f"{'':8}"
    agreed = row.get("to_nnunet")
    if agreed is not None:
        dice = [f"{label}: {value:.5f}" for label, value in agreed["dice"].items()]
        line += f"{100 * agreed['equal_voxels']:10.4f}  {', '.join(dice)}"
    return line


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Segment with both programs, and compare their segmentations."""
    scans = arguments.scans
    if scans is None:
        scans = folder / "scans"
        scans.mkdir()
        write_scan(scans / "phantom_0000.nii.gz", arguments.shape, arguments.spacing)
    rows: dict[str, dict[str, Any]] = {}
    theirs = arguments.found
    if theirs is None:
        for resampler in arguments.resampler:
            model, out = arguments.model, folder / f"nnunet-{resampler}"
            if resampler == "torch":
                model = with_torch_resampler(model, folder / "with-torch")
            rows[f"nnU-Net, {resampler}"] = segment_by_nnunet(arguments, model, scans, out)
            theirs = theirs or out
    fastest = min((row["seconds"] for row in rows.values() if "seconds" in row), default=None)
    for precision in arguments.precision:
        out = folder / precision
        row = segment_by_us(arguments, precision, scans, out, folder / f"kernels-{precision}")
        if "seconds" in row and fastest is not None:
            row["ratio"] = row["seconds"] / fastest
        if theirs.is_dir() and "reason" not in row:
            row["to_nnunet"] = agreement(out, theirs)
        rows[f"unet3d, {precision}"] = row
    return rows


def main() -> None:
    """Measure, print a table, write the record."""
    arguments = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, Path(folder))
    heads = ("s", "first s", "host", "GPU GiB", "ratio")
    print(f"{'':22}" + "".join(f"{head:>8}" for head in heads) + "    equal %  Dice")
    for who, row in rows.items():
        print(line_of(who, row))
    write_record(
        arguments.json,
        devices_named((arguments.device,)),
        nnunet_compile=os.environ.get("nnUNet_compile", "its default"),
        threads=arguments.threads,
        mirrored=arguments.mirrored,
        shape=None if arguments.scans else arguments.shape,
        spacing_mm=None if arguments.scans else arguments.spacing,
        rows=rows,
    )


if __name__ == "__main__":
    main()
