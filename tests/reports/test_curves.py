import math
from collections.abc import Sequence
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
            line["validation_loss"] = 1.5
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


def test_each_curve_shows_its_numbers():
    metrics = metrics_of(6, ["brain", "lesion"])
    loss, dice, rate = progress_figure(metrics, "run").axes
    epochs = [1, 2, 3, 4, 5, 6]
    assert curves(loss) == {
        "training  0.301": (epochs, [line["loss"] for line in metrics]),
        "validation  1.500": ([2, 4, 6], [1.5, 1.5, 1.5]),
    }
    assert legend(loss) == list(curves(loss))
    assert list(curves(rate).values()) == [(epochs, [line["learning_rate"] for line in metrics])]
    values = ([2, 4, 6], [1 - 1 / 2, 1 - 1 / 4, 1 - 1 / 6])
    best = {"best  0.833\nin epoch 6": ([6], [1 - 1 / 6])}
    assert curves(dice) == {
        **{name + "  0.833": values for name in ("brain", "lesion", "mean")},
        **best,
    }
    assert legend(dice) == list(curves(dice))
    labels = [axes.get_ylabel() for axes in (loss, dice, rate)]
    assert labels == ["loss", "Dice in validation", "learning rate"]
    assert rate.get_xlabel() == "epoch"


def test_a_single_epoch_is_a_point_that_can_be_seen():
    loss, dice, _ = progress_figure(metrics_of(1, ["a"]), "run").axes
    (line,) = loss.get_lines()
    assert line.get_marker() == "o"
    assert [text.get_text() for text in dice.texts] == ["no validation yet"]


def test_labels_too_many_to_tell_apart_are_not_named():
    names = [f"region {index}" for index in range(116)]
    dice = progress_figure(metrics_of(10, names), "run").axes[1]
    assert legend(dice) == ["mean of 116 labels  0.900", "best  0.900\nin epoch 10"]
    assert len(dice.get_lines()) == 118


def test_a_label_that_is_in_no_case_leaves_a_gap():
    metrics = metrics_of(4, ["a", "b"])
    metrics[1]["dice"]["b"] = None
    metrics[3]["dice"]["a"] = None
    metrics[3]["loss"] = math.nan
    loss, dice, _ = progress_figure(metrics, "run").axes
    np.testing.assert_array_equal(curves(dice)["b  0.750"][1], [math.nan, 0.75])
    np.testing.assert_array_equal(curves(dice)["a  –"][1], [0.5, math.nan])
    assert math.isnan(loss.get_lines()[0].get_ydata()[-1])


def test_the_first_of_the_best_validations_is_marked():
    metrics = metrics_of(10, ["a"])
    for line, mean in zip(metrics[1::2], (0.5, 0.75, None, 0.75, 0.25), strict=True):
        line["mean_dice"] = mean
    figure = progress_figure(metrics, "runs/mine: fold 0 of heads")
    assert curves(figure.axes[1])["best  0.750\nin epoch 4"] == ([4], [0.75])
    assert figure.get_suptitle() == "runs/mine: fold 0 of heads"


def test_runs_without_a_validation_loss_have_no_curve_of_it():
    metrics = metrics_of(4, ["a"])
    for line in metrics:
        line.pop("validation_loss", None)
    assert list(curves(progress_figure(metrics, "run").axes[0])) == ["training  0.449"]


def test_curves_can_be_told_apart_without_colours():
    lines = progress_figure(metrics_of(4, [str(n) for n in range(12)]), "run").axes[1].get_lines()
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines[:12]}) == 12


def test_a_label_that_begins_with_an_underline_is_named():
    assert legend(progress_figure(metrics_of(4, ["_left"]), "run").axes[1])[0] == " _left  0.750"


def test_lines_at_both_ends_of_the_scale_are_inside_it():
    low, high = progress_figure(metrics_of(4, ["a"]), "run").axes[1].get_ylim()
    assert low < 0 and high > 1


@pytest.mark.parametrize(
    "names",
    [["a"], ["$\\frac", "under_score"], ["肝臟"]],
    ids=["plain", "formulas", "another script"],
)
def test_a_picture_replaces_the_last_one_and_leaves_nothing_else(tmp_path, names):
    path = tmp_path / "progress.png"
    path.write_bytes(b"the picture of the epoch before")
    write_progress_picture(metrics_of(4, names), names[0], path)
    assert_is_picture(path)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_damaged_is_not_drawn(tmp_path):
    metrics: list[dict[str, Any]] = [
        {"epoch": 1},
        {"epoch": 2, "loss": "1.0", "learning_rate": None, "dice": 3, "mean_dice": 0.5},
        {"epoch": 3, "loss": 10**400, "learning_rate": [1], "dice": ["a"]},
        {"epoch": 4, "loss": math.inf, "learning_rate": math.nan, "dice": {"a": "x", "b": True}},
        {"epoch": 2**52, "loss": 0.5, "learning_rate": 0.1, "dice": {"\ud800": 0.5, "a": 1e300}},
        {"epoch": 6, "loss": 0.25, "learning_rate": 0.1, "dice": {"a": 0.5}, "mean_dice": 0.5},
    ]
    loss, dice, _ = progress_figure(metrics, "run").axes
    ((_, drawn),) = curves(loss).values()
    assert drawn[-2:] == [0.5, 0.25] and all(math.isnan(value) for value in drawn[:-2])
    assert [value for value in curves(dice)["a  0.500"][1] if not math.isnan(value)] == [0.5]
    write_progress_picture(metrics, "run", tmp_path / "progress.png")
    assert_is_picture(tmp_path / "progress.png")
