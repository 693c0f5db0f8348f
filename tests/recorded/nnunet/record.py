"""Train small models with nnU-Net itself on phantoms, and record its segmentations of scans.

    python tests/recorded/nnunet/record.py --work /tmp/nnunet [isotropic] [thick_slices] [regions]

needs nnU-Net (``pip install nnunetv2``) and takes some minutes for each kind on a CPU. What is
recorded for each kind lies beside this file; README.md says what is there.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import phantoms
import torch
from phantoms import Array, Labels, Scan

logger = logging.getLogger("record")

HERE = Path(__file__).resolve().parent
CONFIGURATION = "3d_fullres"
CHECKPOINT = "checkpoint_final.pth"
MODEL_FILES = ("plans.json", "dataset.json", "dataset_fingerprint.json")
WINDOW_STEP = 5
"""Step along each axis between the voxels of a window whose logits are recorded."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model, its training data, and the scans that it segments."""

    name: str
    dataset_id: int
    draw: Callable[[Scan], tuple[list[Array], Labels]]
    """Makes the channels and labels of a scan."""
    training: Scan
    """The first training case; others have other seeds, and slightly other spacings."""
    scans: tuple[Scan, ...]
    """Scans to segment; the first one is also segmented with each fold alone."""
    description: dict[str, Any]
    """Entries of dataset.json besides the number of cases."""
    planner: str = "ExperimentPlanner"
    patch: tuple[int, int, int]
    """Patch size, in nnU-Net's order of axes, like all sizes below."""
    architecture: dict[str, Any]
    """Entries that replace the planned sizes of the network."""
    folds: tuple[int | str, ...] = (0,)
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    num_epochs: int = 8
    num_steps: int = 40
    """Steps of each epoch."""

    @property
    def dataset(self) -> str:
        """nnU-Net's name of the data set."""
        return f"Dataset{self.dataset_id}_{self.name}"


KINDS = (
    Kind(
        name="isotropic",
        dataset_id=991,
        draw=phantoms.isotropic,
        training=Scan("case", 100, (40, 38, 36), (1.25, 1.2, 1.3)),
        scans=(
            Scan("plain", 1, (44, 36, 40), (0.9, 1.4, 1.1)),
            Scan("turned", 2, (34, 40, 37), (1.4, 1.0, 1.2), axes="SLP", tilt_degrees=10),
            Scan("sheared", 3, (36, 36, 30), (1.1, 1.1, 1.5), shear=0.2),
            Scan("small", 4, (21, 17, 25), (1.25, 1.2, 1.3)),
            Scan("zeros", 5, (20, 21, 22), (1.3, 1.2, 1.1), is_empty=True),
        ),
        description={
            "channel_names": {"0": "MRI"},
            "labels": {"background": 0, "ball": 1, "cube": 2, "rod": 3},
            "overwrite_image_reader_writer": "NibabelIO",  # SimpleITK refuses sheared images
        },
        patch=(32, 32, 32),
        architecture={
            "n_stages": 3,
            "features_per_stage": [6, 8, 12],
            "kernel_sizes": [[3, 3, 3]] * 3,
            "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
            "n_conv_per_stage": [2, 2, 2],
            "n_conv_per_stage_decoder": [2, 2],
        },
        folds=(0, 1),
    ),
    Kind(
        name="thick_slices",
        dataset_id=992,
        draw=phantoms.thick_slices,
        training=Scan("case", 200, (14, 50, 46), (5.0, 1.2, 1.3)),
        scans=(
            Scan("plain", 1, (12, 56, 44), (6.0, 1.0, 1.35)),
            Scan("turned", 2, (17, 43, 49), (4.2, 1.35, 1.1), axes="IPR"),
            Scan("small", 10, (6, 33, 36), (5.0, 1.2, 1.3)),
            Scan("other_axis", 4, (44, 40, 16), (1.3, 1.25, 4.5)),
            Scan("zeros", 5, (9, 30, 31), (5.0, 1.1, 1.1), is_empty=True),
        ),
        description={
            "channel_names": {"0": "CT"},
            "labels": {"background": 0, "organ": 1, "vessel": 2},
            "overwrite_image_reader_writer": "SimpleITKIO",
        },
        patch=(8, 40, 32),
        architecture={
            "n_stages": 3,
            "features_per_stage": [6, 8, 12],
            "kernel_sizes": [[1, 3, 3], [1, 3, 3], [3, 3, 3]],
            "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
            "n_conv_per_stage": [2, 1, 3],
            "n_conv_per_stage_decoder": [2, 1],
        },
        mirror_axes=(0, 1),
        num_epochs=20,
    ),
    Kind(
        name="regions",
        dataset_id=993,
        draw=phantoms.regions,
        training=Scan("case", 300, (42, 40, 44), (1.5, 1.5, 1.5)),
        scans=(
            Scan("plain", 1, (42, 36, 48), (1.5, 1.7, 1.3)),
            Scan("turned", 2, (40, 44, 38), (1.4, 1.5, 1.6), axes="ARI"),
            Scan("small", 3, (30, 28, 26), (1.6, 1.6, 1.8)),
            Scan("zeros", 5, (18, 20, 19), (1.5, 1.6, 1.7), is_empty=True),
        ),
        description={
            "channel_names": {"0": "T1", "1": "T1ce", "2": "T2", "3": "FLAIR"},
            "labels": {"background": 0, "whole": [1, 2, 3], "core": [1, 3], "rim": 3},
            "regions_class_order": [2, 1, 3],
            "overwrite_image_reader_writer": "SimpleITKIO",
        },
        planner="nnUNetPlannerResEncM",
        patch=(24, 32, 28),
        architecture={
            "n_stages": 3,
            "features_per_stage": [4, 8, 12],
            "kernel_sizes": [[3, 3, 3]] * 3,
            "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
            "n_blocks_per_stage": [1, 2, 2],
            "n_conv_per_stage_decoder": [1, 1],
        },
        folds=("all",),
        mirror_axes=(0, 2),
    ),
)


