"""From settings to patch size, network and cases, on synthetic and on real data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.images.samples import write_json, write_msd, write_nnunet, write_volume
from tests.trainings import run
from unet3d.config import Config, load_config
from unet3d.datasets.dataset import Finding, load_dataset
from unet3d.errors import ConfigError, DatasetError, DeviceError
from unet3d.parallel import ParallelDims
from unet3d.patches.augment.device import DeviceAugmentation
from unet3d.planning import experiment
from unet3d.planning.experiment import plan_experiment, report_findings
from unet3d.preparation.check import examine

pytestmark = pytest.mark.usefixtures("launched")

FEW = "training.batch_size=2"
"""A setting without which memory is predicted."""


def settings(folder: Path, dataset: Path | None, *overrides: str) -> Config:
    """Return settings, for a narrow network by default."""
    named = [] if dataset is None else [f"data.dataset={dataset}"]
    few = (f"data.cache={folder / 'cache'}", "model.base_channels=4", *named)
    return load_config(None, [*few, *overrides])


def test_a_patch_that_was_asked_for_is_kept_whatever_the_memory(tmp_path, caplog):
    root = write_msd(tmp_path / "data")
    overrides = ("patches.size=24,17,16", "patches.memory_gib=0.5", "model.num_levels=2")
    with caplog.at_level("DEBUG"):
        experiment = plan_experiment(settings(tmp_path, root, *overrides), 0)
    assert experiment.patch_size == (24, 18, 16)  # multiples of 2
    assert experiment.config.training.batch_size == 1
    assert caplog.text.count("patches.size 24x17x16 is rounded up to 24x18x16, multiples of") == 1
    assert "patches of 24x18x16 voxels (as set), 1 in a batch (limited by memory)" in caplog.text
    # With several replicas, a batch has a patch for each micro-batch.
    several = settings(tmp_path, root, *overrides, "training.micro_batches=2")
    assert plan_experiment(several, 0, num_replicas=3).config.training.batch_size == 6


@pytest.mark.parametrize(
    ("overrides", "num_stages", "num_shards", "reason"),
    [
        (("parallel.cuts=3,4", "parallel.mode=model"), 2, 1, r"cuts \[3, 4\] do not divide"),
        (("parallel.cuts=3", "parallel.mode=model"), 1, 1, "over 1 device; leave them out"),
        ((), 99, 1, "99 devices are more than the"),
        (("patches.size=16,16,16", "model.num_levels=5"), 1, 1, "5 levels but a patch of 16x16x16"),
        (("patches.size=16,16,16",), 1, 17, "16x16x16 voxels has 16 planes .* use at most 16"),
        (("patches.size=32,32,32", "inference.window=6,9,9"), 1, 9, "use at most 4$"),
        (("patches.size=64,64,64", "inference.window=whole"), 1, 9, "use at most [1-8]$"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_before_a_case_is_prepared(
    overrides, num_stages, num_shards, reason, tmp_path, monkeypatch
):
    root = write_msd(tmp_path / "data", modality="CT")
    monkeypatch.setattr(experiment, "prepare_cases", lambda *_, **__: pytest.fail("prepared"))
    with pytest.raises((ConfigError, DeviceError), match=reason):
        plan_experiment(settings(tmp_path, root, FEW, *overrides), 0, num_stages, num_shards)


def test_the_resolved_configuration_names_every_choice(tmp_path):
    root = write_msd(tmp_path / "data", 5, (20, 24, 12), (1.0, 1.0, 2.5))
    experiment = plan_experiment(settings(tmp_path, root, "model.base_channels=6"), 0)
    config = experiment.config
    assert config.data.spacing_mm == (1.0, 1.0, 2.5)
    assert config.patches.size == experiment.patch_size == (20, 24, 12)
    assert experiment.topology.total_stride == (4, 4, 2)  # thick slices are halved less often
    assert config.training.batch_size == 2
    assert config.training.batch_dice is False
    assert experiment.topology.channels == (6, 12, 24)
    assert {case.name for case in experiment.training} == {f"case_{n}" for n in range(5)} - {
        case.name for case in experiment.validation
    }
    assert len(experiment.validation) == 1
    again = plan_experiment(Config.from_yaml(config.to_yaml()), 0)
    assert again == experiment


@pytest.mark.parametrize(
    ("region", "axes"), [("left lesion", ("y", "z")), ("lesion", ("x", "y", "z"))]
)
def test_names_of_regions_say_whether_sides_may_be_swapped(tmp_path, region, axes):
    labels = {"background": 0, region: [1, 2], "core": 2}
    root = write_msd(tmp_path / "data", 2, labels=labels, regions_class_order=[1, 2])
    experiment = plan_experiment(settings(tmp_path, root), 0)
    assert experiment.config.patches.random_changes.mirror_axes == axes
    assert experiment.topology.num_classes == 2


def test_native_spacing_stays_native(tmp_path):
    root = write_msd(tmp_path / "data", 2, (20, 24, 12), (1.0, 1.0, 2.5))
    write_volume(root / "imagesTr/case_1.nii.gz", np.ones((8, 9, 7), np.float32), (2, 3, 4))
    write_volume(root / "labelsTr/case_1.nii.gz", np.ones((8, 9, 7), np.uint8), (2, 3, 4))
    experiment = plan_experiment(settings(tmp_path, root, "data.spacing_mm=native"), 0)
    assert experiment.config.data.spacing_mm == "native"
    shapes = {case.name: case.image().shape for case in experiment.training + experiment.validation}
    assert shapes == {"case_0": (1, 20, 24, 12), "case_1": (1, 8, 9, 7)}


@pytest.mark.parametrize(("normalization", "num_bytes"), [("none", 4), ("z-score", 2)])
def test_memory_for_cuts_is_that_of_the_stored_intensities(tmp_path, normalization, num_bytes):
    root = write_msd(tmp_path / "data", 4, (16, 16, 16))
    experiment = plan_experiment(settings(tmp_path, root, f"data.normalization={normalization}"), 0)
    assert experiment.training[0].image().itemsize == num_bytes

    def on(device: str) -> DeviceAugmentation | None:
        dims = ParallelDims(mode="none", replicas=((torch.device(device),),), num_replicas=1)
        return experiment.step(dims, "float32").augmentation

    augmentation = on("cuda:0")
    assert augmentation is not None
    assert (augmentation.voxel_bytes, augmentation.label_bytes) == (num_bytes, 1)
    assert on("cpu") is None


def test_the_fold_is_that_of_the_datalist(tmp_path):
    root = write_msd(tmp_path / "data", 4)
    tree = json.loads((root / "dataset.json").read_text())
    for number, case in enumerate(tree["training"]):
        case["fold"] = number % 2
    write_json(root / "dataset.json", tree)
    for fold in range(2):
        experiment = plan_experiment(settings(tmp_path, root, f"data.fold={fold}"), 0)
        assert [case.name for case in experiment.validation] == [f"case_{fold}", f"case_{fold + 2}"]
        assert len(experiment.training) == 2


@pytest.mark.nightly
def test_phantom_data_are_made_once_for_a_seed_and_a_shape(tmp_path):
    config = settings(tmp_path, None, "data.phantom_shape=16,18,20", "patches.size=8,8,8", FEW)
    experiment = plan_experiment(config, 0)
    (folder,) = (tmp_path / "cache").glob("phantom-*")
    assert folder.name == "phantom-16x18x20-seed0"
    assert experiment.training[0].image().shape == (1, 16, 18, 20)
    assert experiment.preprocessing.label_names == ("background", "brain", "ventricles", "lesion")
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    plan_experiment(config, 0)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written
    plan_experiment(config.with_values({"training.seed": 1}), 0)
    assert len(list((tmp_path / "cache").glob("phantom-*"))) == 2


def test_findings_are_warned_of_and_errors_stop(caplog):
    warnings = [
        Finding(case=f"w{number}", severity="warning", message="looks odd") for number in range(7)
    ]
    report_findings(warnings)
    messages = [record.message for record in caplog.records]
    assert messages[:5] == [f"w{number}: looks odd" for number in range(5)]
    assert messages[5:] == ["and 2 more warnings; unet3d check lists all"]
    errors = [
        Finding(case=f"e{number}", severity="error", message="is broken") for number in range(3)
    ]
    with pytest.raises(DatasetError) as caught:
        report_findings([*warnings, *errors], shown=2)
    assert str(caught.value) == (
        "the data set has 3 faults; unet3d check lists all: "
        "e0: is broken; e1: is broken; and 1 more"
    )


def test_training_refuses_with_the_words_of_the_checks(tmp_path):
    root = write_nnunet(tmp_path / "data")
    for name in "ab":
        (root / f"labelsTr/{name}.nii.gz").unlink()
    write_json(root / "splits_final.json", [{"train": ["z"], "val": ["a"]}])
    with pytest.raises(DatasetError, match="has 3 fault") as caught:
        plan_experiment(settings(tmp_path, root), 0)
    for finding in examine(load_dataset(root)).findings:
        assert finding.message in str(caught.value)
    assert "b: has no label map" in str(caught.value)


# Real data, one small epoch


def assert_trains(folder: Path, config: Config, classes: set[str]) -> None:
    run(config, folder / "run")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert set(summary["dice"]) == classes
    assert 0 <= summary["best_dice"] <= 1


BRIEF = (
    *("training.epochs=1", "training.steps_per_epoch=2", "data.num_workers=0"),
    *("parallel.mode=model", "parallel.devices=cpu,cpu", "inference.overlap=0"),
)


@pytest.mark.nightly
def test_sarcomas_in_thick_slices_train_without_tuning(test_data, tmp_path):
    config = settings(tmp_path, test_data / "sarcoma_mr", *BRIEF, "patches.memory_gib=1.1")
    experiment = plan_experiment(config, 0)
    assert experiment.preprocessing.spacing_mm == pytest.approx((0.9766, 0.9766, 3.27), abs=1e-3)
    x, y, z = experiment.patch_size
    assert x * y * z < 500_000
    assert 2 < x / z < 5  # the patch has about as many mm along each axis
    strides = experiment.topology.strides
    assert strides[1] == (2, 2, 1)  # halved within the slices first
    assert len(experiment.validation) == 2
    assert_trains(tmp_path, config, {"GTV"})


@pytest.mark.nightly
def test_hippocampi_train_without_tuning(test_data, tmp_path):
    root = tmp_path / "few"
    tree = json.loads((test_data / "hippocampus" / "dataset.json").read_text())
    tree["training"] = [{**case, "fold": n % 2} for n, case in enumerate(tree["training"][:4])]
    tree["test"] = []
    for case in tree["training"]:
        for kind in ("image", "label"):
            (root / case[kind]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(test_data / "hippocampus" / case[kind], root / case[kind])
    config = settings(tmp_path, write_json(root / "datalist.json", tree), *BRIEF)
    experiment = plan_experiment(config, 0)
    assert len(experiment.validation) == len(experiment.training) == 2
    assert experiment.preprocessing.label_names[1:] == ("Anterior", "Posterior")
    assert experiment.preprocessing.spacing_mm == (1, 1, 1)
    assert_trains(tmp_path, config, {"Anterior", "Posterior"})
