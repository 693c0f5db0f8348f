"""nnU-Net's own trainer on a data set of ours, in a process of its own.

    python benchmarks/nnunet_peer.py REQUEST.json RESULT.json

``training.py`` calls it so. The scans are given to nnU-Net as raw data, which it fingerprints,
plans and prepares itself; its plan is kept but for the size of patches and batches, and for the
network, which is the one that we train. Then its trainer runs as its command line would run it:
its data loaders with its default augmentation in as many processes as it is told
(``nnUNet_n_proc_DA``), beside them half as many for validation, which fill their queue and then
sleep; float16 with a gradient scaler, ``cudnn.benchmark``, the network and the Dice loss compiled
on a GPU. The trainer is ``nnUNetTrainerNoDeepSupervision``, because the network that we train
beside it has no deep supervision either.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from common import peaks_of, reason_of, synchronize

from unet3d.config import Shape
from unet3d.distributed.processes import die_with_parent
from unet3d.planning.experiment import Experiment, open_dataset

TRAINER = "nnUNetTrainerNoDeepSupervision"
CONFIGURATION = "3d_fullres"
PLANS = "nnUNetPlans"
DATASET_ID = 731
PREPARED = "prepared.json"
"""Is written last into the folder of nnU-Net's data."""

AUGMENTATION = "nnU-Net's"
NUM_WARM_UP_STEPS = 8
MAX_SECONDS = 20.0
"""Of the steps that are timed, where the processes are too few: two need 0.2 s for a step."""
LIMIT_SECONDS = 300
"""Of one request."""
MIN_STEPS = 10
"""However long they take."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What nnU-Net is asked to do."""

    task: Literal["prepare", "train", "patches"]
    """Prepare the data; train; or make patches with one core, without a network."""
    folder: str
    """Where its data and results go."""
    cases: dict[str, tuple[str, str]]
    """Image and label map of each case."""
    labels: dict[str, int]
    """Value of each class."""
    validation: tuple[str, ...]
    """The cases that are not trained on."""
    size: Shape
    """Voxels of a patch along X, Y, Z."""
    batch_size: int
    """Patches in a step."""
    channels: tuple[int, ...]
    """Of each level of the network."""
    strides: tuple[Shape, ...]
    """Of each level along X, Y, Z."""
    device: str
    """Where the network is."""
    num_workers: int
    """Processes that prepare cases, or make patches."""
    num_steps: int
    """That are timed."""

    @property
    def dataset(self) -> str:
        """Name of the data set, as nnU-Net wants it."""
        return f"Dataset{DATASET_ID}_Phantom"

    @property
    def raw(self) -> Path:
        """Folder of the data set as nnU-Net reads it."""
        return Path(self.folder) / "raw" / self.dataset


def make_request(
    experiment: Experiment,
    task: Literal["prepare", "train", "patches"],
    cache: Path,
    num_workers: int,
    num_steps: int,
) -> Request:
    """Return what makes nnU-Net train on what an experiment trains on.

    Args:
        experiment: Cases, network, patches and batches.
        task: What it shall do.
        cache: The folder in which its data get one of their own.
        num_workers: Processes that make patches.
        num_steps: That are timed.
    """
    config, dataset = experiment.config, open_dataset(experiment.config)
    (device,) = config.parallel.devices or ("cpu",)
    return Request(
        task=task,
        folder=str(cache.absolute() / f"nnunet-{dataset.root.name}"),
        cases={case.name: (str(case.images[0]), str(case.label)) for case in dataset.cases},
        labels=dict(zip(dataset.label_names, dataset.label_values, strict=True)),
        validation=tuple(case.name for case in experiment.validation),
        size=experiment.largest_patch(config.training.num_patches),
        batch_size=config.training.num_patches,
        channels=experiment.topology.channels,
        strides=experiment.topology.strides,
        device=device,
        num_workers=num_workers,
        num_steps=num_steps,
    )


