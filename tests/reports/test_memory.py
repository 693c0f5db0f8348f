import math
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from rich.console import Console

from unet3d.inference.evaluation import CaseScores, Evaluation, LabelScore
from unet3d.memory.meter import SlotMemory, memory_record
from unet3d.memory.timeline import Mark, Timeline
from unet3d.parallel import Slot
from unet3d.reports.curves import (
    write_progress_picture,
)
from unet3d.reports.memory import (
    memory_table,
    write_memory_picture,
)
from unet3d.reports.scores import (
    evaluation_table,
)

MIB = 1024**2
ENCODER = ("encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1")
DECODER = ("decoder.0.skip", "decoder.0.up", "decoder.0.0", "decoder.0.1", "head")


def record(devices, memories):
    slots = [
        Slot(index=index, device=torch.device("cpu"), blocks=DECODER if index else ENCODER)
        for index in range(len(devices))
    ]
    predicted = [replace(one, peak_bytes=one.peak_bytes + MIB) for one in memories]
    made = memory_record("model", slots, dict(enumerate(memories)), dict(enumerate(predicted)))
    for slot, device in zip(made["slots"], devices, strict=True):
        slot["device"] = device  # a GPU's record, without a GPU
        slot["device_bytes"] = 80 * 1024 * MIB
    return made


def memory(activations_mib, parameters_mib=7, peak_mib=None):
    counted = activations_mib + 3 * parameters_mib
    peak = counted if peak_mib is None else peak_mib
    sizes = (*[parameters_mib] * 3, activations_mib, peak, peak)
    names = ("parameters", "gradients", "optimizer", "activations", "peak", "reserved")
    return SlotMemory(
        **{f"{name}_bytes": round(size * MIB) for name, size in zip(names, sizes, strict=True)}
    )


def printed(table, width):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def numbers_of(text, start):
    (line,) = (line for line in text.splitlines() if line.split()[:2] == start)
    return line.split()


def image_of(path: Path):
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return matplotlib.image.imread(path)[..., :3]


def share_of(pixels, colour):
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return float((np.abs(pixels - wanted).max(-1) < 0.01).mean())


def test_memory_table_has_a_row_for_each_slot_with_its_numbers():
    text = printed(memory_table(record(["cuda:0", "cuda:1"], [memory(180), memory(260)])), 120)
    assert "MiB" in text and "parallel mode model" in text
    assert numbers_of(text, ["0", "cuda:0"])[2:] == (
        "encoder.0.0 … encoder.1.1 7.00 7.00 7.00 180 201 202 81,920".split()
    )
    assert numbers_of(text, ["1", "cuda:1"])[2:] == (
        "decoder.0.skip … head 7.00 7.00 7.00 260 281 282 81,920".split()
    )
    assert "lower bound" not in text


def test_memory_table_shows_gib_where_there_are_many():
    text = printed(memory_table(record(["cuda:0"], [memory(20480, 64, 21504)])), 120)
    assert "GiB" in text
    numbers = "0.062 0.062 0.062 20.00 21.00 21.00 80.00".split()
    assert numbers_of(text, ["0", "cuda:0"])[-7:] == numbers


def test_memory_table_fits_a_narrow_terminal_whole():
    devices = [f"cuda:{index}" for index in range(8)]
    text = printed(memory_table(record(devices, [memory(60000)] * 8)), 80)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("para-", "gradi-", "opti-", "dicted", "decoder.0.skip", "58.59", "80.00"):
        assert word in text


def test_memory_notes_say_what_a_peak_is():
    cpu = printed(memory_table(record(["cpu", "cpu"], [memory(180), memory(260)])), 120)
    assert "On a CPU the peak is the sum of what is counted: a lower bound." in cpu
    assert "share" not in cpu
    shared = printed(memory_table(record(["cuda:0", "cuda:0"], [memory(18), memory(26)])), 120)
    assert "Slots that share a GPU each show the peak of the whole GPU." in shared


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_memory_picture_grows_with_the_slots(tmp_path, num_slots):
    devices = [f"cuda:{index}" for index in range(num_slots)]
    path = tmp_path / "memory.png"
    write_memory_picture(record(devices, [memory(300, 20, 500)] * num_slots), path)
    height, width, _ = image_of(path).shape
    assert width == 1080
    assert 280 < height < 1100
    assert abs(height - 120 * (1.9 + 0.85 * num_slots)) < 2


