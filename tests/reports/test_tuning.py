from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.reports.records import assert_is_picture, cells, heads
from unet3d.reports.tuning import (
    mode_figure,
    mode_lines,
    mode_table,
    tuning_figure,
    tuning_lines,
    tuning_table,
    write_mode_picture,
    write_tuning_picture,
)

GIB = 1024**3


def row(cuts: list[int], count: int, seconds: float | None, marks: str = "") -> dict[str, Any]:
    devices = ["cuda:0", "cuda:1"] if cuts else ["cuda:0"]
    peaks = {device: (9 + index) * GIB for index, device in enumerate(devices)}
    return {
        "devices": devices,
        "cuts": cuts,
        "cut_before": [f"block.{cut}" for cut in cuts],
        "num_micro_batches": count,
        "seconds": seconds,
        "ratio": None if seconds is None else 0.4 / seconds,
        "peak_bytes": {} if seconds is None else peaks,
        "chosen": "chosen" in marks,
        "fastest": "fastest" in marks,
    }


@pytest.fixture
def record():
    return {
        "batch_size": 4,
        "size": [192, 192, 160],
        "precision": "bfloat16",
        "devices": ["NVIDIA H200", "NVIDIA H200"],
        "num_left_out": 0,
        "rows": [
            *(row([], *values) for values in ((1, None), (2, 0.4), (4, 0.43))),
            *(row([10], *values) for values in ((1, 0.45), (2, 0.35), (4, 0.3))),
            *(row([17], *values) for values in ((1, 0.46), (2, 0.34), (4, 0.25, "chosen fastest"))),
        ],
    }