def ask(request: Request) -> dict[str, Any]:
    """Have a process do what is requested.

    Returns:
        What it measured, or a ``reason`` why it did not.
    """
    if importlib.util.find_spec("nnunetv2") is None:
        return {"reason": "nnunetv2 is not installed"}
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(asdict(request)))
    answer.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "nnUNet_raw": str(folder / "raw"),
        "nnUNet_preprocessed": str(folder / "preprocessed"),
        "nnUNet_results": str(folder / "results"),
        "nnUNet_n_proc_DA": str(request.num_workers),
    }
    process = subprocess.Popen(
        [sys.executable, __file__, str(asked), str(answer)],
        env=environment,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    )
    try:
        status = process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"reason": f"nnU-Net did not end within {LIMIT_SECONDS} s"}
    finally:  # with the processes that it may have left
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not answer.exists():
        return {"reason": f"nnU-Net's process ended with {status}"}
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def prepare(request: Request) -> dict[str, Any]:
    """Write the scans as nnU-Net's raw data, and have it plan and prepare them."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as planning
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    base = Path(os.environ["nnUNet_preprocessed"]) / request.dataset
    if (base / PREPARED).exists():
        return {}
    for name in ("imagesTr", "labelsTr"):
        (request.raw / name).mkdir(parents=True, exist_ok=True)
    for name, (image, label) in request.cases.items():
        shutil.copyfile(image, request.raw / "imagesTr" / f"{name}_0000.nii.gz")
        shutil.copyfile(label, request.raw / "labelsTr" / f"{name}.nii.gz")
    description = {
        "channel_names": {"0": "MRI"},  # normalised by z-score
        "labels": request.labels,
        "numTraining": len(request.cases),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "NibabelIO",
    }
    (request.raw / "dataset.json").write_text(json.dumps(description))
    began = time.perf_counter()
    planning.extract_fingerprints([DATASET_ID], num_processes=request.num_workers)
    planning.plan_experiments([DATASET_ID])
    configuration = PlansManager(str(base / f"{PLANS}.json")).get_configuration(CONFIGURATION)
    configuration.preprocessor_class(verbose=False).run(
        DATASET_ID, CONFIGURATION, PLANS, num_processes=request.num_workers
    )
    training = [name for name in request.cases if name not in request.validation]
    folds = [{"train": training, "val": list(request.validation)}]
    (base / "splits_final.json").write_text(json.dumps(folds))
    done = {"prepare_seconds": time.perf_counter() - began}
    (base / PREPARED).write_text(json.dumps(done))
    return done


def make_trainer(request: Request) -> Any:
    """Return nnU-Net's trainer for its plan with our patch, batch and channels."""
    from nnunetv2.run.run_training import get_trainer_from_args

    name = "training.json"  # a plan for this request
    base = Path(os.environ["nnUNet_preprocessed"]) / request.dataset
    plans = json.loads((base / f"{PLANS}.json").read_text())
    plan = plans["configurations"][CONFIGURATION]
    # nnU-Net's arrays are Z, Y, X, with what its plan does to them on top.
    axes = [2 - axis for axis in plans["transpose_forward"]]
    plan["patch_size"] = [request.size[axis] for axis in axes]
    plan["batch_size"] = request.batch_size
    num_levels = len(request.channels)
    plan["architecture"]["arch_kwargs"] |= {
        "n_stages": num_levels,
        "features_per_stage": list(request.channels),
        "kernel_sizes": [[3, 3, 3]] * num_levels,
        "strides": [[stride[axis] for axis in axes] for stride in request.strides],
        "n_conv_per_stage": [2] * num_levels,
        "n_conv_per_stage_decoder": [2] * (num_levels - 1),
    }
    (base / name).write_text(json.dumps(plans))
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as its command line does
    return get_trainer_from_args(
        str(DATASET_ID), CONFIGURATION, 0, TRAINER, Path(name).stem, device=device
    )


