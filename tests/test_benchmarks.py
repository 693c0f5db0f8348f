"""The benchmarks accept the commands in the documents, and those for a CPU run."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from unet3d.datasets.dataset import load_dataset
from unet3d.datasets.phantom import write_phantom_dataset
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.preparation.check import examine

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("step", "kernels", "training", "prediction", "scaling", "memory", "quality", "nnunet")
SCRIPTS += ("large_predict", "boxes", "blocks", "membranes")
DOCUMENTS = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [ROOT / "benchmarks" / f"{name}.py" for name in SCRIPTS]
SMALL = "--channels 4,8,8 --shape 16,16,16"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def run(load, monkeypatch, capfd, tmp_path):
    def run_script(name, options):
        """Run a benchmark, and return its record and its table."""
        path = tmp_path / "record.json"
        script = ROOT / "benchmarks" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), "--json", str(path), *shlex.split(options)])
        load(name).main()
        record = json.loads(path.read_text())
        assert record["command"].startswith(f"benchmarks/{name}.py --json record.json")
        assert str(tmp_path) not in record["command"] and str(ROOT) not in record["command"]
        assert {"date", "devices", "cores", "versions"} < set(record)
        return record, capfd.readouterr().out

    return run_script


def test_commands_in_the_documents_parse(load):
    shown = set()
    for path in DOCUMENTS:
        text = path.read_text().replace("\\\n", " ")
        for name, options in re.findall(r"python benchmarks/(\w+)\.py([^`\n]*)", text):
            assert name in SCRIPTS, f"{path.name}: {name}"
            load(name).make_parser().parse_args(shlex.split(options, comments=True))
            shown.add(name)
    assert shown == set(SCRIPTS)


def test_a_search_ends_between_what_trains_and_what_does_not(load):
    search = load("memory").search

    def attempt(edge):
        return {"trains": edge <= 192}

    for start in (160, 192, 224, 256):
        found = search(attempt, start, 32, 9)
        assert (found["edge"], found["complete"]) == (192, True)
    cut_short = search(attempt, 320, 32, 2)
    assert (cut_short["edge"], cut_short["complete"]) == (0, False)


@pytest.mark.nightly
def test_step_compares_networks_or_says_why_not(run):
    keys = "ours,dynunet-eager,nnunet-eager"
    record, table = run("step", f"--device cpu {SMALL} --variants {keys} --warmup 1 --steps 2")
    rows = {row["key"]: row for row in record["rows"]}
    for key in ("ours", "dynunet-eager"):
        assert rows[key]["seconds"] > 0 and len(rows[key]["all_window_seconds"]) == 2
        assert rows[key]["loss"] > 0
    peer = rows["nnunet-eager"]
    assert "seconds" in peer or "dynamic_network_architectures" in peer["reason"]
    assert list(rows) == keys.split(",") and "/ dynunet-eager" in table


@pytest.mark.nightly
def test_convolutions_are_compared_in_all_ways(run):
    record, table = run("kernels", "--device cpu --sizes 8-8@6,8-40@2x4,40-40@5 --launches 2")
    rows = {(row["size"], row["form"], row["way"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 9 * (3 + 2 + 2)  # 40 channels are not folded
    for row in rows.values():
        # PyTorch's own convolutions round more on some processors.
        bound = 1e-2 if row["way"].startswith("cuDNN") else 4e-3
        assert row["seconds"] > 0 and row["error"] < bound and row["tflops"] > 0, row
    assert "8-40@2x4        normalized-weight-gradient" in table


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # by PyTorch 2.11
@pytest.mark.nightly
def test_trainings_are_timed_and_whole_runs_too(run, tmp_path):
    sizes = "--channels 4,8 --shape 16,16,16 --volume 32,32,32 --num-cases 3 --turns 2 --steps 2"
    others = f"--workers 0 --nnunet --runs cpu --cache '{tmp_path / 'cache'}'"
    record, _ = run("training", f"--device cpu {sizes} {others}")
    ours, theirs, whole = record["rows"]
    assert (len(ours["all_seconds"]), len(ours["all_alone_seconds"])) == (2, 3)
    ratio = ours["samples_per_second"] / ours["alone_samples_per_second"]
    assert ours["ratio"] == pytest.approx(ratio) and 0 <= ours["waiting_share"] < 1
    assert theirs.get("reason") or theirs["ours_times_as_fast"] > 0
    assert len(whole["all_seconds"]) == 2 and whole["samples_per_second"] > 0


@pytest.mark.nightly
def test_predictions_are_timed_from_file_to_file_and_by_windows(run):
    small = "--devices cpu --shape 40,32,32 --channels 4,8 --window 16,16,16"
    record, table = run("prediction", small)
    row = record["rows"]["cpu"]
    assert row["seconds"] > 0 and row["host_bytes"] > 2**27 and "40x32x32 voxels" in table
    windows, _ = run("prediction", f"{small} --inferer")
    assert windows["rows"]["ours, 4"]["windows_a_second"] > 0


@pytest.mark.nightly
def test_modes_are_compared_with_one_device_and_train_the_same(run):
    how = "--modes stages,slabs --predict --warmup 1 --steps 1 --repeats 2"
    record, table = run("scaling", f"--devices cpu,cpu {SMALL} {how}")
    rows = {row["mode"]: row for row in record["rows"]}
    assert list(rows) == ["one", "stages", "slabs"]
    assert [row["num_ranks"] for row in rows.values()] == [1, 1, 2]
    for row in rows.values():
        assert row["loss"] == pytest.approx(rows["one"]["loss"], rel=1e-3)
        assert row["ratio"] > 0 and row["predicted_bytes"] > 0 and row["window_seconds"] > 0
    assert "slabs" in table


@pytest.mark.nightly
def test_memory_is_predicted_and_cubes_are_tried(run, load):
    record, _ = run("memory", "--devices cpu --unit 8 --channels 4,8,8 --only 7")
    assert [row["measured"]["peak_bytes"] for row in record["rows"]] == pytest.approx(
        [row["predicted"]["peak_bytes"] for row in record["rows"]], rel=0.05
    )
    small = "--devices cpu --largest ours --channels 4,8,8 --attempts 1"
    largest, table = run("memory", f"{small} --memory-gib 0.1")
    (row,) = largest["rows"]
    (attempt,) = row["attempts"]
    assert attempt["edge"] == row["planned_edge"] // 32 * 32 > 0 and not attempt["trains"]
    # Memory ends in PyTorch or in oneDNN, whichever asks for it first.
    assert re.search("allocate memory|could not create a primitive", attempt["reason"])
    assert "not all sizes were tried" in table
    memory, trainees = load("memory"), load("trainees")
    arguments = memory.make_parser().parse_args(small.split())
    problem = trainees.Problem(size=(16, 16, 16), batch_size=1, channels=(4, 8, 8))
    tried = memory.try_rank(Group(Ranks()), *arguments.largest, problem, arguments)
    assert tried["trains"] and tried["second_step_seconds"] > 0


@pytest.mark.nightly
def test_membranes_are_learned_from_real_planes_and_scored_on_others(
    run, load, monkeypatch, test_data
):
    """In a twentieth of the steps of the configuration, for which 0.4 is no more than a start."""
    pytest.importorskip("tifffile")
    monkeypatch.setattr(load("membranes"), "WAYS", {"plain": "--no-tta"})
    short = "--epochs 3 --set training.steps_per_epoch=25 --set model.base_channels=8"
    record, table = run("membranes", f"'{test_data / 'microscopy'}' {short} --threads 2")
    row = record["rows"]["unet3d"]
    assert row["num_epochs"] == 3 and list(record["rows"]) == ["unet3d"]
    assert row["scores"]["plain"]["dice"] > 0.4 and "| unet3d, plain | cpu |" in table


def test_the_data_set_of_membranes_is_the_stack_and_can_be_checked(load, test_data, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    load("membranes").prepare(test_data / "microscopy", tmp_path)
    dataset = load_dataset(tmp_path)
    assert examine(dataset).findings == [] and len(dataset.cases) == 4
    for kind, suffix, name in (("images", "_0000", "raw"), ("labels", "", "membrane")):
        blocks = [
            tifffile.imread(tmp_path / f"{kind}Tr" / f"block{number}{suffix}.tif")
            for number in range(4)
        ]
        rows = [np.concatenate(blocks[first : first + 2], axis=2) for first in (0, 2)]
        trained = np.concatenate(rows, axis=1)
        test = tifffile.imread(tmp_path / f"{kind}Ts" / f"test{suffix}.tif")
        whole = tifffile.imread(test_data / "microscopy" / f"fib25_{name}.tif")
        np.testing.assert_array_equal(np.concatenate([trained, test]), whole)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # runs nnU-Net's planner and trainer, too
def test_default_trainings_are_scored_on_the_cases_of_the_fold(run, tmp_path):
    dataset = write_phantom_dataset(tmp_path / "heads", 5, (32, 32, 32), (1.0, 1.0, 1.0), 0)
    settings = ("patches.size=[16,16,16]", "model.channels=[4,8]", "training.steps_per_epoch=2")
    trial = "--minutes 0.01 --nnunet-steps 2"
    folds = f"--folds 0,1 --devices cpu,cpu --keep '{tmp_path / 'work'}'"
    options = f"'{dataset}' {trial} {folds} {' '.join(f'--set {s}' for s in settings)}"
    record, table = run("quality", options)
    ours, theirs = record["rows"]["1"]["unet3d"], record["rows"]["1"]["nnU-Net"]
    (case,) = ours["scores"]["validation, mirrored"]["cases"].values()
    assert set(case["1"]) == {"dice", "hd95_mm", "nsd"} and ours["num_epochs"] == 1
    assert "nnunetv2" in theirs.get("reason", "") or len(theirs["scores"]) == 3
    folds = [row["unet3d"]["scores"]["validation, plain"]["nsd"] for row in record["rows"].values()]
    over_folds = record["summary"]["unet3d, validation, plain"]["nsd"]
    assert over_folds["mean"] == pytest.approx(sum(folds) / 2)
    assert over_folds["standard_deviation"] == pytest.approx(abs(folds[0] - folds[1]) / 2**0.5)
    assert "| unet3d, validation, plain | 2, 2 |" in table
    again, _ = run("quality", options)  # models are not trained again
    assert again["rows"] == record["rows"]


def test_nnunet_sees_only_the_gpu_that_it_is_to_take(load, monkeypatch):
    seen_alone = load("common").seen_alone
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen_alone(torch.device("cpu")) == {}
    assert seen_alone(torch.device("cuda:1")) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert seen_alone(torch.device("cuda:1")) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_a_model_gets_the_resampler_that_is_fast_and_stays_as_it_was(load, tmp_path):
    model = ROOT / "tests/recorded/nnunet/isotropic/nnUNetTrainer__nnUNetPlans__3d_fullres"
    before = (model / "plans.json").read_bytes()
    faster = load("nnunet").with_torch_resampler(model, tmp_path / "faster")
    plans, own = json.loads((faster / "plans.json").read_text()), json.loads(before)
    plan, was = (one["configurations"]["3d_fullres"] for one in (plans, own))
    changed = {key for key in was if plan[key] != was[key]}
    assert changed == {"resampling_fn_probabilities", "resampling_fn_probabilities_kwargs"}
    assert plan["resampling_fn_probabilities"] == "resample_torch_fornnunet"
    assert (model / "plans.json").read_bytes() == before
    assert (faster / "fold_0/checkpoint_final.pth").is_file()


@pytest.mark.nightly
def test_labels_are_compared_with_those_of_nnunet(run):
    recorded = ROOT / "tests/recorded/nnunet/isotropic"
    folders = f"--scans '{recorded}/scans' --found '{recorded}/segmentations/plain'"
    model = recorded / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    options = "--device cpu --folds 0,1 --precision float32 --repeats 1"
    record, table = run("nnunet", f"'{model}' {options} {folders}")
    agreed = record["rows"]["unet3d, float32"]["to_nnunet"]
    assert agreed["num_cases"] == len(list((recorded / "segmentations/plain").glob("*.nii.gz")))
    assert agreed["equal_voxels"] > 0.9999 and min(agreed["dice"].values()) > 0.9995
    assert len(agreed["dice"]) == 3 and "99.99" in table


@pytest.mark.nightly
def test_large_predictions_are_right_and_boxes_read_only_their_chunks(run):
    pytest.importorskip("zarr")
    options = "--shape 100,100,60 --window 50,50,30 --levels 2 --predict=--statistics"
    record, shown = run("large_predict", options)
    assert record["row"]["different"] == 0 and record["row"]["host_bytes"] > 2**27
    assert shown.startswith("100x100x60 voxels, windows of 50x50x30: ")
    record, shown = run("boxes", "--cases zarr-64,nifti --edge 512")
    for case, at_most in (("zarr-64", (1.1, 3.5)), ("nifti", (0.1, 0.1))):
        rows = record["rows"][case]
        assert rows["aligned"]["asked"] < at_most[0] and rows["unaligned"]["asked"] < at_most[1]
        assert max(row["host_bytes"] for row in rows.values()) < 300e6
    assert "zarr-64, unaligned: asked 3.3" in shown
