"""Loss, Dice and learning rate over the epochs, drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unet3d.reports.format import NOTHING, PICTURE_WIDTH_INCHES, drawable, write_figure
from unet3d.reports.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

LABEL_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
LABEL_STYLES = ("-", "--")
LABEL_MARKERS = "osD^vP"
"""With the colours, so that lines can be told apart without them."""
LARGEST = 1e30
"""Numbers beyond it are damage, and would end in an overflow where axes are scaled."""
MAX_NAMED_LABELS = len(LABEL_COLOURS) * len(LABEL_STYLES)
MAX_TITLE = 75
FONT = 11


def progress_figure(metrics: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw loss, Dice and learning rate over the epochs.

    Args:
        metrics: One line of ``metrics.jsonl`` for each epoch; lines of epochs with a validation
            also hold ``dice`` (label to Dice, or None), ``mean_dice`` and ``validation_loss``. What
            a line lacks, or what is no number, is left out.
        title: Says which training it is.
    """
    figure = Figure(figsize=(PICTURE_WIDTH_INCHES, 8.0), layout="constrained")
    loss_axes, dice_axes, rate_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    figure.suptitle(
        drawable(title, MAX_TITLE), x=0.01, ha="left", fontsize=FONT + 2, fontweight="bold"
    )
    epochs = [line["epoch"] for line in metrics]
    marker = "o" if len(metrics) < 2 else ""  # one point makes no line
    validations = [line for line in metrics if isinstance(line.get("dice"), dict)]
    _draw_loss(loss_axes, metrics, validations, marker)
    _draw_dice(dice_axes, validations)
    rates = [_number(line.get("learning_rate")) for line in metrics]
    rate_axes.plot(epochs, rates, color="black", linewidth=1, marker=marker)
    rate_axes.set_ylabel("learning rate", fontsize=FONT)
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_xlabel("epoch", fontsize=FONT)
    rate_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (loss_axes, dice_axes, rate_axes):
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=FONT - 1)
    return figure


def write_progress_picture(metrics: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write :func:`progress_figure` as a PNG.

    Args:
        metrics: One line of ``metrics.jsonl`` for each epoch.
        title: Says which training it is.
        path: A PNG file; one of that name is replaced.
    """
    write_figure(progress_figure(metrics, title), path)


def _draw_loss(
    axes: Axes,
    metrics: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    marker: str,
) -> None:
    axes.set_ylabel("loss", fontsize=FONT)
    losses = [_number(line.get("loss")) for line in metrics]
    epochs = [line["epoch"] for line in metrics]
    name = _with_last("training", losses or [math.nan])
    axes.plot(epochs, losses, color=BLUE, linewidth=2, marker=marker, label=name)
    of_validation = [_number(line.get("validation_loss")) for line in validations]
    if not all(map(math.isnan, of_validation)):  # runs of earlier versions have none
        axes.plot(
            [line["epoch"] for line in validations],
            of_validation,
            color=VERMILION,
            linestyle="--",
            linewidth=2,
            marker="s",
            markersize=4,
            label=_with_last("validation", of_validation),
        )
    _draw_legend(axes)


def _draw_dice(axes: Axes, validations: Sequence[Mapping[str, Any]]) -> None:
    axes.set_ylabel("Dice in validation", fontsize=FONT)
    axes.set_ylim(-0.02, 1.02)  # so that lines at 0 and 1 are seen whole
    if not validations:
        axes.text(0.5, 0.5, "no validation", ha="center", va="center", transform=axes.transAxes)
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
            linewidth=1.8 if named else 0.8,
            marker=LABEL_MARKERS[colour] if named else "",
            markersize=4.5,
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
        markersize=4,
        label=_with_last(text, means),
    )
    known = [(mean, -epoch) for epoch, mean in zip(epochs, means, strict=True) if mean == mean]
    if known:
        best, epoch = max(known)
        axes.plot(
            [-epoch],
            [best],
            color="black",
            linestyle="",
            marker="*",
            markersize=15,
            markerfacecolor=YELLOW,
            zorder=4,
            label=f"best  {best:.3f}\nin epoch {-epoch}",
        )
    _draw_legend(axes)


def _draw_legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=FONT)


def _with_last(name: str, values: Sequence[float]) -> str:
    last = NOTHING if math.isnan(values[-1]) else f"{values[-1]:.3f}"
    text = drawable(f"{name}  {last}")
    return f" {text}" if text.startswith("_") else text  # which a legend would leave out


def _number(value: object) -> float:
    """Return a value that can be drawn; NaN, which draws nothing, for everything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    return math.nan
