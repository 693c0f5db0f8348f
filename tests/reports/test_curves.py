import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from tests.reports.records import assert_is_picture
from unet3d.reports.curves import progress_figure, write_progress_picture


def metrics_of(num_epochs: int, labels: Sequence[str], every: int = 2) -> list[dict[str, Any]]:
    made = []
    for epoch in range(1, num_epochs + 1):
        line: dict[str, Any] = {
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


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def test_each_curve_shows_its_numbers() -> None:
    metrics = metrics_of(6, ["brain", "lesion"])
    loss, dice, rate = progress_figure(metrics).axes
    epochs = [1, 2, 3, 4, 5, 6]
    assert list(curves(loss).values()) == [(epochs, [line["loss"] for line in metrics])]
    assert list(curves(rate).values()) == [(epochs, [line["learning_rate"] for line in metrics])]
    values = ([2, 4, 6], [1 - 1 / 2, 1 - 1 / 4, 1 - 1 / 6])
    assert curves(dice) == {name + "  0.833": values for name in ("brain", "lesion", "mean")}
    assert legend(dice) == list(curves(dice))
    labels = [axes.get_ylabel() for axes in (loss, dice, rate)]
    assert labels == ["training loss", "Dice in validation", "learning rate"]
    assert rate.get_xlabel() == "epoch"


def test_a_single_epoch_is_a_point_that_can_be_seen() -> None:
    loss, dice, _ = progress_figure(metrics_of(1, ["a"])).axes
    (line,) = loss.get_lines()
    assert line.get_marker() == "o"
    assert [text.get_text() for text in dice.texts] == ["no validation yet"]


def test_labels_too_many_to_tell_apart_are_not_named() -> None:
    names = [f"region {index}" for index in range(116)]
    dice = progress_figure(metrics_of(10, names)).axes[1]
    assert legend(dice) == ["mean of 116 labels  0.900"]
    assert len(dice.get_lines()) == 117


def test_a_label_that_is_in_no_case_leaves_a_gap() -> None:
    metrics = metrics_of(4, ["a", "b"])
    metrics[1]["dice"]["b"] = None
    metrics[3]["dice"]["a"] = None
    metrics[3]["loss"] = math.nan
    loss, dice, _ = progress_figure(metrics).axes
    np.testing.assert_array_equal(curves(dice)["b  0.750"][1], [math.nan, 0.75])
    np.testing.assert_array_equal(curves(dice)["a  –"][1], [0.5, math.nan])
    assert math.isnan(loss.get_lines()[0].get_ydata()[-1])


def test_a_label_that_begins_with_an_underline_is_named() -> None:
    assert legend(progress_figure(metrics_of(4, ["_left"])).axes[1])[0] == " _left  0.750"


def test_lines_at_both_ends_of_the_scale_are_inside_it() -> None:
    low, high = progress_figure(metrics_of(4, ["a"])).axes[1].get_ylim()
    assert low < 0 and high > 1


@pytest.mark.parametrize(
    "names",
    [["a"], ["$\\frac", "under_score"], ["肝臟"]],
    ids=["plain", "formulas", "another script"],
)
def test_a_picture_replaces_the_last_one_and_leaves_nothing_else(
    tmp_path: Path, names: list[str]
) -> None:
    path = tmp_path / "progress.png"
    path.write_bytes(b"the picture of the epoch before")
    write_progress_picture(metrics_of(4, names), path)
    assert_is_picture(path)
    assert list(tmp_path.iterdir()) == [path]
