"""nnU-Net's own planner and trainer on a data set of ours, in a separate process.

``training.py`` and ``quality.py`` start it with a request. The scans are given to nnU-Net as raw
data, which it fingerprints, plans and prepares itself. Then its trainer runs as from its command
line: data loaders with the default augmentation in ``nnUNet_n_proc_DA`` processes, float16 with a
gradient scaler, ``cudnn.benchmark``, and on a GPU a compiled network and Dice loss.

* ``steps`` times nnU-Net's training steps. Patch size, batch size and network are ours; everything
  else is from nnU-Net's plan. The trainer is ``nnUNetTrainerNoDeepSupervision``, because our
  network is also timed without deep supervision.
* ``fit`` trains with nnU-Net's own choices, for a number of epochs.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import forget_peaks, peaks, reason_of, seen_alone, synchronize, timed

from unet3d.config import Shape
from unet3d.datasets.dataset import Case, Dataset
from unet3d.distributed.processes import die_with_parent

CONFIGURATION = "3d_fullres"
PLANS = "nnUNetPlans"
OWN_PLAN = "OwnPatch"
"""Name of a plan of nnU-Net with our patch, batch and network."""
DATASET_ID = 731
DATASET = f"Dataset{DATASET_ID}_Benchmark"
PREPARED = "prepared.json"
"""File in nnU-Net's folder of prepared data that is written when the data are complete."""

NUM_WARM_UP_STEPS = 8
MAX_SECONDS = 20.0
"""Time limit of timed steps, which are slow with few loading processes: 0.2 s each with two."""
MIN_STEPS = 10
"""Fewest steps that are timed, even if they take longer than :data:`MAX_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of nnU-Net's trainer with our network, patch and batch."""

    size: Shape
    """Voxels of a patch along X, Y, Z."""
    batch_size: int
    """Patches in a step."""
    channels: tuple[int, ...]
    """Channels of each level of the network."""
    strides: tuple[Shape, ...]
    """Strides of each level along X, Y, Z."""
    num_steps: int
    """Steps on loaded batches that are timed."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A training run with nnU-Net's own choices."""

    num_epochs: int
    """Epochs of training; nnU-Net's default is 1000."""
    steps_per_epoch: int
    """Steps of an epoch; nnU-Net's default is 250."""
    seconds: float | None = None
    """Time of training, from which fewer epochs follow after the second one; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A task for nnU-Net and its data."""

    cases: Mapping[str, tuple[Sequence[str], str]]
    """Images and label map of each case."""
    channels: Sequence[str]
    """Names of the channels, from which nnU-Net chooses the normalisation."""
    labels: Mapping[str, int]
    """Value of each class."""
    validation: Sequence[str]
    """The cases that are not trained on; none: all cases train, nnU-Net's fold ``all``."""
    device: str
    """Device of the network."""
    num_workers: int
    """Processes that make patches; also processes that prepare cases."""
    raw: str | None = None
    """A data set in nnU-Net's layout, which is read as it is; None: the cases are copied."""
    steps: Steps | None = None
    """The steps to time; None: ``fit`` is requested."""
    fit: Fit | None = None
    """The training run to do; None: ``steps`` is requested."""


def request_of(
    dataset: Dataset, validation: Sequence[Case], device: str, num_workers: int, **task: Any
) -> Request:
    """Return a request to train on a data set of ours."""
    return Request(
        cases={case.name: (list(map(str, case.images)), str(case.label)) for case in dataset.cases},
        channels=list(dataset.channel_names),
        labels=dict(zip(dataset.label_names, dataset.label_values, strict=True)),
        validation=[case.name for case in validation],
        device=device,
        num_workers=num_workers,
        **task,
    )