def prepare(kind: Kind) -> str:
    """Write the cases, have nnU-Net plan and prepare them, and return the name of the plan."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as planning
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    raw = Path(os.environ["nnUNet_raw"]) / kind.dataset
    prepared = Path(os.environ["nnUNet_preprocessed"]) / kind.dataset
    os.environ["nnUNet_n_proc_DA"] = "1"
    names = []
    for number in range(8):
        spacing = tuple(mm * (1 + 0.04 * (number % 3 - 1)) for mm in kind.training.spacing_mm)
        seed = kind.training.seed + number
        scan = replace(kind.training, name=f"case_{number}", seed=seed, spacing_mm=spacing)
        channels, label = kind.draw(scan)
        phantoms.write(scan, channels, raw / "imagesTr")
        phantoms.write_label(scan, label, raw / "labelsTr")
        names.append(scan.name)
    description = {**kind.description, "numTraining": len(names), "file_ending": phantoms.SUFFIX}
    (raw / "dataset.json").write_text(json.dumps(description, indent=1))
    planning.extract_fingerprints([kind.dataset_id], num_processes=1)
    plans_name = planning.plan_experiments([kind.dataset_id], kind.planner)
    file = prepared / f"{plans_name}.json"
    plans = json.loads(file.read_text())
    plan = plans["configurations"][CONFIGURATION]
    plan["patch_size"] = list(kind.patch)
    plan["batch_size"] = 2
    plan["architecture"]["arch_kwargs"] |= kind.architecture
    file.write_text(json.dumps(plans, indent=1))
    configuration = PlansManager(str(file)).get_configuration(CONFIGURATION)
    configuration.preprocessor_class(verbose=False).run(
        kind.dataset_id, CONFIGURATION, plans_name, num_processes=1
    )
    splits = [
        {"train": [name for name in names if name != left_out], "val": [left_out]}
        for left_out in names[:2]
    ]
    (prepared / "splits_final.json").write_text(json.dumps(splits))
    return str(plans_name)


def train(kind: Kind, fold: int | str, plans_name: str) -> Path:
    """Train one fold with nnU-Net's trainer, and return the folder of the model."""
    from nnunetv2.run.run_training import get_trainer_from_args

    seed = kind.dataset_id + (fold if isinstance(fold, int) else 0)
    np.random.seed(seed)
    torch.manual_seed(seed)
    where = {"plans_identifier": plans_name, "device": torch.device("cpu")}
    trainer = get_trainer_from_args(str(kind.dataset_id), CONFIGURATION, fold, **where)
    trainer.num_epochs = kind.num_epochs
    trainer.num_iterations_per_epoch = kind.num_steps
    trainer.num_val_iterations_per_epoch = 2
    os.environ["nnUNet_n_proc_DA"] = "0"  # no further process; planning does not accept 0
    configure = trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size

    def with_own_axes() -> tuple[Any, ...]:
        *others, _ = configure()
        trainer.inference_allowed_mirroring_axes = kind.mirror_axes
        return *others, kind.mirror_axes

    trainer.configure_rotation_dummyDA_mirroring_and_inital_patch_size = with_own_axes
    trainer.run_training()
    return Path(trainer.output_folder_base)


