"""The benchmarks run, at sizes where a CPU is enough, and count what they say they count."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unet3d.parallel.precision import cpu_has_bfloat16

ROOT = Path(__file__).resolve().parent.parent
CHANNELS = ("--channels", "4,8,8")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def run(script: str, json_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the record and the table of a benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--json", str(json_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(json_path.read_text()), done.stdout


@pytest.mark.slow
def test_step_compares_networks_or_says_why_not(tmp_path: Path) -> None:
    names = "ours,ours-float32,ours-level,dynunet-eager,basicunet-eager,nnunet-eager"
    small = ("--shape", "16,16,16", "--warmup", "1", "--steps", "2", *CHANNELS)
    record, table = run(
        "step.py", tmp_path / "step.json", "--device", "cpu", "--variants", names, *small
    )
    rows = {row["key"]: row for row in record["rows"]}
    assert list(rows) == names.split(",")
    for key in ("ours", "ours-level", "dynunet-eager"):
        assert rows[key]["seconds"] > 0 and len(rows[key]["all_seconds"]) == 2
        assert rows[key]["window_seconds"] > 0 and len(rows[key]["all_window_seconds"]) == 2
        assert rows[key]["num_operations"] == rows["ours"]["num_operations"]
        assert rows[key]["num_parameters"] == pytest.approx(
            rows["ours"]["num_parameters"], rel=0.02
        )
    assert rows["ours-float32"]["loss"] == pytest.approx(rows["ours-level"]["loss"], rel=1e-4)
    assert rows["ours"]["loss"] == pytest.approx(rows["ours-level"]["loss"], rel=2e-2)
    lowered = "bfloat16" if cpu_has_bfloat16() else "float32"
    assert [row.get("precision") for row in rows.values()][:3] == [lowered, "float32", "float32"]
    assert "5 levels, not 3" in rows["basicunet-eager"]["reason"]
    peer = rows["nnunet-eager"]
    assert "seconds" in peer or "dynamic_network_architectures" in peer["reason"]
    assert 0 < record["floor"]["floor"] < record["floor"]["longer_of_both"]
    assert "floor" in table and rows["basicunet-eager"]["reason"] in table


def test_a_shape_that_does_not_suit_the_levels_is_one_line() -> None:
    step = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--device", "cpu", *CHANNELS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*step, "--shape", "8,8,8"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("--shape 8,8,8 does not suit 3 levels: ")


@pytest.mark.slow
def test_capacity_ends_at_the_limits(tmp_path: Path) -> None:
    searched = ("--devices", "cpu", "--variants", "ours", "--unit", "16", *CHANNELS)
    roomy, _ = run(
        "capacity.py", tmp_path / "a.json", *searched, "--max-size", "32", "--memory-gib", "8"
    )
    (row,) = roomy["rows"]
    assert (row["size"], row["num_voxels"], row["complete"]) == (32, 32**3, True)
    narrow, table = run(
        "capacity.py", tmp_path / "b.json", *searched, "--max-size", "64", "--memory-gib", "0.1",
        "--attempts", "1",
    )  # fmt: skip
    (row,) = narrow["rows"]
    assert row["attempts"] == [{"size": 64, "trains": False, "reason": "out of memory"}]
    assert (row["size"], row["complete"]) == (0, False) and "not all sizes" in table


SMALL_TRAINING = (
    "--device", "cpu", "--shape", "16,16,16", "--volume", "32,32,32", "--channels", "4,8",
    "--num-cases", "3", "--turns", "2", "--steps", "4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.trains
def test_trainings_are_timed_with_what_a_patch_costs(tmp_path: Path) -> None:
    record, table = run(
        "training.py", tmp_path / "training.json", *SMALL_TRAINING, "--workers", "0,1",
        "--patches", "--nnunet", "--cache", str(tmp_path / "cache"),
        "--and", "--augmentation mlperf --batch-size 3 --workers 0",
    )  # fmt: skip
    patch, peer_patch, *trainings = record["rows"]
    ways = [(row["way"], row["num_workers"], row["batch_size"]) for row in trainings]
    assert ways[:4] == [("ours", 0, 2), ("ours", 1, 2), ("nnU-Net", 0, 2), ("nnU-Net", 1, 2)]
    assert ways[4:] == [("ours", 0, 3)] and trainings[-1]["augmentation"] == "mlperf"
    assert 0 < patch["cut_seconds"] < patch["augmented_seconds"]
    assert patch["prepared_bytes"] > 3 * 32**3
    for row in (trainings[0], trainings[1], trainings[-1]):
        assert (len(row["all_seconds"]), len(row["all_alone_seconds"])) == (2, 3)
        assert row["samples_per_second"] > 0 and row["augmented_on"] == "cpu"
        ratio = row["samples_per_second"] / row["alone_samples_per_second"]
        assert row["ratio"] == pytest.approx(ratio) and 0 <= row["waiting_share"] < 1
    for row in (peer_patch, *trainings[2:4]):
        assert "nnunetv2" in row.get("reason", "") or row["augmentation"] == "nnU-Net's"
    assert str(tmp_path) not in json.dumps(record) and "76 samples a second" in table


@pytest.mark.slow
@pytest.mark.trains
def test_whole_runs_are_compared_with_that_on_one_device(tmp_path: Path) -> None:
    record, _ = run(
        "training.py", tmp_path / "runs.json", *SMALL_TRAINING, "--workers", "",
        "--runs", "cpu", "cpu,cpu",
    )  # fmt: skip
    one, two = record["rows"]
    assert (one["num_devices"], two["num_devices"]) == (1, 2)
    assert len(one["all_seconds"]) == 2 and one["steps_of_epoch"] == two["steps_of_epoch"] >= 16
    assert two["ratio"] == pytest.approx(
        two["samples_per_second"] / (2 * one["samples_per_second"])
    )


class SlowLoop:
    """Batches that take three times as long as a step."""

    class Executor:
        input_device = torch.device("cpu")

    executor = Executor()
    num_steps = 12

    def __init__(self) -> None:
        self.loader = self
        self.epochs: list[int] = []

    def epoch(self, epoch: int, first_step: int) -> Any:
        self.epochs.append(epoch)
        for _ in range(first_step, self.num_steps):
            time.sleep(0.06)
            yield small_batch()

    def _step(self, batch: object) -> None:
        time.sleep(0.02)


def small_batch() -> Any:
    from unet3d.volumes.patches import Batch

    return Batch(image=torch.zeros(1, 1, 2, 2, 2), target=torch.zeros(1, 2, 2, 2), names=("a",))


def test_a_loader_that_is_slow_from_its_first_batch_on_is_seen_to_be(scripts: None) -> None:
    from turns import Measurement

    loop: Any = SlowLoop()
    measurement = Measurement(loop, small_batch(), num_workers=2, num_steps=8)
    measurement.start_loader()
    alone, loaded = measurement.alone(4), measurement.loaded()
    assert 0.02 <= alone["seconds"] < 0.04 and loaded["seconds"] >= 0.08
    assert loaded["waiting_share"] == pytest.approx(0.75, abs=0.1)
    # What a loader makes ahead for the next epoch is not there when the turn begins.
    measurement.loaded()
    assert min(after - before for before, after in itertools.pairwise(loop.epochs)) > 1


def test_mlperf_changes_only_what_its_reference_changes(scripts: None, tmp_path: Path) -> None:
    from training import make_parser, values_of

    from unet3d.config import Config

    chosen = ["--augmentation", "mlperf", "--augmentation-device", "cpu"]
    values = values_of(make_parser().parse_args(chosen), tmp_path)
    patches = Config().with_values(values).patches
    augmentation = patches.augmentation.model_dump()
    likely = {name for name in augmentation if name.endswith("_probability") and augmentation[name]}
    assert likely == {"noise_probability", "brightness_probability"}
    assert augmentation["mirror_axes"] == ("x", "y", "z") and augmentation["device"] == "cpu"
    assert patches.foreground_fraction == 0.4


def test_a_record_names_no_folder_of_the_machine(
    scripts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common import command

    given = ["/home/me/benchmarks/training.py", "--cache", "/home/me/volumes", "--runs", "0,1"]
    monkeypatch.setattr(sys, "argv", [*given, "--and", "--workers 4"])
    assert command() == ("benchmarks/training.py --cache volumes --runs 0,1 --and '--workers 4'")


@pytest.mark.slow
def test_prepared_compares_folders_and_cuts(tmp_path: Path) -> None:
    record, table = run(
        "prepared.py", tmp_path / "prepared.json", "--phantom", "40,32,32", "--phantom", "16,16,16",
        "--shape", "24,24,24", "--cuts", "4",
    )  # fmt: skip
    rows = record["rows"]
    assert list(rows) == ["phantom 40x32x32", "phantom 16x16x16"]
    row = rows["phantom 40x32x32"]
    assert row["num_voxels"] == 2 * 40 * 32 * 32
    assert row["ours_image_bytes"] == pytest.approx(2 * row["num_voxels"], rel=0.01)
    assert row["plain_bytes"] == pytest.approx(5 * row["num_voxels"], rel=0.01)
    assert row["ours_label_bytes"] < 0.2 * row["num_voxels"]
    what = ("image", "label", "foreground", "components")
    parts = sum(row[f"ours_{name}_bytes"] for name in what)
    assert 0 < row["ours_bytes"] - parts < 5000  # the records
    assert row["cut_seconds"]["ours"] > 0 and row["cut_seconds"]["plain"] > 0
    assert rows["phantom 16x16x16"]["cut_seconds"] is None
    assert "nnunet_bytes" in row or "nnunetv2" in row["nnunet_reason"]
    assert "phantom 40x32x32" in table


@pytest.mark.slow
def test_windows_are_timed_by_their_number(tmp_path: Path) -> None:
    record, _ = run(
        "windows.py", tmp_path / "windows.json", "--device", "cpu", "--shape", "16,16,16",
        "--max-voxels", "20000", "--repeats", "1", *CHANNELS,
    )  # fmt: skip
    assert set(record["seconds_a_window"]) == {"1", "2", "4"}
    assert min(record["seconds_a_window"].values()) > 0


def operations(function: Callable[..., Tensor], *given: object) -> int:
    """Return the operations of a function and of its gradients."""
    with FlopCounterMode(display=False) as counter:
        function(*given).sum().backward()
    return counter.get_total_flops()


def apart(x: Tensor, up: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
    return F.conv3d(F.conv_transpose3d(x, up, stride=stride), weight, padding=1)


def together(x: Tensor, up: Tensor, weight: Tensor, stride: tuple[int, ...]) -> Tensor:
    return F.conv_transpose3d(x, F.conv3d(up, weight, padding=2), stride=stride, padding=1)


def test_the_floor_counts_the_operations_that_pytorch_counts(scripts: None) -> None:
    from floor import Rates, count_passes, floor_seconds
    from peers import Problem

    from unet3d.model import UNet3d

    problem = Problem(size=(32, 16, 16), batch_size=2, channels=(4, 8, 8))
    with torch.device("meta"):
        model = UNet3d(problem.topology)
        image = torch.empty(2, 1, *problem.size)
        joins = [
            (level, torch.empty(2, level["up"].in_channels, *size), tuple(level["up"].stride))
            for level, size in zip(
                model.decoder.levels.values(), [(8, 4, 4), (16, 8, 8)], strict=True
            )
        ]
    num_operations = operations(model, image)
    # Upsampling and the convolution behind it are one where that takes fewer operations.
    for level, x, stride in joins:
        given = (x.requires_grad_(), level["up"].weight, level["units"][0].conv.weight, stride)
        num_operations -= max(operations(apart, *given) - operations(together, *given), 0)
    passes = count_passes(problem, 2)
    assert sum(one.num_operations for one in passes) == num_operations
    # One voxel of float32 in each of 4 channels is 16 bytes.
    moved = {
        (one.layer, one.direction): one.moved_bytes / (16 * 2 * 32 * 16**2)
        for one in count_passes(problem, 4)
    }
    for name, forward, backward in (
        ("encoder.0.0", 3, 4),
        ("encoder.0.1", 3, 5),
        ("decoder.0.0", 3, 5),
        ("decoder.0.1", 2, 3),
    ):
        assert moved[f"{name}.norm", "forward"] == forward
        assert moved[f"{name}.norm", "backward"] == backward
    (update,) = (one for one in passes if one.layer == "optimizer")
    assert update.moved_bytes == pytest.approx(
        20 * sum(parameter.numel() for parameter in model.parameters()), rel=0.01
    )
    arithmetic_only = floor_seconds(
        passes, Rates(operations_per_second=1.0, bytes_per_second=float("inf"))
    )
    assert set(arithmetic_only.values()) == {num_operations}


@pytest.mark.parametrize("start", [32, 160, 192, 224, 480])
def test_search_finds_the_largest_from_near_and_far(scripts: None, start: int) -> None:
    from capacity import Search

    found = Search(attempt=lambda size: {"trains": size <= 192}, unit=32, max_size=512, num_left=10)
    found.run(start)
    assert (found.largest, found.too_large, found.is_complete) == (192, 224, True)
    sizes = [one["size"] for one in found.tried]
    assert len(set(sizes)) == len(sizes) <= (3 if 160 <= start <= 224 else 9)


def test_search_admits_what_it_does_not_know(scripts: None) -> None:
    from capacity import Search

    found = Search(attempt=lambda size: {"trains": size <= 192}, unit=32, max_size=512, num_left=2)
    found.run(480)
    assert (found.largest, found.is_complete) == (0, False)
    late = Search(
        attempt=lambda size: {"trains": False, "reason": "no time left"},
        unit=32,
        max_size=512,
        num_left=9,
    )
    late.run(192)
    assert len(late.tried) == 1 and not late.is_complete


def test_chart_shows_figures_and_reasons(scripts: None, tmp_path: Path) -> None:
    from chart import draw, panels_of

    rows = [
        {"key": "ours", "seconds": 0.1, "peak_bytes": 2**30},
        {"key": "other", "reason": "OutOfMemoryError: none left"},
    ]
    steps = {"devices": ["cpu"], "size": [8, 8, 8], "batch_size": 1, "floor": {"floor": 0.05}}
    times, memory = panels_of({**steps, "rows": rows})
    assert times.bars == {"ours": 100.0, "other": None} and times.floor == 50.0
    assert memory.bars == {"ours": 1.0, "other": None}
    assert times.reasons["other"] == "OutOfMemoryError: none left"
    cubes = [{"key": "ours", "num_voxels": 2_000_000}, {"key": "other", "num_voxels": 0}]
    (largest,) = panels_of({"devices": ["cpu", "cpu"], "rows": cubes})
    assert largest.bars == {"ours": 2.0, "other": None}
    draw([times, memory, largest], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_frontier_measures_every_setting_that_a_device_has(tmp_path: Path) -> None:
    record, table = run(
        "frontier.py", tmp_path / "frontier.json", "--device", "cpu", "--shape", "16,16,16",
        "--shape", "32,16,16", "--warmup", "1", "--steps", "2", *CHANNELS,
        "--png", str(tmp_path / "frontier.png"),
    )  # fmt: skip
    assert [panel["size"] for panel in record["sizes"]] == [[16] * 3, [32, 16, 16]]
    for panel in record["sizes"]:
        rows = {row["key"]: row for row in panel["rows"]}
        assert list(rows) == ["norm", "level", "off"]  # a CPU's memory is the host's
        assert all(len(row["all_seconds"]) == 2 for row in rows.values())
        assert rows["level"]["loss"] == rows["norm"]["loss"] == rows["off"]["loss"]
        assert rows["level"]["peak_bytes"] < rows["norm"]["peak_bytes"]
        assert rows["level"]["beaten_by"] == []
    assert len(table.splitlines()) == 1 + 2 * 3
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_a_setting_is_beaten_by_one_that_costs_no_more_of_either(scripts: None) -> None:
    from frontier import mark_beaten

    costs = {"a": (1.0, 8), "b": (2.0, 4), "c": (2.0, 5), "d": (3.0, 9), "twin of b": (2.0, 4)}
    rows: list[dict[str, Any]] = [
        {"key": key, "seconds": seconds, "peak_bytes": peak}
        for key, (seconds, peak) in costs.items()
    ]
    mark_beaten([*rows, {"key": "e", "reason": "out of memory"}])
    beaten = {row["key"]: row["beaten_by"] for row in rows}
    assert beaten == {
        "a": [],
        "b": [],
        "c": ["b", "twin of b"],
        "d": ["a", "b", "c", "twin of b"],
        "twin of b": [],
    }


def test_frontier_shows_what_does_not_fit(
    scripts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import frontier
    from peers import Problem, Variant

    class Large:
        def __init__(self, *_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(frontier, "Trainee", Large)
    variant = Variant(key="norm", network="ours")
    problem = Problem(size=(16, 16, 16), batch_size=1, channels=(4, 8, 8))
    row = frontier.measure(variant, problem, torch.device("cpu"), 1, 1)
    assert row["reason"] == "out of memory" and "seconds" not in row
    assert row["predicted_peak_bytes"] > 0
    fits = {"key": "level", "seconds": 0.1, "peak_bytes": 2**30, "beaten_by": []}
    record = {
        "devices": ["a GPU"],
        "batch_size": 1,
        "sizes": [{"size": [16] * 3, "rows": [fits, row]}],
    }
    frontier.draw(record, tmp_path / "a.png")
    frontier.draw({**record, "sizes": [{"size": [16] * 3, "rows": [row]}]}, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_offload_is_measured_where_a_device_has_memory_of_its_own(scripts: None) -> None:
    from frontier import settings_for

    on_gpu = settings_for(torch.device("cuda", 0))
    assert ("norm", "skips") in on_gpu and ("level", "skips") not in on_gpu
    assert all(offload == "none" for _, offload in settings_for(torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.trains
def test_volumes_over_several_devices_are_compared_with_one(tmp_path: Path) -> None:
    small = ("--devices", "cpu,cpu", "--steps", "2", "--repeats", "1", *CHANNELS)
    parts = ("--parts", "messages,step,predict", "--sizes", "16,32")
    record, table = run("spatial.py", tmp_path / "spatial.json", *small, *parts)
    assert "error" not in record and all(row["launched_us"] > 0 for row in record["messages"])
    assert [row["size"] for row in record["step"]] == [[16] * 3, [32] * 3]
    for row in record["step"]:
        assert row["seconds"] > 0 and row["one"]["seconds"] > 0
        assert row["loss"] == pytest.approx(row["one"]["loss"], rel=1e-3)
    (predicted,) = record["predict"]
    assert predicted["same_label"] > 0.98 and "predict 32: " in table
    largest, _ = run(
        "spatial.py", tmp_path / "largest.json", *small, "--parts", "largest", "--sizes", "32"
    )
    assert [row["trains"] for row in largest["largest"]] == [True]


def test_scaling_prints_what_the_planner_predicts(scripts: None) -> None:
    from scaling import comparison, largest, predicted, rows, step_of

    channels = (4, 8, 8)
    head, one, two = (line.split() for line in rows((32,), (1, 2), channels, "norm"))
    assert head == ["cube", "GPUs", "ms", "ratio", "GiB", "each"]
    assert one[:2] == ["32", "1"] and one[3] == "1.00x" and two[:2] == ["32", "2"]
    assert float(two[4]) <= float(one[4])
    _, found = (line.split() for line in largest((4.0,), (1, 2), channels, "norm"))
    assert found[0] == "4.0" and int(found[2]) >= int(found[1]) > 32
    measured = []
    for count in (1, 2):
        milliseconds, gib = predicted(step_of(32, count, channels, "norm"))
        measured.append({"seconds": milliseconds / 1100, "peak_bytes": gib * 2**30})
    row = {**measured[1], "peak_bytes": [0, measured[1]["peak_bytes"]], "one": measured[0]}
    record = {"devices": ["", ""], "step": [{**row, "size": [32] * 3}]}
    _, *compared = (line.split() for line in comparison(record, channels, "norm"))
    assert [line[1] for line in compared] == ["1", "2"]
    assert all((line[4], line[6]) == ("+10.0%", "+0.0%") for line in compared)


def test_segmentations_are_compared_by_voxels_and_labels(scripts: None) -> None:
    from nnunet_models import agreement

    reference = np.zeros((2, 2, 4), np.uint8)
    reference[0] = 1
    reference[1, 0, 0] = 2
    found = reference.astype(np.int16)
    found[0, 0, 0] = 0  # of the eight voxels of label 1
    found[1, 0, 1] = 2
    found[1, 1, 0] = 4
    compared = agreement(found, reference)
    assert compared["different_voxels"] == 3 and compared["equal_voxels"] == 13 / 16
    assert compared["dice"] == pytest.approx({"1": 14 / 15, "2": 2 / 3, "4": 0})


def test_a_phantom_has_every_organ_at_its_size(scripts: None) -> None:
    from nnunet_phantoms import LABELS, phantom

    image, label = phantom((128, 96, 96), 3.2, 0)
    fine, fine_label = phantom((256, 192, 192), 1.6, 0)
    millilitres = np.bincount(label.ravel()) * 3.2**3
    assert np.bincount(fine_label.ravel()) * 1.6**3 == pytest.approx(millilitres, rel=0.1)
    assert image.dtype == fine.dtype == np.int16 and len(millilitres) == len(LABELS)
    for name, number in (("liver", 110), ("kidneys", 180), ("vertebrae", 400), ("aorta", 250)):
        assert image[label == LABELS[name]].mean() == pytest.approx(number, abs=1)
    assert image[0, 0].mean() == pytest.approx(-1000, abs=5)


def test_the_memory_of_processes_counts_those_that_they_start(scripts: None) -> None:
    from nnunet_models import run as run_watched

    holds = "import time; held = bytearray(300 * 2**20); time.sleep(4)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    taken = run_watched([sys.executable, "-c", starts], {}, 1, on_gpu=False)
    assert taken["host_bytes"] > 300 * 2**20 > taken["first_process_bytes"] > 0
    assert taken["seconds"] > 4 and taken["gpu_bytes"] == 0
    failed = run_watched([sys.executable, "-c", "raise SystemExit(3)"], {}, None, on_gpu=False)
    assert failed["reason"] == "it ended with 3"


@pytest.mark.slow
def test_a_model_of_random_weights_is_measured_alone(tmp_path: Path) -> None:
    record, table = run(
        "nnunet_models.py", tmp_path / "models.json", str(tmp_path / "models"), "--device", "cpu",
        "--scan", "40,32,32", "--spacing", "0.8", "--classes", "5", "--channels", "4,8",
        "--window", "16,16,16", "--ways", "plain", "--nnunet-repeats", "0", "--repeats", "2",
        "--precision", "auto,float32",
    )  # fmt: skip
    (row,) = record["rows"]
    assert "seconds" not in row["nnunet"] and row["model"] == "random-5"
    for one in row["ours"].values():
        assert len(one["runs"]) == 2 and one["seconds"] == one["runs"][1]["seconds"]
        assert one["host_bytes"] > 2**27 and "to_nnunet" not in one and "ratio" not in one
    assert str(tmp_path) not in json.dumps(record) and "unet3d, float32" in table


@pytest.mark.slow
@pytest.mark.trains
def test_models_that_nnunet_has_trained_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("nnunetv2", reason="needs nnU-Net")
    models = tmp_path / "models"
    train = [sys.executable, str(ROOT / "benchmarks" / "nnunet_phantoms.py"), str(models)]
    small = ("--cases", "3", "--side", "48", "--epochs", "1", "--steps", "4", "--device", "cpu")
    network = ("--patch", "32,32,32", "--channels", "8,16,32")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*train, *small, *network], env=environment, check=True, timeout=400)
    record, _ = run(
        "nnunet_models.py", tmp_path / "models.json", str(models), "--device", "cpu",
        "--scan", "48,48,32", "--spacing", "0.8", "--models", "0.8", "--ways", "mirrored",
        "--precision", "float32", "--nnunet-precision", "float32-sums", "--repeats", "1",
        "--threads", "1",
    )  # fmt: skip
    (row,) = record["rows"]
    ours = row["ours"]["float32"]
    assert ours["ratio"] == pytest.approx(ours["seconds"] / row["nnunet"]["seconds"])
    # After so short a training the logits of two labels are often almost equal.
    assert ours["to_nnunet"]["equal_voxels"] > 0.999


def test_labels_are_compared_with_those_of_nnunet(tmp_path: Path) -> None:
    recorded = ROOT / "tests/recorded/nnunet/isotropic"
    record, table = run(
        "nnunet_agreement.py", tmp_path / "agreement.json", "--device", "cpu",
        str(recorded / "nnUNetTrainer__nnUNetPlans__3d_fullres"),
        str(recorded / "scans"), str(recorded / "segmentations/plain"),
    )  # fmt: skip
    (row,) = record["rows"]
    assert row["cases"] == len(list((recorded / "segmentations/plain").glob("*.nii.gz")))
    assert row["equal_voxels"] > 0.9999
    assert list(row["dice"]) == ["ball", "cube", "rod"]
    assert min(row["dice"].values()) > 0.9995
    assert "99.99" in table or "100.0" in table
    assert str(ROOT) not in record["command"]