def lines(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    (axes,) = figure.axes
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_the_picture_has_a_line_for_each_cut_and_one_for_one_device(record):
    figure = tuning_figure(record)
    assert lines(figure) == {
        "no cut, cuda:0\n(no point: out of memory)": ([2, 4], [400.0, 430.0]),
        "block.10 (10)": ([1, 2, 4], [450.0, 350.0, 300.0]),
        "block.17 (17)": ([1, 2, 4], [460.0, 340.0, 250.0]),
    }
    (axes,) = figure.axes
    assert axes.get_ylabel() == "time of a training step (ms)"
    assert axes.get_xlabel() == "micro-batches of a batch of 4"
    assert "192x192x160" in axes.get_title() and "2 x NVIDIA H200" in axes.get_title()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(lines(figure))
    assert [text.get_text() for text in axes.texts] == ["fastest: 250.0 ms"]
    looks = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
    assert len(looks) == 3  # no two lines look alike


def test_the_picture_replaces_an_older_one(tmp_path, record):
    path = tmp_path / "tuning.png"
    path.write_text("an older one")
    write_tuning_picture(record, path)
    assert_is_picture(path)


def test_the_table_has_every_number(record):
    table = tuning_table(record)
    assert "4 patches of 192x192x160 voxels, bfloat16" in str(table.title)
    assert heads(table) == [
        *("cut before", "microbatches", "ms a step", "against one device"),
        *("peak GiB cuda:0", "peak GiB cuda:1"),
    ]
    assert cells(table) == [
        ("no cut, cuda:0", "1", "out of memory", "–", "", ""),
        ("", "2", "400.0", "1.00x", "9.00", ""),
        ("", "4", "430.0", "0.93x", "9.00", ""),
        ("block.10 (10)", "1", "450.0", "0.89x", "9.00", "10.00"),
        ("", "2", "350.0", "1.14x", "9.00", "10.00"),
        ("", "4", "300.0", "1.33x", "9.00", "10.00"),
        ("block.17 (17)", "1", "460.0", "0.87x", "9.00", "10.00"),
        ("", "2", "340.0", "1.18x", "9.00", "10.00"),
        ("", "4*", "250.0", "1.60x", "9.00", "10.00"),
    ]
    assert "lower bound" not in str(table.caption)


def test_one_device_that_is_faster_is_marked_and_said(record):
    assert tuning_lines(record) == []
    assert str(tuning_table(record).caption).startswith("*: the fastest. Times are medians")
    alone = row([], 4, 0.2, "fastest")
    record["rows"][2:3] = [alone]
    record["rows"][-1]["fastest"] = False
    table = tuning_table(record)
    shown = [line[1] for line in cells(table)]
    assert shown == ["1", "2", "4*", "1", "2", "4", "1", "2", "4+"]
    assert "*: the fastest. +: the fastest on cuda:0,cuda:1." in str(table.caption)
    (line,) = tuning_lines(record)
    assert line.startswith("One device is faster here: 200.0 ms a step on cuda:0 against 250.0 on")
    assert "Leave out --parallel model" in line
    (axes,) = tuning_figure(record).axes
    ((label, place),) = ((text.get_text(), text.xy) for text in axes.texts)
    assert (label, place) == ("fastest: 200.0 ms", (4, 200.0))
    assert place[1] == min(min(times) for _, times in lines(tuning_figure(record)).values())
    _, *notes = axes.get_xlabel().splitlines()
    assert " ".join(notes) == line and len(notes) > 1


def test_what_there_was_no_time_or_no_memory_for_is_said(record):
    record["num_left_out"] = 3
    assert tuning_lines(record) == ["There was no time for 3 of 12 settings."]
    record["rows"] = [row([], 1, 0.4, "fastest"), row([10], 1, None)]
    record["num_left_out"] = 0
    assert tuning_lines(record) == ["Only one device, cuda:0, has the memory for it."]


def test_a_small_network_on_a_cpu_is_in_mib(record):
    record["rows"] = [row([], 1, 0.4)]
    record["rows"][0] |= {"devices": ["cpu"], "peak_bytes": {"cpu": 3 * 1024**2}}
    table = tuning_table(record)
    assert heads(table)[-1] == "peak MiB cpu"
    assert cells(table)[0][-1] == "3.00"
    assert "lower bound" in str(table.caption)


def test_where_nothing_fits_there_is_still_a_table_and_a_picture(record):
    for entry in record["rows"]:
        entry |= {
            "seconds": None,
            "ratio": None,
            "peak_bytes": {},
            "chosen": False,
            "fastest": False,
        }
    assert tuning_table(record).row_count == 9
    assert all(not times for _, times in lines(tuning_figure(record)).values())


def mode(name: str, seconds: float | None, predicted: float, fastest: bool) -> dict[str, Any]:
    return {
        "name": name,
        "parallel": name.partition(",")[0].partition(" ")[0],
        "seconds": seconds,
        "predicted_seconds": predicted,
        "peak_bytes": [] if seconds is None else [3 * GIB, 4 * GIB],
        "fastest": fastest,
    }


@pytest.fixture
def modes():
    return {
        "batch_size": 2,
        "size": [256, 256, 256],
        "precision": "bfloat16",
        "modes": [
            mode("none, on cuda:0", 0.12, 0.134, False),
            mode("data over 2 GPUs", None, 0.07, False),
            mode("spatial over 2 GPUs", 0.06, 0.071, True),
        ],
    }


def test_modes_have_a_row_each(modes):
    table = mode_table(modes)
    assert "2 patches of 256x256x256 voxels, bfloat16" in str(table.title)
    assert heads(table) == [
        *("parallel", "ms a step", "predicted", "against one device", "peak MiB a rank"),
    ]
    assert cells(table) == [
        ("none, on cuda:0", "120.0", "134.0", "1.00x", "4,096"),
        ("data over 2 GPUs", "out of memory", "70.0", "–", ""),
        ("spatial over 2 GPUs*", "60.0", "71.0", "2.00x", "4,096"),
    ]
    assert mode_lines(modes) == [
        "The fastest is spatial over 2 GPUs: 60.0 ms a step against 120.0 on one device."
    ]
    for row in modes["modes"]:
        row["fastest"] = row["parallel"] == "none"
    assert mode_lines(modes) == ["The fastest is none, on cuda:0: 120.0 ms a step."]


def test_modes_have_a_bar_each(modes, tmp_path):
    (axes,) = mode_figure(modes).axes
    assert [bar.get_width() for bar in axes.patches] == [120.0, 0, 60.0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[1] == "data over 2 GPUs\n(out of memory)"
    write_mode_picture(modes, tmp_path / "modes.png")
    assert_is_picture(tmp_path / "modes.png")
