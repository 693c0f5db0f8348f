"""What each part of the default recipe brings: trainings with and without it, several seeds.

    python benchmarks/recipe.py DATASET [--variants NAME,NAME] [--seeds 0,1,2] [--at-once 2]
        [--set KEY=VALUE ...] [--json FILE]

DATASET may be ``phantom``, the built-in phantom heads, whose lesions are small. Each training is
``unet3d train`` with the settings of the command line and of its variant, in a process of its own;
the Dice are those of the final network on the validation cases. What no setting switches off is
replaced in the process: see :data:`REPLACED`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import tuning_key

from unet3d.cli.app import main as unet3d
from unet3d.volumes.cache import PreparedCase
from unet3d.volumes.foreground import Foreground
from unet3d.volumes.patches import PatchSampler

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "cases in turn": (),
    "voxels of a class": (),
    "no foreground": ("patches.foreground_fraction=0",),
    "no deep supervision": ("model.deep_supervision=false",),
    "no mirroring": ("patches.augmentation.mirror_axes=[]",),
    "batch Dice": ("training.batch_dice=true",),
    "Dice of each sample": ("training.batch_dice=false",),
    "slices turned 30 degrees": ("patches.augmentation.in_plane_rotation_degrees=30",),
    "anisotropic kernels": ("model.kernels=anisotropic",),
    "no cropping": ("data.crop_to_nonzero=false",),
    "weight decay 3e-5": ("training.weight_decay=3e-5",),
}
"""Of each variant, what it sets beside the settings of all."""


def cases_in_turn(sampler: PatchSampler, rng: np.random.Generator) -> PreparedCase:
    """Return the next case of a shuffled list, without replacement, in place of a drawn one."""
    order: list[int] = vars(sampler).setdefault("_order", [])
    if not order:
        shuffled = np.random.default_rng(int(rng.integers(2**32))).permutation(len(sampler.cases))
        order += shuffled.tolist()
    return sampler.cases[order.pop()]


def voxel_of_a_class(foreground: Foreground, rng: np.random.Generator) -> int | None:
    """Return a voxel that is drawn evenly from those of a class, not of a component."""
    present = [index for index, number in enumerate(foreground.num_components) if number]
    if not present:
        return None
    voxels = np.concatenate(foreground.components(present[rng.integers(len(present))]))
    return int(voxels[rng.integers(len(voxels))])


REPLACED: Mapping[str, tuple[type, str, Callable[..., Any]]] = {
    "cases in turn": (PatchSampler, "_drawn_case", cases_in_turn),
    "voxels of a class": (Foreground, "draw", voxel_of_a_class),
}
"""Class, method and what takes its place; only where this process cuts the patches."""


def train(variant: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the summary of one training."""
    changes = [*arguments.changes, *VARIANTS[variant], "data.num_workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        words = ["train", *([] if arguments.dataset == "phantom" else [arguments.dataset])]
        words += ["--quiet", "--seed", str(seed), "--output", str(output)]
        words += [word for change in changes for word in ("--set", change)]
        subprocess.run(
            [sys.executable, __file__, "--as", variant, *words],
            env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads)},
            stdout=sys.stderr.fileno(),
            check=True,
        )
        summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    kept = ("last_mean_dice", "last_dice", "best_dice", "epochs", "training_seconds")
    row = {"variant": variant, "seed": seed, **{name: summary[name] for name in kept}}
    print(f"{variant}, seed {seed}: {row['last_mean_dice']:.4f}", file=sys.stderr)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: mean Dice of each variant, its spread, and that of each label."""
    labels = list(rows[0]["last_dice"])
    lines = ["| variant | mean Dice | spread | " + " | ".join(labels) + " |"]
    lines.append("|---|" + "---:|" * (2 + len(labels)))
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        dice = [row["last_mean_dice"] for row in own]
        means = [statistics.mean(row["last_dice"][label] for row in own) for label in labels]
        spread = f"{min(dice):.4f} to {max(dice):.4f}"
        cells = [variant, f"{statistics.mean(dice):.4f}", spread, *(f"{m:.4f}" for m in means)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the trainings and print the table."""
    if sys.argv[1:2] == ["--as"]:
        if sys.argv[2] in REPLACED:
            setattr(*REPLACED[sys.argv[2]])
        unet3d(sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--at-once", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of each training")
    parser.add_argument("--set", dest="changes", action="append", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs = [
        (variant, int(seed))
        for seed in arguments.seeds.split(",")
        for variant in arguments.variants.split(",")
    ]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = list(pool.map(lambda run: train(run[0], run[1], arguments), runs))
    print(table(rows))
    if arguments.json is not None:
        record = {**tuning_key([], "as unet3d train takes it"), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
