"""Loss, Dice and learning rate over the epochs, drawn."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unet3d.reports.figures import (
    BLUE,
    GREY,
    LINES,
    VERMILION,
    WIDTH_INCHES,
    YELLOW,
    drawable,
    legend_beside,
    tidy,
)
from unet3d.reports.tables import score

LINE_STYLES = ("-", "--")
MAX_NAMED_LABELS = len(LINES) * len(LINE_STYLES)
MAX_TITLE = 75
FONT = 11

Metrics = Sequence[Mapping[str, Any]]
"""One line of ``metrics.jsonl`` for each epoch; lines of epochs with a validation also hold
``dice`` (label to Dice, or None), ``mean_dice`` and ``validation_loss``."""


def progress_figure(metrics: Metrics, title: str) -> Figure:
    """Draw loss, Dice and learning rate over the epochs; the title names the training run."""
    figure = Figure(figsize=(WIDTH_INCHES, 8.0), layout="constrained")
    loss_axes, dice_axes, rate_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    figure.suptitle(
        drawable(title, MAX_TITLE), x=0.01, ha="left", fontsize=FONT + 2, fontweight="bold"
    )
    marker = "o" if len(metrics) < 2 else ""  # one point makes no line
    validations = [line for line in metrics if line.get("dice")]
    loss_axes.set_ylabel("loss", fontsize=FONT)
    losses = _values(metrics, "loss")
    _plot(loss_axes, metrics, losses, "training", color=BLUE, linewidth=2, marker=marker)
    if validations:
        losses = _values(validations, "validation_loss")
        style = {"linestyle": "--", "marker": "s", "markersize": 4}
        _plot(loss_axes, validations, losses, "validation", color=VERMILION, linewidth=2, **style)
    legend_beside(loss_axes, fontsize=FONT)
    _draw_dice(dice_axes, validations)
    rates = _values(metrics, "learning_rate")
    rate_axes.plot(_values(metrics, "epoch"), rates, color="black", linewidth=1, marker=marker)
    rate_axes.set_ylabel("learning rate", fontsize=FONT)
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_xlabel("epoch", fontsize=FONT)
    rate_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (loss_axes, dice_axes, rate_axes):
        tidy(axes)
        axes.tick_params(labelsize=FONT - 1)
    return figure


def _draw_dice(axes: Axes, validations: Metrics) -> None:
    axes.set_ylabel("Dice in validation", fontsize=FONT)
    axes.set_ylim(-0.02, 1.02)  # so that lines at 0 and 1 are seen whole
    if not validations:
        axes.text(0.5, 0.5, "no validation", ha="center", va="center", transform=axes.transAxes)
        return
    epochs = _values(validations, "epoch")
    labels = list(dict.fromkeys(label for line in validations for label in line["dice"]))
    named = len(labels) <= MAX_NAMED_LABELS
    for index, label in enumerate(labels):
        values = _values([line["dice"] for line in validations], label)
        if named:
            style, place = divmod(index, len(LINES))
            colour, marker = LINES[place]
            look = {"linestyle": LINE_STYLES[style], "marker": marker, "markersize": 4.5}
            _plot(axes, validations, values, label, color=colour, linewidth=1.8, **look)
        else:
            axes.plot(epochs, values, color=GREY, linewidth=0.8)
    means = _values(validations, "mean_dice")
    name = "mean" if named else f"mean of {len(labels)} labels"
    # Drawn behind the lines of labels, if these are in colour.
    look = {"linewidth": 3, "zorder": 1.5 if named else 3, "marker": "o", "markersize": 4}
    _plot(axes, validations, means, name, color="black", **look)
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
            label=f"best  {best:.3f}\nin epoch {-epoch:g}",
        )
    legend_beside(axes, fontsize=FONT)


def _plot(axes: Axes, lines: Metrics, values: Sequence[float], name: str, **look: Any) -> None:
    """Draw one value of each line over the epochs; the legend shows the last value."""
    text = drawable(f"{name}  {score(None if math.isnan(values[-1]) else values[-1])}")
    # A legend would leave out a name that begins with an underscore.
    label = f" {text}" if text.startswith("_") else text
    axes.plot(_values(lines, "epoch"), values, label=label, **look)


def _values(lines: Metrics, key: str) -> list[float]:
    """Return one metric of each line; NaN if a line lacks it, which leaves a gap in the curve."""
    return [math.nan if line.get(key) is None else float(line[key]) for line in lines]
