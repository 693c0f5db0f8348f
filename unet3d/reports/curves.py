"""Loss, Dice and learning rate over the epochs, drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unet3d.reports.format import NOTHING, PICTURE_WIDTH_INCHES, write_figure
from unet3d.reports.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

LABEL_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
LABEL_STYLES = ("-", "--")
LARGEST = 1e30
"""Numbers beyond it are damage, and would end in an overflow where axes are scaled."""
MAX_NAMED_LABELS = len(LABEL_COLOURS) * len(LABEL_STYLES)


def progress_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw loss, Dice and learning rate over the epochs.

    Args:
        metrics: One line of ``metrics.jsonl`` for each epoch; lines of epochs with a validation
            also hold ``dice`` (label to Dice, or None) and ``mean_dice``. What a line lacks, or
            what is no number, is left out.
    """
    figure = Figure(figsize=(PICTURE_WIDTH_INCHES, 8.0), layout="constrained")
    loss_axes, dice_axes, rate_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    epochs = [line["epoch"] for line in metrics]
    marker = "o" if len(metrics) < 2 else ""  # one point makes no line
    loss_axes.plot(
        epochs, [_number(line.get("loss")) for line in metrics], color=BLUE, marker=marker
    )
    loss_axes.set_ylabel("training loss")
    loss_axes.set_title("Progress of the training")
    _draw_dice(dice_axes, [line for line in metrics if isinstance(line.get("dice"), dict)])
    rates = [_number(line.get("learning_rate")) for line in metrics]
    rate_axes.plot(epochs, rates, color="black", linewidth=1, marker=marker)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_xlabel("epoch")
    rate_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (loss_axes, dice_axes, rate_axes):
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_progress_picture(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write :func:`progress_figure` as a PNG.

    Args:
        metrics: One line of ``metrics.jsonl`` for each epoch.
        path: A PNG file; one of that name is replaced.
    """
    write_figure(progress_figure(metrics), path)


def _draw_dice(axes: Axes, validations: Sequence[Mapping[str, Any]]) -> None:
    axes.set_ylabel("Dice in validation")
    axes.set_ylim(-0.02, 1.02)  # so that lines at 0 and 1 are seen whole
    if not validations:
        axes.text(0.5, 0.5, "no validation yet", ha="center", va="center", transform=axes.transAxes)
        return
    epochs = [line["epoch"] for line in validations]
    labels = list(dict.fromkeys(label for line in validations for label in line["dice"]))
    named = len(labels) <= MAX_NAMED_LABELS
    for index, label in enumerate(labels):
        values = [_number(line["dice"].get(label)) for line in validations]
        style, colour = divmod(index, len(LABEL_COLOURS))
        axes.plot(
            epochs,
            values,
            color=LABEL_COLOURS[colour] if named else GREY,
            linestyle=LABEL_STYLES[style] if named else "-",
            linewidth=1.5 if named else 0.8,
            marker="o",
            markersize=3 if named else 0,
            label=_with_last(str(label), values) if named else None,
        )
    means = [_number(line.get("mean_dice")) for line in validations]
    text = "mean" if named else f"mean of {len(labels)} labels"
    axes.plot(
        epochs,
        means,
        color="black",
        linewidth=3,
        zorder=1.5 if named else 3,  # behind the lines that can be told apart
        marker="o",
        markersize=5,
        label=_with_last(text, means),
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _with_last(name: str, values: Sequence[float]) -> str:
    last = NOTHING if math.isnan(values[-1]) else f"{values[-1]:.3f}"
    text = f"{name}  {last}".encode(errors="replace").decode()  # no halves of characters
    text = text.replace("$", r"\$")  # matplotlib would read a formula
    return f" {text}" if text.startswith("_") else text  # which it would leave out


def _number(value: object) -> float:
    """Return a value that can be drawn; NaN, which draws nothing, for everything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    return math.nan
