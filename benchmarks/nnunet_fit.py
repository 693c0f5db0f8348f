"""nnU-Net with its own plan on a data set of ours: a training of some minutes, and predictions.

    python benchmarks/nnunet_fit.py REQUEST.json RESULT.json

``quality.py`` calls it so. The scans are given to nnU-Net as raw data, which it fingerprints, plans
and prepares itself; patch, batch, network, augmentation and trainer are its own. Only the number of
epochs follows from the minutes: the first ones are timed in a training that is thrown away, as
nnU-Net's schedule of the learning rate needs to know the number from the start.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import reason_of

from unet3d.distributed.processes import die_with_parent

TRAINER = "nnUNetTrainer"
CONFIGURATION = "3d_fullres"
PLANS = "nnUNetPlans"
DATASET_ID = 732
DATASET = f"Dataset{DATASET_ID}_Quality"
NUM_TIMED_EPOCHS = 2
"""Of which the first one also compiles and fills queues."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What nnU-Net is asked to do."""

    cases: dict[str, tuple[list[str], str]]
    """Images and label map of each case."""
    channels: list[str]
    """Names of the channels, by which nnU-Net normalises."""
    labels: dict[str, int]
    """Value of each class."""
    validation: list[str]
    """The cases that are not trained on."""
    minutes: float
    """That the training may take."""
    steps_per_epoch: int
    """As many as nnU-Net's own trainer takes, unless something is only tried."""
    device: str
    """Where the network is."""
    num_workers: int
    """Processes that prepare cases."""
    folders: dict[str, str]
    """Of images, ``case_0000.nii.gz``, to where their segmentations go."""


def prepare(request: Fit) -> None:
    """Write the scans as nnU-Net's raw data, and have it plan and prepare them."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as planning

    raw = Path(os.environ["nnUNet_raw"]) / DATASET
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True)
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
    planning.extract_fingerprints([DATASET_ID], num_processes=request.num_workers)
    planning.plan_experiments([DATASET_ID])
    planning.preprocess(
        [DATASET_ID], configurations=[CONFIGURATION], num_processes=[request.num_workers]
    )
    training = [name for name in request.cases if name not in request.validation]
    folds = [{"train": training, "val": request.validation}]
    base = Path(os.environ["nnUNet_preprocessed"]) / DATASET
    (base / "splits_final.json").write_text(json.dumps(folds))


def train(request: Fit, num_epochs: int) -> tuple[Any, list[float]]:
    """Return a finished trainer, and the seconds of each epoch."""
    from nnunetv2.run.run_training import get_trainer_from_args

    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # as its command line does
    trainer = get_trainer_from_args(
        str(DATASET_ID), CONFIGURATION, 0, TRAINER, PLANS, device=device
    )
    trainer.num_epochs = num_epochs
    trainer.num_iterations_per_epoch = request.steps_per_epoch
    seconds: list[float] = []
    end_epoch, began = trainer.on_epoch_end, time.perf_counter()

    def timed() -> None:
        end_epoch()
        seconds.append(time.perf_counter() - began - sum(seconds))

    trainer.on_epoch_end = timed
    trainer.run_training()
    return trainer, seconds


def fit(request: Fit) -> dict[str, Any]:
    """Prepare, train for the minutes, and segment the folders with and without mirroring."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    began = time.perf_counter()
    prepare(request)
    prepared = time.perf_counter()
    _, timed = train(request, NUM_TIMED_EPOCHS)
    shutil.rmtree(os.environ["nnUNet_results"])
    available = 60 * request.minutes - (timed[0] - timed[-1])
    num_epochs = max(1, int(available / timed[-1]))
    trained = time.perf_counter()
    trainer, seconds = train(request, num_epochs)
    row = {
        "prepare_seconds": prepared - began,
        "train_seconds": time.perf_counter() - trained,
        "epoch_seconds": seconds,
        "num_epochs": num_epochs,
        "patch": trainer.configuration_manager.patch_size[::-1],
        "batch_size": trainer.configuration_manager.batch_size,
    }
    model, predict_seconds = str(Path(trainer.output_folder).parent), {}
    del trainer
    for mirrors in (False, True):
        predictor = nnUNetPredictor(
            use_mirroring=mirrors,
            device=torch.device(request.device),
            perform_everything_on_device=request.device != "cpu",
        )
        predictor.initialize_from_trained_model_folder(model, (0,))
        predicting = time.perf_counter()
        for images, output in request.folders.items():
            out = Path(output) / ("mirrored" if mirrors else "plain")
            out.mkdir(parents=True)
            predictor.predict_from_files_sequential(images, str(out))
        predict_seconds["mirrored" if mirrors else "plain"] = time.perf_counter() - predicting
    return {**row, "predict_seconds": predict_seconds}


def main() -> None:
    """Answer one request; what nnU-Net prints goes to stderr."""
    die_with_parent()
    asked, answer = map(Path, sys.argv[1:])
    sys.argv = sys.argv[:1]  # nnU-Net's trainer reads the rest
    request = Fit(**json.loads(asked.read_text()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = fit(request)
    except Exception as error:  # a peer, or a compiler, can raise anything
        result = {"reason": reason_of(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
