"""Phantoms of a trunk in CT numbers, and a model of nnU-Net v2 that is trained on them.

    python benchmarks/nnunet_phantoms.py FOLDER [--cases 6] [--side 176] [--epochs 5] [--steps 150]
        [--device cuda:0] [--patch 32,32,32 --channels 8,16,32]

nnU-Net fingerprints, plans and prepares the phantoms itself, and its default trainer trains the
network of its plan, 3d_fullres, for a few short epochs; ``--patch`` and ``--channels`` make it a
smaller network, for a try. ``FOLDER/1.5`` is then the model, ``FOLDER/0.8`` the same weights with a
plan that says 0.8 mm, so that a scan of that spacing is not resampled. Every other phantom has its
organs as large, in voxels, as a scan of 0.8 mm has them. ``FOLDER/raw`` keeps the data set, for
other trainings. ``nnunet_models.py`` predicts with the models.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from common import parse_shape
from nnunet_fit import CONFIGURATION, DATASET, DATASET_ID, PLANS, TRAINER, Fit, prepare
from numpy.typing import NDArray

from unet3d.config import Shape
from unet3d.volumes.files import write_nifti

LABELS = {"background": 0, "liver": 1, "kidneys": 2, "vertebrae": 3, "aorta": 4}
SPACING_MM = 1.5
FINE_SPACING_MM = 0.8
PERIOD_MM = 320.0
"""After which the organs come again, upwards: a scan may be of any length."""

NOISE = 15.0
PLANES_AT_A_TIME = 8
NUM_VALIDATION_STEPS = 2
"""Of an epoch; its scores are not used."""

Planes = NDArray[Any]


def write_phantom(path: Path, shape: Shape, spacing_mm: float, seed: int = 0) -> Planes:
    """Write a scan in int16, and return its label map.

    Args:
        path: Where to.
        shape: Voxels along X, Y, Z.
        spacing_mm: Of the voxels, in the header and in the anatomy.
        seed: Of the anatomy and of the noise; 0: the trunk is in the middle.
    """
    image, label = phantom(shape, spacing_mm, seed)
    write_nifti(path, nib.Nifti1Image(image, np.diag([spacing_mm] * 3 + [1.0])))
    return label


def phantom(shape: Shape, spacing_mm: float, seed: int) -> tuple[Planes, Planes]:
    """Return CT numbers and labels, drawn some planes at a time."""
    random = np.random.default_rng(seed)
    size, place = 1 + 0.1 * random.uniform(-1, 1, 8), 8 * random.uniform(-1, 1, (8, 3))
    shift = random.uniform(-50, 50, 3) * (seed > 0)
    # nibabel writes the first axis fastest, so a plane is contiguous.
    image = np.empty(shape, np.int16, order="F")
    label = np.zeros(shape, np.uint8, order="F")
    noise_shape = (*shape[:2], PLANES_AT_A_TIME)
    noise = np.asfortranarray(random.normal(0, NOISE, noise_shape).astype(np.float32))
    x, y = (
        np.float32(spacing_mm) * (np.arange(count, dtype=np.float32) - count / 2) + shift[axis]
        for axis, count in enumerate(shape[:2])
    )
    for first in range(0, shape[2], PLANES_AT_A_TIME):
        planes = slice(first, min(first + PLANES_AT_A_TIME, shape[2]))
        z = spacing_mm * np.arange(planes.start, planes.stop, dtype=np.float32) + shift[2] + 60
        values = np.roll(noise, random.integers(0, 64, 2), (0, 1))[..., : z.size]
        image[..., planes], label[..., planes] = _drawn(
            x[:, None, None], y[:, None], z % np.float32(PERIOD_MM), values, size, place
        )
    return image, label


def _drawn(
    x: Planes, y: Planes, z: Planes, values: Planes, size: Planes, place: Planes
) -> tuple[Planes, Planes]:
    """Return a few planes of the trunk, from coordinates in mm and noise."""
    label = np.zeros(values.shape, np.uint8, order="F")
    values = values + np.where((x / 180) ** 2 + (y / 130) ** 2 < 1, 40, -1000).astype(np.float32)

    def organ(name: str, number: float, inside: Planes) -> None:
        inside = np.broadcast_to(inside, values.shape)
        values[inside] += number - np.float32(40) * (label[inside] == 0)
        label[inside] = LABELS[name]

    def ball(index: int, centre: tuple[float, ...], radii: tuple[float, ...]) -> Planes:
        radius = np.asarray(radii) * size[index]
        inside: Planes = sum(
            (((axis - middle - moved) / half) ** 2).astype(np.float32)
            for axis, middle, moved, half in zip(
                (x, y, z), centre, place[index], radius, strict=True
            )
        )
        return inside < 1

    def tube(index: int, middle: float | Planes, height: float, radius: float) -> Planes:
        dx, dy, _ = place[index]
        inside: Planes = (x - middle - dx) ** 2 + (y - height - dy) ** 2 < (
            radius * size[index]
        ) ** 2
        return inside

    kidneys = ball(1, (-75, 60, 110), (28, 28, 50)) | ball(2, (75, 60, 120), (28, 28, 50))
    organ("liver", 110, ball(0, (-80, -20, 190), (80, 70, 80)) & ~kidneys)
    organ("kidneys", 180, kidneys)
    organ("vertebrae", 400, tube(3, 0, 80, 18) & (z % np.float32(30) < 24))
    organ("aorta", 250, tube(4, 12 * np.sin(z / 25), 40, 11))
    return np.clip(np.rint(values), -1024, 3000).astype(np.int16), label


def write_cases(arguments: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], str]]:
    """Write the phantoms of the training, and return image and label map of each."""
    folder.mkdir(parents=True)
    side = arguments.side
    cases: dict[str, tuple[list[str], str]] = {}
    for seed in range(1, arguments.cases + 1):
        name = f"phantom_{seed:02}"
        image, label = folder / f"{name}_0000.nii.gz", folder / f"{name}.nii.gz"
        drawn_mm = SPACING_MM if seed % 2 else FINE_SPACING_MM
        affine = np.diag([SPACING_MM] * 3 + [1.0])
        for path, voxels in zip(
            (image, label), phantom((side, side, side), drawn_mm, seed), strict=True
        ):
            write_nifti(path, nib.Nifti1Image(voxels, affine))
        cases[name] = ([str(image)], str(label))
    return cases


def make_smaller(plan: dict[str, Any], patch: Shape, channels: tuple[int, ...]) -> None:
    """Change a configuration of a plan to another patch and network."""
    num_levels = len(channels)
    plan["patch_size"] = list(patch[::-1])
    plan["architecture"]["arch_kwargs"] |= {
        "n_stages": num_levels,
        "features_per_stage": list(channels),
        "kernel_sizes": [[3, 3, 3]] * num_levels,
        "strides": [[1, 1, 1], *[[2, 2, 2]] * (num_levels - 1)],
        "n_conv_per_stage": [2] * num_levels,
        "n_conv_per_stage_decoder": [2] * (num_levels - 1),
    }


def train(arguments: argparse.Namespace) -> Path:
    """Train nnU-Net on the prepared cases, and return the folder of its model."""
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as its command line does
        torch.set_num_threads(1)  # of each process that makes patches, too
    trainer = get_trainer_from_args(
        str(DATASET_ID), CONFIGURATION, 0, TRAINER, PLANS, device=device
    )
    trainer.num_epochs = arguments.epochs
    trainer.num_iterations_per_epoch = arguments.steps
    trainer.num_val_iterations_per_epoch = NUM_VALIDATION_STEPS
    trainer.run_training()
    return Path(trainer.output_folder).parent


def copy_model(model: Path, folder: Path, spacing_mm: float) -> None:
    """Copy what a prediction needs of a model, with another spacing in its plan."""
    for file in (model / "plans.json", model / "dataset.json"):
        (folder / "fold_0").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    spacing = [spacing_mm] * 3
    plans = json.loads((folder / "plans.json").read_text())
    content = torch.load(
        model / "fold_0" / "checkpoint_final.pth", map_location="cpu", weights_only=False
    )
    content["optimizer_state"] = {}  # half of the file
    for one in (plans, content["init_args"]["plans"]):
        one["original_median_spacing_after_transp"] = spacing
        one["configurations"][CONFIGURATION]["spacing"] = spacing
    (folder / "plans.json").write_text(json.dumps(plans, indent=1))
    torch.save(content, folder / "fold_0" / "checkpoint_final.pth")


def main() -> None:
    """Make the data set, train, and keep the two models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the models; it is made")
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--side", type=int, default=176, help="voxels of a case along each axis")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of an epoch")
    parser.add_argument("--patch", type=parse_shape, help="default: as nnU-Net plans it")
    parser.add_argument("--channels", help="default: as nnU-Net plans them")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # nnU-Net's trainer reads the rest
    folder = arguments.folder.absolute()
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(folder / name)
    # Compiling takes as long as the few steps.
    os.environ.setdefault("nnUNet_compile", "false")
    began = time.perf_counter()
    cases = write_cases(arguments, folder / "cases")
    request = Fit(
        cases=cases,
        channels=["CT"],
        labels=LABELS,
        validation=list(cases)[-1:],
        minutes=0,
        steps_per_epoch=arguments.steps,
        device=arguments.device,
        num_workers=min(len(cases), len(os.sched_getaffinity(0))),
        folders={},
    )
    prepare(request)
    shutil.rmtree(folder / "cases")  # the raw data set has them
    if arguments.patch is not None:
        file = folder / "preprocessed" / DATASET / f"{PLANS}.json"
        plans = json.loads(file.read_text())
        channels = tuple(int(number) for number in arguments.channels.split(","))
        make_smaller(plans["configurations"][CONFIGURATION], arguments.patch, channels)
        file.write_text(json.dumps(plans))
    prepared = time.perf_counter()
    model = train(arguments)
    for spacing_mm in (SPACING_MM, FINE_SPACING_MM):
        copy_model(model, folder / str(spacing_mm), spacing_mm)
    shutil.rmtree(folder / "preprocessed")
    print(
        f"{len(cases)} phantoms of {arguments.side}^3 voxels in {prepared - began:.0f} s, "
        f"{arguments.epochs} x {arguments.steps} steps in {time.perf_counter() - prepared:.0f} s"
    )


if __name__ == "__main__":
    main()