def test_memory_picture_draws_the_bytes_in_proportion(tmp_path):
    write_memory_picture(record(["cuda:0"], [memory(400, 100, 1000)]), tmp_path / "a.png")
    pixels = image_of(tmp_path / "a.png")
    blue, orange, grey = (share_of(pixels, c) for c in ("#0072B2", "#E69F00", "#C8C8C8"))
    # 100 parameters, 400 activations, 300 of the peak uncounted; the legend adds a little.
    assert orange / blue == pytest.approx(4, rel=0.2)
    assert grey / orange == pytest.approx(0.75, rel=0.2)


def test_memory_picture_of_slots_that_share_a_gpu_does_not_count_twice(tmp_path):
    both = record(["cuda:0", "cuda:0"], [memory(400, 0, 1000), memory(400, 0, 1000)])
    write_memory_picture(both, tmp_path / "a.png")
    pixels = image_of(tmp_path / "a.png")
    # 800 of the peak of 1000 are counted on the GPU, so 200 are left, not 600.
    assert share_of(pixels, "#C8C8C8") / share_of(pixels, "#E69F00") == pytest.approx(0.5, rel=0.2)


def timeline(num_micro_batches, device="cuda:0", slots=(0,), peak_mib=100):
    actions = [(None, "optimizer", None)]
    for number in reversed(range(num_micro_batches)):
        actions = [(0, "forward", number), (1, "loss", number), (1, "backward", number), *actions]
    marks = tuple(
        Mark(
            slot=slot,
            kind=kind,
            micro_batch=number,
            bytes=50 * MIB,
            peak_bytes=peak_mib * MIB,
        )
        for slot, kind, number in actions
    )
    return Timeline(device=device, slots=slots, marks=marks).to_dict()


@pytest.mark.parametrize("num_micro_batches", [1, 4, 8, 40])
def test_memory_picture_has_a_panel_for_each_timeline(tmp_path, num_micro_batches):
    made = record(["cuda:0", "cuda:1"], [memory(100), memory(100)])
    write_memory_picture(made, tmp_path / "without.png")
    made["timeline"] = [
        timeline(num_micro_batches),
        timeline(num_micro_batches, "cuda:1", (1,)),
    ]
    write_memory_picture(made, tmp_path / "with.png")
    without, pixels = image_of(tmp_path / "without.png"), image_of(tmp_path / "with.png")
    assert pixels.shape[0] - without.shape[0] == pytest.approx(2 * 2.3 * 120, abs=4)
    panels = pixels[without.shape[0] :]
    # Forward on slot 0, loss and backward on slot 1: three actions of each micro-batch, equal bars.
    forward, loss, backward = (share_of(panels, c) for c in ("#56B4E9", "#CC79A7", "#E69F00"))
    assert forward == pytest.approx(loss, rel=0.3)
    assert backward == pytest.approx(loss, rel=0.3)
    assert loss > 0.01


def test_memory_picture_shows_the_total_of_a_device_that_is_nearly_full(tmp_path):
    made = record(["cuda:0"], [memory(100)])
    shares = []
    for peak_mib in (100, 70 * 1024):  # of 80 GiB
        made["timeline"] = [timeline(1, peak_mib=peak_mib)]
        write_memory_picture(made, tmp_path / "a.png")
        shares.append(share_of(image_of(tmp_path / "a.png"), "#D55E00"))
    assert shares[0] == 0 < shares[1]


