import pytest

from tests.reports.records import assert_is_picture, cells, curves, legend
from unet3d.reports.figures import save_figure
from unet3d.reports.tuning import tuning_figure, tuning_lines, tuning_table

GIB = 1024**3


def row(name, cuts, count, seconds, marks="", predicted=None):
    mode = name.partition(",")[0].partition(" ")[0]
    devices = ["cuda:0"] if mode == "none" else ["cuda:0", "cuda:1"]
    return {
        **{"name": name, "parallel": mode, "devices": devices},
        **{"cuts": cuts, "cut_before": [f"block.{cut}" for cut in cuts]},
        **{"num_micro_batches": count, "seconds": seconds, "predicted_seconds": predicted},
        "ratio": None if seconds is None else 0.4 / seconds,
        "peak_bytes": [] if seconds is None else [9 * GIB, 10 * GIB][: len(devices)],
        **{mark: mark in marks for mark in ("chosen", "fastest")},
    }


ONE, STAGES = "none, on cuda:0", "model over cuda:0,cuda:1"


@pytest.fixture
def record():
    seconds = {(): (None, 0.4, 0.43), (10,): (0.45, 0.35, 0.3), (17,): (0.46, 0.34, 0.25)}
    rows = [
        row(STAGES if cuts else ONE, list(cuts), count, one, predicted=None if cuts else 0.42)
        for cuts, each in seconds.items()
        for count, one in zip((1, 2, 4), each, strict=True)
    ]
    rows[-1] |= {"chosen": True, "fastest": True}
    size = {"batch_size": 4, "size": [192, 192, 160], "precision": "bfloat16"}
    more = {"best_one_device_seconds": 0.4, "num_left_out": 0}
    return {**size, "devices": ["NVIDIA H200"] * 2, **more, "rows": rows}


def test_the_picture_has_a_line_for_each_cut_and_one_for_one_device(record, tmp_path):
    (axes,) = tuning_figure(record).axes
    assert curves(axes) == {
        "none, on cuda:0\n(no point: out of memory)": ([2, 4], [400.0, 430.0]),
        "cut before block.10 (10)": ([1, 2, 4], [450.0, 350.0, 300.0]),
        "cut before block.17 (17)": ([1, 2, 4], [460.0, 340.0, 250.0]),
    }
    assert axes.get_ylabel() == "time of a training step (ms)"
    first, *notes = axes.get_xlabel().splitlines()
    assert first == "micro-batches of a batch of 4"
    assert " ".join(notes) == tuning_lines(record)[0] and len(notes) > 1
    assert "192x192x160" in axes.get_title() and "2 x NVIDIA H200" in axes.get_title()
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "4"]
    assert legend(axes) == list(curves(axes))
    looks = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
    assert len(looks) == 3  # no two lines look alike
    save_figure(tuning_figure(record), tmp_path / "tuning.png")
    assert_is_picture(tmp_path / "tuning.png")


def test_the_table_has_every_number(record):
    table = tuning_table(record)
    assert "4 patches of 192x192x160 voxels, bfloat16" in table.title
    assert table.whole_heads == [
        *("parallel", "microbatches", "ms a step", "predicted", "against one device", "peak GiB"),
    ]
    assert cells(table) == [
        ("none, on cuda:0", "1", "out of memory", "420.0", "–", ""),
        ("", "2", "400.0", "420.0", "1.00x", "9.00"),
        ("", "4", "430.0", "420.0", "0.93x", "9.00"),
        ("cut before block.10 (10)", "1", "450.0", "–", "0.89x", "10.00"),
        ("", "2", "350.0", "–", "1.14x", "10.00"),
        ("", "4", "300.0", "–", "1.33x", "10.00"),
        ("cut before block.17 (17)", "1", "460.0", "–", "0.87x", "10.00"),
        ("", "2", "340.0", "–", "1.18x", "10.00"),
        ("", "4*", "250.0", "–", "1.60x", "10.00"),
    ]
    assert "lower bound" not in " ".join(table.notes)
    assert tuning_lines(record) == [
        "The fastest is cut before block.17 (17), with 4 micro-batches: 250.0 ms a step against "
        "400.0 on one device."
    ]


def test_one_device_that_is_faster_is_marked_and_said(record):
    record["rows"][2:3] = [row(ONE, [], 4, 0.2, "fastest")]
    record["rows"][-1]["fastest"] = False
    table = tuning_table(record)
    shown = [line[1] for line in cells(table)]
    assert shown == ["1", "2", "4*", "1", "2", "4", "1", "2", "4"]
    (line,) = tuning_lines(record)
    assert line.startswith("One device is faster here: 200.0 ms a step on cuda:0 against 250.0 on")
    assert "Leave out --parallel model" in line


def test_what_there_was_no_time_or_no_memory_for_is_said(record):
    record["num_left_out"] = 3
    assert tuning_lines(record)[1:] == ["Not measured, because time was up: 3 of 12 settings."]
    record["num_left_out"] = 0
    record["rows"] = [row(ONE, [], 1, 0.4, "fastest"), row(STAGES, [10], 1, None)]
    assert tuning_lines(record) == ["The step fits only on one device, cuda:0."]
    record["rows"] = [row(STAGES, [10], count, None) for count in (1, 2)]  # nothing fits a device
    assert len(cells(tuning_table(record))) == 2 and tuning_lines(record) == []
    assert all(not times for _, times in curves(tuning_figure(record).axes[0]).values())


def test_modes_have_names_and_a_cpu_has_a_lower_bound(record):
    record["rows"] = [
        row("none, on cpu", [], 1, 0.12),
        row("spatial over 2 CPUs", [], 1, 0.06, "chosen fastest"),
    ]
    record["rows"][0] |= {"devices": ["cpu"], "peak_bytes": [3 * 1024**2]}
    record["rows"][1]["peak_bytes"] = [2 * 1024**2] * 2
    table = tuning_table(record)
    assert [line[0] for line in cells(table)] == ["none, on cpu", "spatial over 2 CPUs"]
    assert [line[-1] for line in cells(table)] == ["3.00", "2.00"]
    assert table.whole_heads[-1] == "peak MiB" and "lower bound" in " ".join(table.notes)
    (axes,) = tuning_figure(record).axes
    assert curves(axes)["spatial over 2 CPUs"] == ([1], [60.0])
