"""``unet3d plan`` as a user meets it; its predictions and measurements are tested elsewhere."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import refusal, run, scan_array
from tests.images.samples import write_msd, write_volume
from tests.networks import write_checkpoint
from tests.products import by_night
from tests.trainings import contents
from unet3d.planning import comparison, placements, sweep
from unet3d.reports import figures, plan, tuning

SMALL = (
    *("--shape", "16,16,16", "--set", "model.base_channels=4", "--set", "model.num_levels=2"),
    *("--device-memory", "1"),
)


@pytest.fixture(autouse=True)
def largest(monkeypatch):
    """Skip the search for the largest volume and captured steps, which take long."""
    monkeypatch.setenv("UNET3D_CUDA_GRAPHS", "0")
    monkeypatch.setattr(placements, "largest_size", lambda *_: (64, 64, 32))


@pytest.fixture
def asked(monkeypatch):
    """Skip the prediction of memory, which takes long; plans still have settings and networks."""
    found = []

    def compare(config, network, *more, **watch):
        found.append((config, network))
        return [], {"notes": [], "ways": [], "choice": None}

    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr(plan, "plan_table", lambda record: "a table")
    return found


def test_every_option_changes_its_setting(asked):
    data = write_msd(Path("data").absolute(), shape=(24, 24, 24))
    options = (
        "--shape 16,16,24 --preset resenc-m --set memory.offload=skips --parallel model "
        "--devices 0,1,2,3 --replicas 2 --device-memory 80 --batch-size 6 --micro-batches 3 "
        "--set parallel.cuts=time"
    )
    assert run("plan", data, *options.split()) == 0
    ((config, network),) = asked
    parallel, training = config.parallel, config.training
    assert (parallel.mode, parallel.devices) == ("model", ("0", "1", "2", "3"))
    assert (parallel.cuts, parallel.replicas) == ("time", 2)
    assert (training.batch_size, training.micro_batches) == (6, 3)
    assert (config.patches.size, config.memory.offload) == ((16, 16, 24), "skips")
    assert config.data.dataset == data and network.topology.encoder == "residual"


@pytest.mark.nightly
def test_options_reach_the_prediction(capsys):
    options = ("--devices", "cuda:0,cuda:1", "--batch-size", 4, "--micro-batches", 2)
    assert run("plan", *SMALL, *options, "--parallel", "model", "--json", "plan.json") == 0
    record = json.loads(Path("plan.json").read_text())
    assert record["shape"] == [16, 16, 16] and record["batch_size"] == 4
    (asked,) = (way for way in record["ways"] if way["asked"])
    assert (asked["parallel"], asked["num_micro_batches"]) == ("model", 2)
    assert [slot["device"] for slot in asked["slots"]] == ["cuda:0", "cuda:1"]
    assert {slot["device_bytes"] for way in record["ways"] for slot in way["slots"]} == {2**30}
    start = "--parallel model --devices cuda:0,cuda:1 --micro-batches 2"
    line = f"{start}: up to 64x64x32 voxels (chosen)"
    assert line in capsys.readouterr().out.splitlines()


def test_a_file_that_cannot_be_written_is_named_before_anything_is_predicted(capsys, monkeypatch):
    monkeypatch.setattr(comparison, "compare", None)
    for name, reason in (("absent/p", "No such file or directory"), ("n" * 300, "File name too")):
        for options in (("--json", name), ("--measure", "--picture", name)):
            line = refusal(capsys, "plan", "--shape", "16,16,16", *options)
            assert f"cannot write {name}: {reason}" in line and line.endswith("; name another")


def test_results_are_not_written_over_what_they_are_made_from(capsys):
    write_msd(Path("data"))
    Path("my.yaml").write_text("{}")
    Path("plan.json").write_text("an older one, kept until the new one is whole")
    before = contents(Path())
    for options in (
        ("data", "--json", "data/dataset.json"),
        ("--config", "my.yaml", "--json", "my.yaml"),
        ("--config", "my.yaml", "--measure", "--picture", "my.yaml"),
        ("--measure", "--picture", "x", "--json", "x"),
        ("data", "--json", "data/imagesTr/case_0.nii.gz"),
        ("--predict", "data/imagesTr/case_0.nii.gz", "--json", "data/imagesTr/case_0.nii.gz"),
    ):
        assert "cannot hold the results" in refusal(capsys, "plan", *options)
    refusal(capsys, "plan", "--shape", "1,1,1", "--json", "plan.json", "--overwrite")
    assert contents(Path()) == before


def test_existing_files_are_replaced_only_if_that_is_asked_for(capsys, monkeypatch, asked):
    write_msd(Path("data"))
    scan = ("--predict", "data/imagesTr/case_0.nii.gz")
    for name in ("plan.json", "tuning.png", "p.png"):
        Path(name).write_text("of somebody else")
    before = contents(Path())
    monkeypatch.setattr(sweep, "measure", None)
    for options, name in (
        (("--shape", "16,16,16", "--json", "plan.json"), "plan.json"),
        ((*scan, "--json", "plan.json"), "plan.json"),
        (("--measure",), "tuning.png"),
        (("--measure", "--picture", "p.png"), "p.png"),
    ):
        line = refusal(capsys, "plan", *options)
        assert line == f"Error: {name} exists; add --overwrite to replace it"
    assert contents(Path()) == before and not asked
    Path("plan.json").chmod(0o640)
    assert run("plan", "--shape", "16,16,16", "--json", "plan.json", "--overwrite") == 0
    assert "ways" in json.loads(Path("plan.json").read_text())
    assert Path("plan.json").stat().st_mode & 0o777 == 0o640


def test_a_tuning_picture_is_replaced_only_if_that_is_asked_for(capsys, monkeypatch):
    picture = Path("tuning.png")
    monkeypatch.setattr(
        sweep,
        "measure",
        lambda *_: SimpleNamespace(
            to_dict=lambda: {}, best=lambda: 0, remember=lambda: Path("remembered")
        ),
    )
    monkeypatch.setattr(tuning, "tuning_table", lambda record: "a table")
    monkeypatch.setattr(tuning, "tuning_lines", lambda record: [])
    monkeypatch.setattr(tuning, "tuning_figure", lambda record: None)
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: path.write_text("a new one"))
    command = ("plan", *SMALL[:-2], "--devices", "cpu", "--measure")
    assert run(*command) == 0 and picture.read_text() == "a new one"
    picture.write_text("an old one")
    picture.chmod(0o604)
    assert "add --overwrite" in refusal(capsys, *command)
    assert picture.read_text() == "an old one"
    assert run(*command, "--overwrite") == 0 and picture.read_text() == "a new one"
    assert picture.stat().st_mode & 0o777 == 0o604


def test_a_scan_is_planned_with_the_settings_that_its_prediction_gets(capsys):
    write_checkpoint(Path("network.pt"), patch_size=(8, 8, 8))
    write_volume(Path("scan.nii.gz"), scan_array((16, 16, 24)))
    scan = ("--predict", "scan.nii.gz", "--checkpoint", "network.pt", "--devices", "cpu")
    window = ("--set", "inference.window=16,16,16", "--set", "inference.overlap=0.5")

    def planned(*options):
        assert run("plan", *scan, *options, "--json", "plan.json", "--overwrite") == 0
        return json.loads(Path("plan.json").read_text())

    large = planned(*window)
    assert (planned()["num_windows"], large["num_windows"]) == (3 * 3 * 5, 2)
    sums = planned(*window, "--skip-background")["slab_bytes"] - large["slab_bytes"]
    assert sums == 16 * 16 * 24 * 4  # of the weights of both windows, which are computed at once
    line = refusal(capsys, "plan", *scan, "--shape", "8,8,8")
    assert line == "Error: --predict does not use --shape; leave it out"


@pytest.mark.parametrize("amount", ["nan", "inf", "-inf", "1e+300", "0.0"])
def test_an_amount_of_memory_that_is_none_is_refused(amount, capsys):
    for options in (SMALL[:-2], ("--predict", "scan.nii.gz")):
        assert run("plan", *options, "--device-memory", amount) == 2
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith("Error: Invalid value for '--device-memory': ") and amount in line


def test_a_network_that_the_host_cannot_hold_is_refused(capsys):
    wide = ("--set", "model.channels=65536,65536")
    for options in ((), ("--measure",)):
        command = ("plan", "--devices", "cpu", "--shape", "8,8,8", *wide, *options)
        assert "a network with 65536, 65536 channels takes" in refusal(capsys, *command)


def test_the_table_comes_before_the_search_and_each_line_as_it_is_found(monkeypatch, capsys):
    shown = []

    def search(*_):
        shown.append(capsys.readouterr().out)
        return 64, 64, 32

    monkeypatch.setattr(placements, "largest_size", search)
    rounded = ("--shape", "15,16,16", *SMALL[2:])
    assert run("plan", *rounded, "--devices", "0", "--json", "plan.json") == 0
    note = "patches.size 15x16x16 is rounded up to 16x16x16, multiples of 2x2x2"
    assert note in shown[0]
    first, planned, link, beside = json.loads(Path("plan.json").read_text())["notes"]
    assert note in first and link == "link between the GPUs: not measured, NVLink is assumed."
    assert beside == "A GPU needs 1 GiB beside its peak; the column fits includes it."
    assert planned.startswith("patches of 16x16x16 voxels (as set), ")
    before_first, before_second, *_ = shown
    assert "Predicted memory" in before_first and "voxels\n" not in before_first
    assert before_second.startswith("--parallel none --devices cuda:0 --micro-batches 1: ")
    assert "ms a step, up to 64x64x32 voxels" in before_second
    assert len(before_second.splitlines()) == 1


@pytest.mark.nightly
def test_a_terminal_shows_what_is_being_done(monkeypatch, capsys):
    assert run("plan", *SMALL, "--devices", "0") == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # a log gets no live line
    assert "rounded" not in captured.out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert run("plan", *SMALL, "--devices", "0") == 0
    err = capsys.readouterr().err
    assert "predicting the memory of" in err
    assert "searching for the largest volume: model, 1" in err


@pytest.mark.parametrize(
    ("options", "channels", "is_cpu"),
    [
        (("--devices", "cpu"), [8, 16, 32], True),
        (("--devices", "cpu,0", "--device-memory", "1"), [32, 64, 128], False),
        *by_night(
            (("--device-memory", "1"), [32, 64, 128], False),
            (("--devices", "cpu", "--config", "empty.yaml"), [8, 16, 32], True),
        ),
        (("--devices", "cpu", "--set", "model.base_channels=32"), [32, 64, 128], True),
    ],
    ids=str,
)
def test_the_settings_are_those_that_training_would_take(options, channels, is_cpu, asked, capsys):
    Path("empty.yaml").touch()
    assert run("plan", "--shape", "16,16,16", *options) == 0
    ((_, network),) = asked
    assert list(network.topology.channels) == channels
    assert ("suit a CPU" in capsys.readouterr().out) == is_cpu