def lines(num_epochs, labels, every=2):
    made = []
    for epoch in range(1, num_epochs + 1):
        line = {
            "epoch": epoch,
            "step": 10 * epoch,
            "loss": math.exp(-epoch / 5),
            "seconds": 1.0,
            "learning_rate": 0.01 * (1 - epoch / num_epochs) ** 0.9,
        }
        if epoch % every == 0:
            line |= {"dice": {label: 1 - 1 / epoch for label in labels}, "mean_dice": 1 - 1 / epoch}
        made.append(line)
    return made


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param(lines(1, ["a"]), id="one epoch"),
        pytest.param(lines(2, ["a"]), id="one validation"),
        pytest.param(lines(40, ["brain", "ventricles", "lesion"]), id="some labels"),
        pytest.param(lines(10, [f"region {index}" for index in range(116)]), id="many labels"),
        pytest.param(lines(4, ["$\\frac", "under_score"]), id="names that look like formulas"),
    ],
)
def test_progress_picture_is_drawn_for(tmp_path, metrics):
    write_progress_picture(metrics, tmp_path / "progress.png")
    pixels = image_of(tmp_path / "progress.png")
    assert pixels.shape == (960, 1080, 3)
    assert share_of(pixels, "#0072B2") > 1e-5  # the loss


def test_progress_picture_leaves_gaps_where_a_label_was_in_no_case(tmp_path):
    metrics = lines(4, ["a", "b"])
    metrics[1]["dice"]["b"] = None
    metrics[3]["loss"] = math.nan
    write_progress_picture(metrics, tmp_path / "progress.png")
    assert share_of(image_of(tmp_path / "progress.png"), "#0072B2") > 1e-5


@pytest.mark.parametrize("dice", [0.0, 1.0])
def test_progress_picture_shows_a_line_at_the_end_of_the_scale_whole(tmp_path, dice):
    metrics = lines(8, ["a"], every=1)
    widths = []
    for value in (dice, 0.5):
        for line in metrics:
            line |= {"dice": {"a": None}, "mean_dice": value}
        write_progress_picture(metrics, tmp_path / "progress.png")
        black = image_of(tmp_path / "progress.png")[370:790].max(-1) < 0.05  # Dice and its frame
        widths.append(np.count_nonzero(black.sum(1) > 300))
    assert widths[0] == widths[1] > 3


def test_a_picture_replaces_the_last_one_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "progress.png"
    path.write_bytes(b"the picture of the epoch before")
    write_progress_picture(lines(3, ["a"]), path)
    image_of(path)
    assert list(tmp_path.iterdir()) == [path]


def evaluation(num_cases):
    scores = {
        1: LabelScore(dice=0.91234, hd95_mm=1.5, prediction_ml=12.3456, label_ml=12.0),
        255: LabelScore(dice=None, hd95_mm=None, prediction_ml=0.0, label_ml=0.0),
    }
    cases = [
        CaseScores(name=f"case_{i}", prediction=Path("p"), label=Path("l"), scores=scores)
        for i in range(num_cases)
    ]
    other = LabelScore(dice=0.5, hd95_mm=3.5, prediction_ml=1.0, label_ml=2.0)
    cases[-1] = CaseScores(
        name="last", prediction=Path("p"), label=Path("l"), scores={1: other, 255: other}
    )
    return Evaluation(cases=tuple(cases), label_values=(1, 255))


def test_evaluation_table_has_each_case_and_the_means():
    text = printed(evaluation_table(evaluation(2)), 80)
    assert "case_0 1 0.9123 1.50 12.346 12.000".split() == numbers_of(text, ["case_0", "1"])
    assert "255 – – 0.000 0.000".split() == numbers_of(text, ["255", "–"])
    assert "mean of 2 cases 1 0.7062 2.50 6.673 7.000".split() == numbers_of(text, ["mean", "of"])
    assert f"{(0.70617 + 0.5) / 2:.4f}" in text


def test_evaluation_table_of_one_case_repeats_no_means():
    text = printed(evaluation_table(evaluation(1)), 80)
    assert "mean of" not in text
    assert "Mean Dice over the labels: 0.5000" in text