def predictor_of(model: Path, folds: tuple[int | str, ...], mirrors: bool) -> Any:
    """Return nnU-Net's predictor, set up like its command line."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=mirrors, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), folds, CHECKPOINT)
    return predictor


def segment(kind: Kind, model: Path, scans: tuple[Scan, ...], output: Path, **how: Any) -> None:
    """Have nnU-Net segment scans, and record the segmentations."""
    output.mkdir(parents=True, exist_ok=True)
    files = [
        [str(path) for path in sorted((HERE / kind.name / "scans").glob(f"{scan.name}_0*"))]
        for scan in scans
    ]
    predictor_of(model, **how).predict_from_files_sequential(
        files, [str(output / scan.name) for scan in scans]
    )
    for path in output.iterdir():
        if not path.name.endswith(phantoms.SUFFIX):
            path.unlink()


def record_arrays(kind: Kind, model: Path, output: Path) -> None:
    """Record an image as nnU-Net prepares it, and its network's logits in float64."""
    predictor = predictor_of(model, kind.folds[:1], False)
    preprocessor = predictor.configuration_manager.preprocessor_class(verbose=False)
    files = sorted((HERE / kind.name / "scans").glob("turned_0*"))
    given = (predictor.plans_manager, predictor.configuration_manager, predictor.dataset_json)
    image, _, properties = preprocessor.run_case([str(path) for path in files], None, *given)
    box = np.array(properties["bbox_used_for_cropping"], np.int64)
    window = np.random.RandomState(0).standard_normal((1, len(files), *kind.patch))
    with torch.inference_mode():
        logits = predictor.network.double().eval()(torch.from_numpy(window))[0].numpy()
    every = slice(None, None, WINDOW_STEP)
    np.savez_compressed(
        output / "arrays.npz",
        image=image[..., ::2, ::2, ::2].astype(np.float32),
        shape=np.array(image.shape),
        box=box,
        logits=logits[:, every, every, every],
    )


def record(kind: Kind) -> None:
    """Train a model, segment its scans, and record everything."""
    folder = HERE / kind.name
    if folder.exists():
        shutil.rmtree(folder)
    for scan in kind.scans:
        channels, _ = kind.draw(scan)
        phantoms.write(scan, channels, folder / "scans")
    plans_name = prepare(kind)
    trained = [train(kind, fold, plans_name) for fold in kind.folds][0]
    model = folder / trained.name
    for fold in kind.folds:
        (model / f"fold_{fold}").mkdir(parents=True)
        shutil.copy(trained / f"fold_{fold}" / CHECKPOINT, model / f"fold_{fold}")
    for name in MODEL_FILES:
        shutil.copy(trained / name, model)
    for mirrors in (False, True):
        output = folder / "segmentations" / ("mirrored" if mirrors else "plain")
        segment(kind, model, kind.scans, output, folds=kind.folds, mirrors=mirrors)
    if len(kind.folds) > 1:
        for fold in kind.folds:
            output = folder / "segmentations" / f"fold_{fold}"
            segment(kind, model, kind.scans[:1], output, folds=(fold,), mirrors=False)
    record_arrays(kind, model, folder)
    packages = ("nnunetv2", "numpy", "torch", "dynamic_network_architectures")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["python"] = platform.python_version()
    (folder / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    check(kind)


def check(kind: Kind) -> None:
    """Check that the model has learnt: each scan's segmentation has every label."""
    for scan in kind.scans:
        values = np.unique(kind.draw(scan)[1])
        for path in sorted((HERE / kind.name / "segmentations").glob(f"*/{scan.name}.nii.gz")):
            found = np.asarray(nib.load(path).dataobj)
            counts = {int(value): np.count_nonzero(found == value) for value in values}
            logger.info("%s %s: %s voxels", path.parent.name, scan.name, counts)
            if not scan.is_empty and min(counts.values()) < 20:
                raise SystemExit(f"{path} lacks a label: train longer, or take another seed")


def main() -> None:
    """Record the named kinds, or all."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for nnU-Net's own files")
    parser.add_argument("kinds", nargs="*", help="default: all")
    options = parser.parse_args()
    for name in ("raw", "preprocessed", "results"):
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{name}"] = str(folder)
    os.environ["nnUNet_compile"] = "f"
    torch.set_num_threads(1)  # so small a network is no faster with more
    for kind in KINDS:
        if not options.kinds or kind.name in options.kinds:
            record(kind)


if __name__ == "__main__":
    main()