def ask(request: Request, folder: Path, seconds: float | None = None) -> dict[str, Any]:
    """Run a request in a separate process.

    Args:
        request: The task and its data.
        folder: Where nnU-Net's data and results are kept.
        seconds: Time limit, after which the process is ended.

    Returns:
        Its measurements, or a ``reason`` why there are none.
    """
    if importlib.util.find_spec("nnunetv2") is None:
        return {"reason": "nnunetv2 is not installed"}
    folder.mkdir(parents=True, exist_ok=True)
    asked, answer = folder / "request.json", folder / "answer.json"
    asked.write_text(json.dumps(asdict(request)))
    answer.unlink(missing_ok=True)
    names = ("raw", "preprocessed", "results")
    environment = {f"nnUNet_{name}": str(folder.absolute() / name) for name in names}
    environment |= seen_alone(torch.device(request.device))
    environment["nnUNet_n_proc_DA"] = str(max(1, request.num_workers))  # the planner needs one
    process = subprocess.Popen(
        [sys.executable, __file__, str(asked), str(answer)],
        env={**os.environ, **environment},
        stdout=sys.stderr.fileno(),
        start_new_session=True,
    )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return {"reason": f"nnU-Net did not end within {seconds:.0f} s"}
    finally:  # end it, with processes that it may have left behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not answer.exists():
        return {"reason": f"nnU-Net's process ended with {status}"}
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def prepare(request: Request) -> float:
    """Write the scans as nnU-Net's raw data, and have it plan and prepare them, once.

    Returns:
        The seconds that it took.
    """
    from nnunetv2.experiment_planning import plan_and_preprocess_api as planning

    base = Path(os.environ["nnUNet_preprocessed"]) / DATASET
    if (base / PREPARED).exists():
        return float(json.loads((base / PREPARED).read_text()))
    raw = Path(os.environ["nnUNet_raw"]) / DATASET
    if request.raw is None:
        copy_cases(request, raw)
    elif not raw.exists():
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.symlink_to(Path(request.raw).absolute())
    began = time.perf_counter()
    num_processes = max(1, request.num_workers)
    planning.extract_fingerprints([DATASET_ID], num_processes=num_processes)
    planning.plan_experiments([DATASET_ID])
    planning.preprocess([DATASET_ID], configurations=[CONFIGURATION], num_processes=[num_processes])
    training = [name for name in request.cases if name not in request.validation]
    folds = [{"train": training, "val": list(request.validation)}]
    (base / "splits_final.json").write_text(json.dumps(folds))
    seconds = time.perf_counter() - began
    (base / PREPARED).write_text(json.dumps(seconds))
    return seconds


def copy_cases(request: Request, raw: Path) -> None:
    """Write the scans as nnU-Net's raw data."""
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True, exist_ok=True)
    for name, (images, label) in request.cases.items():
        for channel, image in enumerate(images):
            shutil.copyfile(image, raw / "imagesTr" / f"{name}_{channel:04}.nii.gz")
        shutil.copyfile(label, raw / "labelsTr" / f"{name}.nii.gz")
    description = {
        "channel_names": dict(enumerate(request.channels)),
        "labels": request.labels,
        "numTraining": len(request.cases),
        "file_ending": ".nii.gz",
        "overwrite_image_reader_writer": "NibabelIO",
    }
    (raw / "dataset.json").write_text(json.dumps(description))


def make_trainer(request: Request, name: str = "nnUNetTrainer", plans: str = PLANS) -> Any:
    """Return a trainer of nnU-Net, set up as its command line does."""
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device(torch.device(request.device).type)  # ``ask`` shows it only one GPU
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    fold = 0 if request.validation else "all"
    return get_trainer_from_args(str(DATASET_ID), CONFIGURATION, fold, name, plans, device=device)


# Steps of our network


def write_own_plan(asked: Steps) -> None:
    """Write nnU-Net's plan with our patch, batch and network."""
    base = Path(os.environ["nnUNet_preprocessed"]) / DATASET
    plans = json.loads((base / f"{PLANS}.json").read_text())
    plan = plans["configurations"][CONFIGURATION]
    # nnU-Net's arrays have the axes Z, Y, X, which its plan may reorder.
    axes = [2 - axis for axis in plans["transpose_forward"]]
    plan["patch_size"] = [asked.size[axis] for axis in axes]
    plan["batch_size"] = asked.batch_size
    num_levels = len(asked.channels)
    plan["architecture"]["arch_kwargs"] |= {
        "n_stages": num_levels,
        "features_per_stage": list(asked.channels),
        "kernel_sizes": [[3, 3, 3]] * num_levels,
        "strides": [[stride[axis] for axis in axes] for stride in asked.strides],
        "n_conv_per_stage": [2] * num_levels,
        "n_conv_per_stage_decoder": [2] * (num_levels - 1),
    }
    (base / f"{OWN_PLAN}.json").write_text(json.dumps(plans))


