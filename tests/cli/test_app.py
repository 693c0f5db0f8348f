"""The command line as a whole: help, refusals, errors, and one job from images to scores."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import SMALL, labels_of, process_environment, refusal, run, wait_until
from tests.images.samples import (
    blob_label,
    noise,
    write_json,
    write_msd,
    write_nnunet,
    write_volume,
)
from tests.products import by_night
from tests.reports.records import assert_is_picture
from unet3d import __version__
from unet3d.errors import DatasetError

ROOT = Path(__file__).resolve().parents[2]


def test_help_is_instant():
    commands = ["train", "predict", "evaluate", "report", "check"]
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
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=process_environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"unet3d {__version__}\n")
    assert all(f"  {name} " in done.stdout for name in commands)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prediction",), "No such command 'prediction'"),
        (("train", "--epoch", "3"), "--epochs"),
        (("check", "my", "data"), "(data); use quotes if a name has spaces"),
        (("train", "data", "--resume", "runs/a"), "(runs/a); --resume takes no value"),
        (("train", "data", "--folds", "0", "1"), "(1); join numbers with commas, without spaces"),
        (("predict", ""), "an argument is empty; name what it stands for"),
        (("plan", "data", "--device-memory", "80GB"), "'80GB' is not a number; leave out units"),
        (("predict",), "Missing argument 'IMAGES...'"),
        (("predict", "a.nii", "--continue", "--overwrite"), "--continue keeps results and"),
        (("predict", "a.nii", "--scratch", __file__), "Invalid value for '--scratch': "),
        (("convert", "model", "--folds", "all,0", "-o", "a.pt"), "names no folds"),
        (("plan", "--checkpoint", "a.pt"), "--checkpoint needs --predict SCAN"),
        (("plan", "--skip-background"), "--skip-background needs --predict SCAN"),
        (("plan", "data", "--predict", "a.nii"), "drop DATASET and --measure"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, words, capsys):
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert words in errors and "Usage: unet3d" in errors


@pytest.mark.parametrize("world_size", ["2", "none"])
def test_a_rank_that_is_done_takes_nothing_down(world_size):
    """It exits without clean-up: libraries' threads may still use resources that ranks share."""
    code = (
        "import atexit, sys; atexit.register(print, 'taken down')\n"
        "from unet3d.__main__ import main; sys.argv[1:] = ['--version']; main()"
    )
    own = process_environment() | {"RANK": "0", "LOCAL_RANK": "0"}
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world_size)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    expected = [f"unet3d {__version__}", *([] if world_size == "2" else ["taken down"])]
    assert done.stdout.splitlines() == expected


