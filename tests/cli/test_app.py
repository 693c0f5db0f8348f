"""The command line as a user meets it: what it prints, where it writes, how it says no."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from tests.command_line import error_line, run
from tests.networks import write_checkpoint
from tests.volumes.samples import blob_label, write_json, write_msd, write_volume
from unet3d import __version__
from unet3d.config import InferenceSettings, ParallelSettings
from unet3d.inference.predictor import Predictor
from unet3d.runs.checkpoint import load_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.volumes.scans import Scan, read_scan

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
NO_GPU = not torch.cuda.is_available()

SMALL = (
    *("--devices", "cpu", "--epochs", "1"),
    *("--set", "data.num_workers=0", "--set", "patches.size=8,8,8", "--set", "patches.per_case=1"),
    *("--set", "model.base_channels=4", "--set", "model.num_levels=2"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a space in its name, and a cache, of the test's own."""
    here = tmp_path / "my files"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return here


def scan_array(shape: tuple[int, int, int] = (14, 13, 12), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, 20, shape).astype(np.float32)


@pytest.fixture
def scan(folder: Path) -> Path:
    return write_volume(folder / "a scan.nii.gz", scan_array())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("network") / "random.pt", patch_size=(8, 8, 8))


def in_a_process(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "unet3d", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, **more
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line with which a command says no."""
    capsys.readouterr()
    assert run(*arguments) == 1
    return error_line(capsys.readouterr().err)


def settings_of(run_folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((run_folder / "config.yaml").read_text())
    return settings


# Help, versions, usage


def test_help_is_instant() -> None:
    commands = ["train", "predict", "evaluate", "check"]
    code = f"""
import sys
import unet3d
from unet3d.cli.app import main
for arguments in (["--version"], ["--help"], *([name, "--help"] for name in {commands})):
    try:
        main(arguments)
    except SystemExit as ending:
        if ending.code:
            raise
heavy = {{"torch", "monai", "nibabel", "scipy", "numpy", "matplotlib"}} & sys.modules.keys()
sys.exit(f"loaded {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"unet3d {__version__}\n")
    assert all(f"  {name} " in done.stdout for name in commands)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prediction",), "No such command 'prediction'"),
        (("train", "--epoch", "3"), "--epochs"),
        (("train", "--fold", "-1"), "-1 is not in the range"),
        (("train", "--seed", "x"), "'x' is not a valid integer"),
        (("train", "--parallel", "tensor"), "'tensor' is not one of"),
        (("predict",), "Missing argument 'IMAGES...'"),
        (("predict", "a.nii", "--overlap", "1"), "1.0 is not in the range"),
        (("evaluate", "a"), "Missing argument 'LABELS'"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert words in errors and "Usage: unet3d" in errors


def test_a_traceback_only_with_debug() -> None:
    done = in_a_process("check", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert error_line(done.stderr) == (
        "Error: there is no data set at nowhere; give its folder or its dataset.json"
    )
    for arguments in (("--debug", "check", "nowhere"), ("check", "nowhere", "--debug")):
        done = in_a_process(*arguments)
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "unet3d.errors.DatasetError: there is no data set at nowhere" in done.stderr


# Settings


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.epoch=3", "unknown setting training.epoch, did you mean training.epochs?"),
        ("epochs=3", "did you mean training.epochs?"),
        ("trainin.epochs=3", "did you mean training?"),
        ("training.epochs=0", "training.epochs is 0; give a whole number above 0"),
        ("training.epochs", "write section.key=value"),
        ("training=3", "training is 3"),
        ("model.norm=[", "not valid YAML"),
    ],
)
def test_a_setting_that_cannot_be_is_explained(
    setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, "train", "--set", setting)
    assert not Path("runs").exists()


def test_a_configuration_that_cannot_be_read_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent.yaml: No such file" in refusal(capsys, "train", "--config", "absent.yaml")
    (folder / "bad.yaml").write_text("training:\n  epohcs: 3\n  batch_size: many\n")
    line = refusal(capsys, "train", "--config", "bad.yaml")
    assert "bad.yaml: " in line
    assert "epohcs" in line and "batch_size" in line  # every fault at once


def test_files_and_options_override_the_defaults_in_turn(folder: Path) -> None:
    write_msd(folder / "data set", num_cases=5)
    status = run(
        *("train", "data set", "--config", CONFIGS / "hippocampus-cpu.yaml", *SMALL, "--quiet"),
        *("--set", "training.learning_rate=0.5", "--set", "training.learning_rate=0.25"),
        *("--fold", 3, "--seed", 11, "--output", "run"),
    )
    assert status == 0
    settings = settings_of(folder / "run")
    assert settings["training"]["optimizer"] == "adamw"  # of the file
    assert settings["training"]["epochs"] == 1  # of an option
    assert settings["training"]["learning_rate"] == 0.25  # of the last --set
    assert settings["training"]["momentum"] == 0.99  # a default
    assert settings["data"]["fold"] == 3
    assert settings["training"]["seed"] == 11
    assert settings["data"]["dataset"] == str(folder / "data set")


# Devices


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--devices", "97"), "device '97' does not exist; this machine has cpu and "),
        (("--devices", "cuda:98"), "device 'cuda:98' does not exist; this machine has"),
        (("--devices", "foo"), "device 'foo' is unknown; write 0, cuda:0 or cpu"),
        (
            ("--parallel", "none", "--devices", "cpu,cpu"),
            "add --parallel model or --parallel data, or name one",
        ),
        (("--parallel", "model", "--devices", "cpu"), "needs a device for each of two stages"),
        pytest.param(
            ("--devices", "0"),
            "device '0' does not exist; this machine has cpu and no CUDA GPU",
            marks=pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU"),
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "predict"])
def test_devices_that_cannot_be_are_explained(
    command: str,
    options: tuple[str, ...],
    words: str,
    scan: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    predicting = ("predict", scan, "--checkpoint", checkpoint)
    arguments = predicting if command == "predict" else ("train", "--output", "run")
    assert words in refusal(capsys, *arguments, *options)
    assert not Path("run").exists() and not Path("a scan_seg.nii.gz").exists()


def test_more_stages_than_blocks_are_refused(
    folder: Path, scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = ",".join(["cpu"] * 60)
    words = "60 devices for a network of 9 blocks; name at most 9 devices"
    assert words in refusal(capsys, "predict", scan, "--checkpoint", checkpoint, "--devices", many)
    write_msd(folder / "data")
    line = refusal(capsys, "train", "data", *SMALL, "--parallel", "model", "--devices", many)
    assert words in line


# Train


def write_nnunet(root: Path, num_cases: int = 4) -> Path:
    """Write two channels and the labels 1 and 4, of which the second channel shows one."""
    for number in range(num_cases):
        label = blob_label((12, 14, 10), number)
        for channel in range(2):
            shown = label == channel + 1
            image = 30 * scan_array(label.shape, 2 * number + channel) / 100 + 90 * shown
            path = root / f"imagesTr/case_{number}_{channel:04d}.nii.gz"
            write_volume(path, image.astype(np.float32), (1, 1, 2))
        label[label == 2] = 4
        write_volume(root / f"labelsTr/case_{number}.nii.gz", label, (1, 1, 2))
    tree = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"background": 0, "left": 1, "right": 4},
        "numTraining": num_cases,
        "file_ending": ".nii.gz",
    }
    write_json(root / "dataset.json", tree)
    cases = [f"case_{number}" for number in range(num_cases)]
    write_json(root / "splits_final.json", [{"train": cases[1:], "val": cases[:1]}])
    return root


def test_train_predict_and_evaluate_two_channels(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The whole job, on nnU-Net's layout, with two stages and no name given to anything."""
    root = write_nnunet(folder / "raw data")
    two = ("--parallel", "model", "--devices", "cpu,cpu")
    better = ("--epochs", 60, "--set", "training.optimizer=adamw")
    assert run("train", root, *SMALL, *two, *better, "--set", "training.validate_every=20") == 0
    output = capsys.readouterr().out
    (run_folder,) = Path("runs").iterdir()
    assert run_folder.name.startswith("raw data-fold0-")
    assert "Memory in training" in output and "decoder.0.skip" in output
    assert f"Checkpoints, metrics and pictures: {run_folder}" in output
    epochs = [record.message for record in caplog.records if record.message.startswith("epoch ")]
    assert len(epochs) == 60 and epochs[0].startswith("epoch 1/60: loss ")
    assert "Dice " in epochs[-1] and "(left 0." in epochs[-1] and " 0 s left" in epochs[-1]

    assert (
        run("predict", root / "imagesTr", "-o", "out put", "--statistics", "--devices", "cpu") == 0
    )
    output = capsys.readouterr().out
    assert output.startswith(f"using {run_folder}/checkpoint-best.pt\n")
    assert len(output.splitlines()) == 5
    names = {f"case_{number}_seg{end}" for number in range(4) for end in (".nii.gz", ".json")}
    assert {path.name for path in Path("out put").iterdir()} == names
    segmentation = nib.load("out put/case_0_seg.nii.gz")
    assert segmentation.header.get_zooms() == (1, 1, 2)
    array = np.asarray(segmentation.dataobj)
    assert set(np.unique(array)) <= {0, 1, 4}
    statistics = json.loads(Path("out put/case_0_seg.json").read_text())
    assert [Path(name).name for name in statistics["image"]] == [
        "case_0_0000.nii.gz",
        "case_0_0001.nii.gz",
    ]
    assert statistics["labels"]["right"]["value"] == 4
    num_voxels = np.count_nonzero(array == 4)
    assert statistics["labels"]["right"]["num_voxels"] == num_voxels
    assert statistics["labels"]["right"]["volume_ml"] == pytest.approx(num_voxels * 2 / 1000)

    assert run("evaluate", "out put", root / "labelsTr", "--json", "scores.json") == 0
    assert "case_0" in capsys.readouterr().out
    scores = json.loads(Path("scores.json").read_text())
    assert len(scores["cases"]) == 4
    assert scores["mean_dice"] > 0.6  # it has learned something
    label = nib.load(root / "labelsTr/case_0.nii.gz").get_fdata()
    by_hand = 2 * ((array == 4) & (label == 4)).sum() / ((array == 4).sum() + (label == 4).sum())
    assert scores["cases"][0]["labels"]["4"]["dice"] == pytest.approx(by_hand)


def test_train_on_the_folds_of_a_datalist(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_msd(folder / "data")
    tree = json.loads((root / "dataset.json").read_text())
    cases = [{**case, "fold": min(number, 1)} for number, case in enumerate(tree["training"])]
    write_json(root / "datalist.json", {"training": cases})
    arguments = ("train", root / "datalist.json", *SMALL)
    line = refusal(capsys, *arguments, "--fold", 2, "--output", "run")
    assert "has folds 0 to 1, not fold 2" in line
    assert run(*arguments, "--fold", 1, "--output", "run", "--quiet") == 0
    # One case trains, and the others validate: one patch of one case is one step.
    (metrics,) = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == 1
    assert settings_of(Path("run"))["data"]["fold"] == 1
    assert load_checkpoint(Path("run/checkpoint-latest.pt")).preprocessing.label_values == (0, 1, 2)


def test_the_seed_decides_the_weights(folder: Path) -> None:
    write_msd(folder / "data")
    weights = []
    for number, seed in enumerate((5, 5, 6)):
        options = ("--quiet", "--seed", seed, "--output", f"run {number}")
        assert run("train", "data", *SMALL, *options) == 0
        model = load_checkpoint(Path(f"run {number}/checkpoint-latest.pt")).model
        weights.append(torch.cat([value.flatten() for value in model.values()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_quiet_prints_nothing(folder: Path) -> None:
    write_msd(folder / "data set", num_cases=5)
    done = in_a_process("train", "data set", *SMALL, "--quiet", "--output", "my run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("my run/summary.json").is_file()


def test_without_a_terminal_there_is_a_line_for_each_epoch(folder: Path) -> None:
    write_msd(folder / "data")
    done = in_a_process("train", "data", *SMALL, "--epochs", 3, "--output", "run")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("epoch ")]
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a log
    assert done.stdout.splitlines()[-1].endswith("Checkpoints, metrics and pictures: run")


def test_resume_continues_the_newest_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run to resume in runs" in refusal(capsys, "train", "--resume")
    assert "no run to resume in x" in refusal(capsys, "train", "--resume", "--output", "x")
    write_msd(folder / "data")
    assert run("train", "data", *SMALL, "--quiet") == 0
    (run_folder,) = Path("runs").iterdir()
    line = refusal(capsys, "train", "data", *SMALL, "--output", run_folder)
    assert "holds a run already; continue it with --resume" in line
    assert run("train", "--resume", "--epochs", 2, "--quiet") == 0
    assert json.loads((run_folder / "summary.json").read_text())["epochs"] == 2
    assert list(Path("runs").iterdir()) == [run_folder]


def test_outputs_that_cannot_be_written_are_explained(
    folder: Path, scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    (folder / "file").touch()
    for output in ("file", "file/run"):
        line = refusal(capsys, "train", "data", *SMALL, "--output", output)
        assert f"cannot write to {output}: " in line
    for output in ("file", "file/out"):
        line = refusal(capsys, "predict", scan, "--checkpoint", checkpoint, "-o", output)
        assert f"cannot write to {output}: " in line
    label = folder / "data/labelsTr/case_0.nii.gz"
    line = refusal(capsys, "evaluate", label, label, "--json", "absent/scores.json")
    assert "cannot write absent/scores.json: No such file or directory" in line
    line = refusal(capsys, "train", "data", *SMALL, "--set", "data.cache=file")
    assert "cannot write the cache folder" in line and "set data.cache" in line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can fill")
def test_an_output_folder_that_takes_no_files_is_refused_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_msd(folder / "data")
    line = refusal(capsys, "train", "data", *SMALL, "--output", "/proc/self")
    assert "cannot write to /proc/self: " in line
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()  # before the data are prepared


def test_a_disk_that_fills_up_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RunFolder, line: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.metrics))

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    write_msd(folder / "data")
    arguments = ("train", "data", *SMALL, "--output", "run")
    line = refusal(capsys, *arguments)
    assert line == "Error: run/metrics.jsonl: No space left on device; --debug shows where"
    with pytest.raises(OSError, match="No space left"):
        run("--debug", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_while_data_are_prepared_stops_at_once(folder: Path, num_workers: int) -> None:
    """As from a terminal, which tells the whole group of processes."""
    write_msd(folder / "data", num_cases=40, shape=(56, 56, 56), spacing_mm=(1, 1, 1.5))
    command = [sys.executable, "-m", "unet3d", "train", "data", *SMALL]
    command += ["--set", f"data.num_workers={num_workers}", "--set", "data.spacing_mm=0.9,0.9,0.9"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        # As at a terminal, also where these tests run in the background, deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    prepared = Path(os.environ["XDG_CACHE_HOME"]) / "unet3d" / "prepared"
    while not any(prepared.glob("[0-9a-f]*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "Stopped"
    assert len(list(prepared.glob("[0-9a-f]*"))) < 20
    assert not list(prepared.glob(".unfinished-*"))


# Predict


def test_without_a_checkpoint_it_says_how_to_get_one(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "predict", scan)
    assert f"no finished run in {folder / 'runs'}" in line
    assert "--checkpoint FILE" in line and "unet3d train" in line


def test_the_newest_finished_run_is_used_and_named(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        write_checkpoint(folder / "runs" / name / "checkpoint-latest.pt", patch_size=(8, 8, 8))
        if name != "newest":  # that one still runs
            summary = write_json(folder / "runs" / name / "summary.json", {})
            os.utime(summary, (1e9 - age, 1e9 - age))
    write_checkpoint(folder / "runs/oldest/checkpoint-best.pt", patch_size=(8, 8, 8))
    (folder / "runs/notes.txt").touch()
    assert run("predict", scan, "--devices", "cpu") == 0
    assert capsys.readouterr().out.startswith("using runs/middle/checkpoint-latest.pt\n")
    os.utime(folder / "runs/oldest/summary.json")
    assert run("predict", scan, "--devices", "cpu", "--overwrite") == 0
    assert capsys.readouterr().out.startswith("using runs/oldest/checkpoint-best.pt\n")


def test_a_checkpoint_that_is_none_is_refused(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text.pt").write_text("no network")
    assert "text.pt is not a checkpoint" in refusal(
        capsys, "predict", scan, "--checkpoint", "text.pt"
    )
    line = refusal(capsys, "predict", scan, "--checkpoint", "absent.pt")
    assert "cannot read the checkpoint absent.pt: No such file" in line


def test_predict_beside_the_scan_and_never_over_it(
    scan: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("predict", scan, "--checkpoint", checkpoint, "--devices", "cpu")
    assert run(*arguments) == 0
    written = scan.with_name("a scan_seg.nii.gz")
    assert capsys.readouterr().out.startswith(f"{scan} -> {written} (")
    line = refusal(capsys, *arguments)
    assert line == f"Error: {written} exists; add --overwrite to replace it"
    assert run(*arguments, "--overwrite") == 0
    assert "is itself to be segmented" in refusal(capsys, *arguments, "-o", scan, "--overwrite")


def test_scans_that_are_not_there_are_named(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    predicting = ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
    assert "absent.nii.gz: No such file" in refusal(capsys, *predicting, "absent.nii.gz")
    assert "empty holds no volumes" in refusal(capsys, *predicting, "empty")
    (folder / "scan.dcm").touch()
    assert "scan.dcm is not named like a volume" in refusal(capsys, *predicting, "scan.dcm")


def test_a_bad_scan_among_others_is_skipped_and_only_the_end_is_an_error(
    folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "last"):
        write_volume(folder / f"scans/{name}.nii.gz", scan_array())
    (folder / "scans/middle.nii.gz").touch()
    predicting = ("predict", "--checkpoint", checkpoint, "--devices", "cpu")
    assert run(*predicting, "scans") == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    skipped, error = captured.err.splitlines()
    assert skipped.startswith("Skipped: scans/middle.nii.gz is empty")
    assert error == "Error: 1 of 3 scans could not be segmented"
    assert "middle.nii.gz is empty" in refusal(capsys, *predicting, "scans/middle.nii.gz")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), InferenceSettings(window=(8, 8, 8), overlap=0.5)),
        (("--overlap", 0), InferenceSettings(window=(8, 8, 8), overlap=0)),
        (("--overlap", 0.75), InferenceSettings(window=(8, 8, 8), overlap=0.75)),
        (("--window", "whole"), InferenceSettings(window="whole")),
        (("--window", "12,10,8"), InferenceSettings(window=(12, 10, 8))),
        (("--parallel", "model", "--devices", "cpu,cpu"), InferenceSettings(window=(8, 8, 8))),
        (("--devices", "cpu,cpu,cpu"), InferenceSettings(window=(8, 8, 8))),
    ],
    ids=str,
)
def test_options_reach_the_windows(
    scan: Path, checkpoint: Path, options: tuple[object, ...], expected: InferenceSettings
) -> None:
    devices = () if "--devices" in options else ("--devices", "cpu")
    arguments = ("predict", scan, "--checkpoint", checkpoint, *devices, *options)
    assert run(*arguments, "-o", "found.nii") == 0
    image = read_scan(Scan(images=(scan,), output=scan))
    predictor = Predictor(load_checkpoint(checkpoint), ParallelSettings(devices=("cpu",)), expected)
    np.testing.assert_array_equal(nib.load("found.nii").dataobj, predictor.segment(image))
    usual = Predictor(
        load_checkpoint(checkpoint), ParallelSettings(devices=("cpu",)), InferenceSettings()
    ).segment(image)
    differs = expected.overlap != 0.5 or expected.window != (8, 8, 8)
    assert (usual != np.asarray(nib.load("found.nii").dataobj)).any() == differs


@pytest.mark.parametrize("window", ["0,8,8", "8,8", "wide"])
def test_a_window_that_cannot_be_is_explained(
    scan: Path, checkpoint: Path, window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "predict", scan, "--checkpoint", checkpoint, "--window", window)
    assert "inference.window is " in line and "three whole numbers" in line


# Check and evaluate


def test_check_of_a_sound_data_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_msd(folder / "data")
    assert run("check", "data", "--json", "findings.json") == 0
    assert capsys.readouterr().out == "3 cases, 0 errors, 0 warnings\n"
    assert json.loads(Path("findings.json").read_text()) == {"findings": []}


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_folder_that_is_no_data_set_is_explained(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    line = refusal(capsys, command, "absent")
    assert "there is no data set at " in line and "absent; give its folder" in line
    assert "holds no dataset.json; a data set is" in refusal(capsys, command, "empty")


def test_evaluate_explains_what_does_not_match(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label = write_volume(folder / "labels/x.nii.gz", blob_label((9, 8, 7)))
    other = write_volume(folder / "predictions/y.nii.gz", blob_label((9, 8, 6)))
    assert run("evaluate", label, label) == 0
    assert "1.000" in capsys.readouterr().out
    assert "y" in refusal(capsys, "evaluate", "predictions", "labels")
    line = refusal(capsys, "evaluate", other, label)
    assert str(other) in line and str(label) in line and "9x8x6" in line
    assert "absent" in refusal(capsys, "evaluate", "absent", "labels")
