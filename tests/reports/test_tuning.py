from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from unet3d.reports.tuning import tuning_figure, tuning_table, write_tuning_picture

GIB = 1024**3


def row(cuts: list[int], count: int, seconds: float | None, chosen: bool = False) -> dict[str, Any]:
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
        "chosen": chosen,
    }


@pytest.fixture
def record() -> dict[str, Any]:
    return {
        "batch_size": 4,
        "size": [192, 192, 160],
        "precision": "bfloat16",
        "devices": ["NVIDIA H200", "NVIDIA H200"],
        "rows": [
            *(row([], *values) for values in ((1, None), (2, 0.4), (4, 0.43))),
            *(row([10], *values) for values in ((1, 0.45), (2, 0.35), (4, 0.3))),
            *(row([17], *values) for values in ((1, 0.46), (2, 0.34), (4, 0.25, True))),
        ],
    }


def lines(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    (axes,) = figure.axes
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def test_the_picture_has_a_line_for_each_cut_and_one_for_one_device(record: dict[str, Any]) -> None:
    figure = tuning_figure(record)
    assert lines(figure) == {
        "no cut, cuda:0 (no point: out of memory)": ([2, 4], [400.0, 430.0]),
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
    assert [text.get_text() for text in axes.texts] == ["250.0 ms"]
    colours = [line.get_color() for line in axes.get_lines()]
    assert len(set(colours)) == 3


def test_the_picture_is_a_png_with_something_on_it(tmp_path: Path, record: dict[str, Any]) -> None:
    path = tmp_path / "tuning.png"
    path.write_text("an older one")
    write_tuning_picture(record, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = matplotlib.image.imread(path)[..., :3]
    assert pixels.shape[1] > 1000
    assert 0.005 < float((np.abs(pixels - 1).max(-1) > 0.1).mean()) < 0.2


def test_the_table_has_every_number(record: dict[str, Any]) -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(tuning_table(record))
    text = capture.get()
    assert "4 patches of 192x192x160 voxels, bfloat16" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["no", "cut,", "cuda:0", "1", "out", "of", "memory", "–"] in rows
    assert ["2", "400.0", "1.00x", "9.00"] in rows
    assert ["block.10", "(10)", "1", "450.0", "0.89x", "9.00", "10.00"] in rows
    assert ["4*", "250.0", "1.60x", "9.00", "10.00"] in rows
    assert "GiB" in text and "lower bound" not in text


def test_a_small_network_on_a_cpu_is_in_mib(record: dict[str, Any]) -> None:
    record["rows"] = [row([], 1, 0.4)]
    record["rows"][0] |= {"devices": ["cpu"], "peak_bytes": {"cpu": 3 * 1024**2}}
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(tuning_table(record))
    text = " ".join(capture.get().split())
    assert "peak MiB" in text and "3.00" in text and "lower bound" in text


def test_where_nothing_fits_there_is_still_a_table_and_a_picture(record: dict[str, Any]) -> None:
    for entry in record["rows"]:
        entry |= {"seconds": None, "ratio": None, "peak_bytes": {}, "chosen": False}
    assert tuning_table(record).row_count == 9
    assert all(not times for _, times in lines(tuning_figure(record)).values())