def test_a_thread_that_waits_for_a_server_does_not_delay_the_end_after_a_signal():
    code = (
        "import concurrent.futures, sys, time, unet3d.cli.app\n"
        "from unet3d.__main__ import main\n"
        "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 50)\n"
        "unet3d.cli.app.main = lambda: sys.exit(130)\n"
        "print('stopped'); main()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout, done.stderr) == (130, "stopped\n", "")


def test_variables_of_ranks_that_contradict_one_another_are_one_line(monkeypatch, capsys):
    for name, value in (("RANK", "first"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    line = refusal(capsys, "predict", "scan.nii.gz")
    assert "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE is not a number" in line


def test_a_traceback_only_with_debug(monkeypatch, capsys):
    assert refusal(capsys, "check", "nowhere") == (
        "Error: there is no data set at nowhere; give its folder or its dataset.json"
    )
    for arguments in (("--debug", "check", "nowhere"), ("check", "nowhere", "--debug")):
        with pytest.raises(DatasetError, match="^there is no data set at nowhere"):
            run(*arguments)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/file")

    monkeypatch.setattr("unet3d.datasets.dataset.load_dataset", fail)
    line = refusal(capsys, "check", "nowhere")
    assert line == "Error: a/file: No space left on device; --debug shows where"
    with pytest.raises(OSError):
        run("--debug", "check", "nowhere")


IN_A_START = """
import os, runpy, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which tests may run under, ignores it
module, way, words = sys.argv[1], sys.argv[2], sys.argv[3:]
class Found:  # tells that a module begins to load, and waits for what happens then
    def find_spec(self, name, *_):
        if name == module:
            sys.meta_path.remove(self)
            Path("loading").touch()
            while not Path("go on").exists():
                time.sleep(0.01)
sys.meta_path.insert(0, Found())
sys.argv = ["unet3d", *words]
start = runpy.run_path if os.path.exists(way) else runpy.run_module
start(way, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "way", "stop"),
    [
        ("torch", "unet3d", signal.SIGINT),
        ("unet3d.cli.app", "unet3d", signal.SIGTERM),
        *by_night(
            ("numpy", str(ROOT / "cli.py"), signal.SIGTERM),
            ("torch", str(ROOT / "cli.py"), signal.SIGHUP),
            ("unet3d.training.job", "unet3d", signal.SIGHUP),
        ),
    ],
)
def test_a_signal_in_the_first_seconds_is_never_lost(module, way, stop):
    """The signal comes while a module loads."""
    words = ["train", *SMALL, "--epochs", "10000", "--output", "run"]
    command = [sys.executable, "-c", IN_A_START, module, way, *words]
    own = process_environment()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own) as process:
        try:
            wait_until(Path("loading").exists, process)
            process.send_signal(stop)
            Path("go on").touch()
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()  # a process that has lost the signal would train on
    assert process.returncode == 128 + stop
    assert errors.splitlines() == [f"Stopped by {stop.name}"]


def test_more_stages_than_blocks_are_refused(scan, predicting, capsys):
    stages = ("--parallel", "model", "--devices", ",".join(["cpu"] * 60))
    line = refusal(capsys, *predicting, scan, *stages)
    assert "60 devices are more than the 7 blocks of the network; name at most 7 devices" in line


def test_outputs_that_cannot_be_written_are_explained(folder, scan, predicting, capsys):
    write_msd(folder / "data")
    Path("file").touch()
    line = refusal(capsys, "train", "data", *SMALL, "--output", "file/run")
    assert "cannot write to file/run: " in line
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()  # before the data are prepared
    assert "file is not a writable folder" in refusal(capsys, *predicting, scan, "-o", "file/out")
    line = refusal(capsys, "train", "data", *SMALL, "--set", "data.cache=file")
    assert "cannot write the cache folder" in line and "set data.cache" in line


def write_two_channels(root):
    """Write two channels and labels 1 and 4; label 4 is visible only in the second channel."""
    names = [f"case_{number}" for number in range(4)]
    labels = {"background": 0, "left": 1, "right": 4}
    channels = {"0": "T1", "1": "T2"}
    write_nnunet(root, names, (12, 14, 10), channel_names=channels, labels=labels)
    for number, name in enumerate(names):
        label = blob_label((12, 14, 10), number)
        for channel in range(2):
            image = noise(label.shape, 2 * number + channel) / 3 + 90 * (label == channel + 1)
            write_volume(root / f"imagesTr/{name}_{channel:04d}.nii.gz", image, (1, 1, 2))
        label[label == 2] = 4
        write_volume(root / f"labelsTr/{name}.nii.gz", label, (1, 1, 2))
    write_json(root / "splits_final.json", [{"train": names[1:], "val": names[:1]}])
    return root


def test_train_predict_and_evaluate_two_channels(folder, capsys, caplog):
    """The whole job, on nnU-Net's layout, in two stages and with default names."""
    root = write_two_channels(folder / "raw data")
    two = ("--parallel", "model", "--devices", "cpu,cpu")
    better = ("--epochs", 30, "--set", "training.optimizer=adamw")
    assert run("train", root, *SMALL, *two, *better, "--set", "training.validate_every=30") == 0
    output = capsys.readouterr().out
    (run_folder,) = Path("runs").iterdir()
    assert run_folder.name.startswith("raw data-fold0-")
    assert "Memory in training" in output and "decoder.0.skip" in output
    assert f"To segment scans: unet3d predict SCAN -c '{run_folder}'" in output
    assert_is_picture(run_folder / "validation/worst.png")
    said = [message.partition(":")[0] for message in caplog.messages]
    first = said.index("data")
    assert said[first : first + 5] == ["data", "network", "each step", "runs on", "length"]
    where = caplog.messages[first + 3]
    assert where.startswith("runs on: cpu, cpu in ") and where.endswith("network on each")
    epochs = [record.message for record in caplog.records if record.message.startswith("epoch ")]
    assert len(epochs) == 30 and epochs[0].startswith("epoch 1/30: loss ")
    assert "Dice " in epochs[-1] and " 0 s left" in epochs[-1]
    assert any(message.startswith("    left 0.") for message in caplog.messages)

    options = ("-o", "out put", "--statistics", "--devices", "cpu")
    assert run("predict", root / "imagesTr", *options) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"using {run_folder}/checkpoint-latest.pt\n")
    assert len(output.splitlines()) == 5
    names = {f"case_{number}{end}" for number in range(4) for end in (".nii.gz", ".json")}
    assert {path.name for path in Path("out put").iterdir()} == names
    array = labels_of("out put/case_0.nii.gz")
    assert set(np.unique(array)) <= {0, 1, 4}
    statistics = json.loads(Path("out put/case_0.json").read_text())
    channels = [f"case_0_000{channel}.nii.gz" for channel in range(2)]
    assert [Path(name).name for name in statistics["image"]] == channels
    right, num_voxels = statistics["labels"]["right"], np.count_nonzero(array == 4)
    assert (right["value"], right["num_voxels"]) == (4, num_voxels)
    assert right["volume_ml"] == pytest.approx(num_voxels * 2 / 1000)

    assert run("evaluate", "out put", root / "labelsTr", "--json", "scores.json") == 0
    assert "case_0" in capsys.readouterr().out
    scores = json.loads(Path("scores.json").read_text())
    assert len(scores["cases"]) == 4
    assert scores["mean_dice"] > 0.6  # it has learned something
    label = labels_of(root / "labelsTr/case_0.nii.gz")
    by_hand = 2 * ((array == 4) & (label == 4)).sum() / ((array == 4).sum() + (label == 4).sum())
    assert scores["cases"][0]["labels"]["4"]["dice"] == pytest.approx(by_hand)