def train(request: Request) -> dict[str, Any]:
    """Time steps on loaded batches, between two turns of steps on one that is there."""
    trainer = make_trainer(request)
    trainer.on_train_start()
    trainer.on_train_epoch_start()
    batches = trainer.dataloader_train
    there = dict(next(batches))
    there["data"] = there["data"].to(trainer.device)
    there["target"] = there["target"].to(trainer.device)
    for _ in range(NUM_WARM_UP_STEPS):
        trainer.train_step(there)
    alone = [_seconds_alone(trainer, there, request.num_steps)]
    # The queues are full now and can be empty in training, so a few of their batches go first.
    num_queued = request.num_workers + 2 * max(6, request.num_workers // 2)
    _seconds_loaded(trainer, batches, 2 * num_queued)
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loaded, waited = _seconds_loaded(trainer, batches, request.num_steps)
    row = peaks_of(trainer.device)
    alone.append(_seconds_alone(trainer, there, request.num_steps))
    if request.num_workers:
        batches._finish()
        trainer.dataloader_val._finish()
    return {
        **row,
        "augmentation": AUGMENTATION,
        "trainer": TRAINER,
        "is_compiled": trainer._do_i_compile(),
        "samples_per_second": request.batch_size / loaded,
        "alone_samples_per_second": request.batch_size * len(alone) / sum(alone),
        "ratio": sum(alone) / len(alone) / loaded,
        "waiting_share": waited,
        "all_alone_seconds": alone,
        "all_seconds": [loaded],
    }


def patches(request: Request) -> dict[str, Any]:
    """Time the patches that one core makes, augmented and only cut."""
    torch.set_num_threads(1)
    trainer = make_trainer(request)
    trainer._set_batch_size_and_oversample()
    batches, _ = trainer.get_dataloaders()
    augmented = _seconds_of_patches(batches, request)
    # What it cuts is larger than a patch, for rotations that may come; so it is where none does.
    batches.data_loader.transforms = None
    prepared = Path(trainer.preprocessed_dataset_folder)
    return {
        "augmentation": AUGMENTATION,
        "prepared_bytes": sum(path.stat().st_size for path in prepared.iterdir()),
        "cut_seconds": _seconds_of_patches(batches, request),
        "augmented_seconds": augmented,
    }


def _seconds_of_patches(batches: Any, request: Request) -> float:
    next(batches)
    began = time.perf_counter()
    for _ in range(request.num_steps):
        next(batches)
    return (time.perf_counter() - began) / request.num_steps / request.batch_size


def _seconds_alone(trainer: Any, there: Any, num_steps: int) -> float:
    """Return the mean time of a step on a batch that is there."""
    synchronize()
    began = time.perf_counter()
    for done in range(1, num_steps + 1):
        trainer.train_step(there)
        if done >= MIN_STEPS and time.perf_counter() - began > MAX_SECONDS:
            break
    synchronize()
    return (time.perf_counter() - began) / done


def _seconds_loaded(trainer: Any, batches: Any, num_steps: int) -> tuple[float, float]:
    """Return the mean time of a step on loaded batches, and the share of it that went in waiting.

    A step of nnU-Net's ends when the device has finished it, so the device has nothing to do while
    a batch is waited for.
    """
    waited = 0.0
    synchronize()
    began = time.perf_counter()
    for done in range(1, num_steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        trainer.train_step(batch)
        if done >= MIN_STEPS and time.perf_counter() - began > MAX_SECONDS:
            break
    synchronize()
    seconds = time.perf_counter() - began
    return seconds / done, waited / seconds


def main() -> None:
    """Answer one request."""
    die_with_parent()
    asked, answer = map(Path, sys.argv[1:])
    sys.argv = sys.argv[:1]  # nnU-Net's trainer reads the rest
    tree = json.loads(asked.read_text())
    request = Request(**tree | {name: tuple(tree[name]) for name in ("size", "channels")})
    tasks = {"prepare": prepare, "train": train, "patches": patches}
    try:
        result = tasks[request.task](request)
    except Exception as error:  # a peer, or a compiler, can raise anything
        result = {"reason": reason_of(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