def time_steps(request: Request, asked: Steps) -> dict[str, Any]:
    """Time steps on loaded batches; before and after, time steps on one batch on the device."""
    prepare(request)
    write_own_plan(asked)
    os.environ["nnUNet_n_proc_DA"] = str(request.num_workers)
    trainer = make_trainer(request, "nnUNetTrainerNoDeepSupervision", OWN_PLAN)
    trainer.on_train_start()
    trainer.on_train_epoch_start()
    batches = trainer.dataloader_train
    there = dict(next(batches))
    there["data"] = there["data"].to(trainer.device)
    there["target"] = there["target"].to(trainer.device)
    timed(lambda: trainer.train_step(there), NUM_WARM_UP_STEPS)
    (once,) = timed(lambda: trainer.train_step(there))
    num_alone = max(MIN_STEPS, min(asked.num_steps, int(MAX_SECONDS / once)))
    alone = timed(lambda: trainer.train_step(there), num_alone)
    # The queues are full now, unlike in training: use up their batches before steps are timed.
    num_queued = request.num_workers + 2 * max(6, request.num_workers // 2)
    _loaded(trainer, batches, 2 * num_queued)
    forget_peaks()
    loaded, waited = _loaded(trainer, batches, asked.num_steps)
    row: dict[str, Any] = dict(peaks())
    alone += timed(lambda: trainer.train_step(there), num_alone)
    if request.num_workers:
        batches._finish()
        trainer.dataloader_val._finish()
    alone_seconds = sum(alone) / len(alone)
    return row | {
        "is_compiled": trainer._do_i_compile(),
        "samples_per_second": asked.batch_size / loaded,
        "alone_samples_per_second": asked.batch_size / alone_seconds,
        "ratio": alone_seconds / loaded,
        "waiting_share": waited,
        "all_seconds": [loaded],
        "all_alone_seconds": alone,
    }


def _loaded(trainer: Any, batches: Any, num_steps: int) -> tuple[float, float]:
    """Return the mean time of a step on loaded batches, and the share spent waiting.

    nnU-Net's step waits until the device has finished it, so the device is idle while the next
    batch is awaited.
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


# A training with its own choices


def fit(request: Request, asked: Fit) -> dict[str, Any]:
    """Prepare the data, and train for the epochs."""
    prepare_seconds = prepare(request)
    began = time.perf_counter()
    trainer, seconds = train(request, asked)
    return {
        "prepare_seconds": prepare_seconds,
        "train_seconds": time.perf_counter() - began,
        "epoch_seconds": seconds,
        "num_epochs": len(seconds),
        "patch": trainer.configuration_manager.patch_size[::-1],
        "batch_size": trainer.configuration_manager.batch_size,
        "model": str(Path(trainer.output_folder).parent),
    }


class _Finished(Exception):
    """Ends nnU-Net's loop over epochs, whose number is fixed when it begins."""


def train(request: Request, asked: Fit) -> tuple[Any, list[float]]:
    """Return a finished trainer, and the seconds of each epoch."""
    trainer = make_trainer(request)
    trainer.num_epochs = num_epochs = asked.num_epochs
    trainer.num_iterations_per_epoch = asked.steps_per_epoch
    seconds: list[float] = []
    end_epoch, began = trainer.on_epoch_end, time.perf_counter()

    def timed_end() -> None:
        nonlocal num_epochs
        end_epoch()
        seconds.append(time.perf_counter() - began - sum(seconds))
        if asked.seconds is not None and len(seconds) == 2:
            left = asked.seconds - sum(seconds)
            num_epochs = min(num_epochs, 2 + max(0, int(left / seconds[-1])))
            trainer.lr_scheduler.max_steps = num_epochs  # so that the learning rate ends at 0
        if len(seconds) == num_epochs:
            raise _Finished

    trainer.on_epoch_end = timed_end
    with suppress(_Finished):
        trainer.run_training()
    trainer.on_train_end()
    return trainer, seconds


def main() -> None:
    """Answer one request; what nnU-Net prints goes to stderr."""
    die_with_parent()
    asked, answer = map(Path, sys.argv[1:])
    sys.argv = sys.argv[:1]  # nnU-Net's trainer reads the rest
    tree = json.loads(asked.read_text())
    steps, whole = tree.pop("steps"), tree.pop("fit")
    request = Request(**tree)
    try:
        with redirect_stdout(sys.stderr):
            result = time_steps(request, Steps(**steps)) if steps else fit(request, Fit(**whole))
    except Exception as error:  # a peer, or a compiler, can raise anything
        result = {"reason": reason_of(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
