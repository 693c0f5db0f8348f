"""What a person reads after a run: the tables on the terminal and the two pictures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table

from unet3d.atomic import write_atomically
from unet3d.inference.evaluation import Evaluation, LabelScore
from unet3d.reports.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from unet3d.reports.timeline import PANEL_HEIGHT_INCHES, draw_timeline

MIB = 1024**2
GIB = 1024**3
MIN_BYTES_IN_GIB = 8 * GIB
"""From this peak on: in GiB, parameters and gradients of a smaller network come out as 0.00."""
NOTHING = "–"

PARTS = (
    ("parameters", BLUE),
    ("gradients", SKY),
    ("optimizer", GREEN),
    ("activations", ORANGE),
)
REST = "rest of the peak"
PART_HEADS = ("para-\nmeters", "gradi-\nents", "opti-\nmizer", "acti-\nvations")
"""Broken by hand, so that the tables fit a terminal of 80 characters."""
LABEL_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)
LABEL_STYLES = ("-", "--")
MAX_NAMED_LABELS = len(LABEL_COLOURS) * len(LABEL_STYLES)

PICTURE_WIDTH_INCHES = 9.0
DOTS_PER_INCH = 120


def memory_table(record: Mapping[str, Any]) -> Table:
    """Return the memory of each slot as a table for the terminal.

    Args:
        record: What :func:`unet3d.memory.meter.memory_record` returns.
    """
    slots = record["slots"]
    unit, unit_bytes = _unit(slots)
    table = Table(
        title=f"Memory in training ({unit}), parallel mode {record['parallel']}",
        caption=" ".join(_memory_notes(slots)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,  # the column divider is a space already
    )
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    table.add_column("blocks", min_width=len("decoder.4.up …"))
    for name in (*PART_HEADS, "peak", "pre-\ndicted", "device\ntotal"):
        table.add_column(name, justify="right", no_wrap=True)
    for slot in slots:
        measured = slot["measured"]
        values = [measured[f"{name}_bytes"] for name, _ in PARTS]
        predicted = slot["predicted"] and slot["predicted"]["peak_bytes"]
        values += [measured["peak_bytes"], predicted, slot["device_bytes"]]
        cells = [NOTHING if value is None else amount(value, unit_bytes) for value in values]
        table.add_row(str(slot["slot"]), slot["device"], _range(slot["blocks"]), *cells)
    return table


def plan_table(record: Mapping[str, Any]) -> Table:
    """Return what every way of placing a training would take, as a table for the terminal.

    Args:
        record: What :meth:`unet3d.planning.comparison.Comparison.to_dict` returns.
    """
    every_slot = [slot for way in record["ways"] for slot in way["slots"]]
    unit, unit_bytes = _unit(every_slot, "predicted")
    notes = [*record["notes"]]
    for way in record["ways"]:
        notes += _memory_notes(way["slots"])
    table = Table(
        title=f"Predicted memory ({unit}): {record['batch_size']} patches of "
        f"{size_text(record['shape'])} voxels, {record['precision']}",
        caption=" ".join(dict.fromkeys(notes)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("parallel,\nmicro-batches", no_wrap=True)
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column("device", no_wrap=True)
    for name in (*PART_HEADS, "rest", "peak", "device\ntotal", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in record["ways"]:
        mark = "*" if way["asked"] else ""
        for slot in way["slots"]:
            predicted = slot["predicted"]
            bar = _bar(slot, way["slots"], "predicted")
            values = [*bar.values(), predicted["peak_bytes"], slot["device_bytes"]]
            is_first, is_last = slot is way["slots"][0], slot is way["slots"][-1]
            table.add_row(
                _way_name(way) + mark if is_first else "",
                str(slot["slot"]),
                slot["device"],
                *(amount(value, unit_bytes) for value in values),
                ("yes" if way["fits"] else "NO") if is_first else "",
                end_section=is_last,
            )
    return table


def plan_lines(record: Mapping[str, Any]) -> list[str]:
    """Return, for each way of a plan, a line with the largest volume that fits.

    Args:
        record: What :meth:`unet3d.planning.comparison.Comparison.to_dict` returns.
    """
    lines = []
    for way in record["ways"]:
        devices = ",".join(slot["device"] for slot in way["slots"])
        shape = way["largest_shape"]
        lines.append(
            f"--parallel {way['parallel']} --devices {devices} "
            + (f"--replicas {way['replicas']} " if _has_copies_of_stages(way) else "")
            + f"--micro-batches {way['num_micro_batches']}"
            + (f" --balance {way['balance']}: " if way["balance"] else ": ")
            + (f"up to {size_text(shape)} voxels" if shape else "not even the smallest volume fits")
            + (" (asked for)" if way["asked"] else "")
        )
    return lines


def _way_name(way: Mapping[str, Any]) -> str:
    copies = f"{way['replicas']} x " if _has_copies_of_stages(way) else ""
    return f"{copies}{way['parallel']}, {way['num_micro_batches']}"


def _has_copies_of_stages(way: Mapping[str, Any]) -> bool:
    return bool(way["parallel"] == "model" and way["replicas"] > 1)


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the scores of each case, and their means, as a table for the terminal.

    Args:
        evaluation: What :func:`unet3d.inference.evaluation.evaluate` returns.
    """
    table = Table(
        title="Predictions compared with labels",
        caption=f"Mean Dice over the labels: {evaluation.mean_dice:.4f}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case")
    for name in ("label", "Dice", "HD95\n(mm)", "predicted\n(mL)", "labelled\n(mL)"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in evaluation.cases:
        _add_scores(table, case.name, case.scores)
    if len(evaluation.cases) > 1:
        means = {value: evaluation.mean(value) for value in evaluation.label_values}
        _add_scores(table, f"mean of {len(evaluation.cases)} cases", means)
    return table


def write_memory_picture(record: Mapping[str, Any], path: Path) -> None:
    """Draw the memory of each slot as a bar, and below how it went through one step.

    Args:
        record: What :func:`unet3d.memory.meter.memory_record` returns.
        path: A PNG file; one of that name is replaced.
    """
    slots = record["slots"]
    unit, unit_bytes = _unit(slots)
    timelines = record.get("timeline", [])
    heights = [1.9 + 0.85 * len(slots), *[PANEL_HEIGHT_INCHES] * len(timelines)]
    figure = Figure(figsize=(PICTURE_WIDTH_INCHES, sum(heights)), layout="constrained")
    axes, *panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    rows = [_bar(slot, slots) for slot in slots]
    left = [0.0] * len(slots)
    for part, colour in (*PARTS, (REST, GREY)):
        widths = [row[part] / unit_bytes for row in rows]
        axes.barh(range(len(slots)), widths, 0.5, left, color=colour, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [slot["measured"]["peak_bytes"] / unit_bytes for slot in slots]
    axes.scatter(peaks, range(len(slots)), s=420, marker="|", color="black", label="peak")
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        numbers = [f"{part} {amount(row[part], unit_bytes)}" for part, _ in PARTS]
        peak = amount(slot["measured"]["peak_bytes"], unit_bytes)
        total = amount(slot["device_bytes"], unit_bytes)
        axes.annotate(
            f"{',  '.join(numbers)};  peak {peak} of {total} {unit}",
            (0, index + 0.29),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=8,
        )
    names = [f"slot {s['slot']} on {s['device']}\n{_range(s['blocks'])}" for s in slots]
    axes.set_yticks(range(len(slots)), names)
    axes.set_ylim(len(slots) - 0.35, -0.45)  # slot 0 on top
    axes.set_xlim(0, max([*left, *peaks]) * 1.04 or 1)
    axes.set_xlabel("\n".join([unit, *_memory_notes(slots)]))
    axes.set_title(f"Memory in training, parallel mode {record['parallel']}")
    axes.spines[["top", "right"]].set_visible(False)
    for panel, timeline in zip(panels, timelines, strict=True):
        totals = [slot["device_bytes"] for slot in slots if slot["slot"] in timeline["slots"]]
        draw_timeline(panel, timeline, min(totals), unit, unit_bytes)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False
    )
    write_figure(figure, path)


def write_progress_picture(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw loss, Dice and learning rate over the epochs.

    Args:
        metrics: One line of ``metrics.jsonl`` for each epoch; lines of epochs with a validation
            also hold ``dice`` (label to Dice, or None) and ``mean_dice``.
        path: A PNG file; one of that name is replaced.
    """
    figure = Figure(figsize=(PICTURE_WIDTH_INCHES, 8.0), layout="constrained")
    loss_axes, dice_axes, rate_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    epochs = [line["epoch"] for line in metrics]
    marker = "o" if len(metrics) < 2 else ""  # one point makes no line
    loss_axes.plot(epochs, [_number(line["loss"]) for line in metrics], color=BLUE, marker=marker)
    loss_axes.set_ylabel("training loss")
    loss_axes.set_title("Progress of the training")
    _draw_dice(dice_axes, [line for line in metrics if line.get("dice") is not None])
    rates = [_number(line["learning_rate"]) for line in metrics]
    rate_axes.plot(epochs, rates, color="black", linewidth=1, marker=marker)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_ylim(bottom=0)
    rate_axes.set_xlabel("epoch")
    rate_axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (loss_axes, dice_axes, rate_axes):
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


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
    means = [_number(line["mean_dice"]) for line in validations]
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
    return f"{name}  {last}".replace("$", r"\$")  # matplotlib would read a formula


def _bar(
    slot: Mapping[str, Any], slots: Sequence[Mapping[str, Any]], kind: str = "measured"
) -> dict[str, int]:
    """Return the bytes of each part of a slot's bar.

    What a GPU's peak holds beyond the counted parts is work space, shared by the slots on it.
    """
    counted = sum(
        other[kind][f"{part}_bytes"]
        for other in slots
        if _place(other) == _place(slot)
        for part, _ in PARTS
    )
    bar = {part: slot[kind][f"{part}_bytes"] for part, _ in PARTS}
    bar[REST] = max(0, slot[kind]["peak_bytes"] - counted)
    return bar


def _memory_notes(slots: Sequence[Mapping[str, Any]]) -> list[str]:
    devices = [slot["device"] for slot in slots]
    notes = []
    if "cpu" in devices:
        notes.append("On a CPU the peak is the sum of what is counted: a lower bound.")
    places = [_place(slot) for slot in slots if slot["device"] != "cpu"]
    if len(places) > len(set(places)):
        notes.append("Slots that share a GPU each show the peak of the whole GPU.")
    return notes


def _place(slot: Mapping[str, Any]) -> tuple[int, str]:
    """Return where a slot is: ranks of two machines may each have a ``cuda:0``."""
    return slot.get("rank", 0), slot["device"]


def _unit(slots: Sequence[Mapping[str, Any]], kind: str = "measured") -> tuple[str, int]:
    peak_bytes = max(slot[kind]["peak_bytes"] for slot in slots)
    return ("GiB", GIB) if peak_bytes >= MIN_BYTES_IN_GIB else ("MiB", MIB)


def amount(num_bytes: int, unit_bytes: int) -> str:
    """Return a number of bytes in a unit, with the digits that matter.

    Args:
        num_bytes: The number.
        unit_bytes: Such as :data:`GIB`.
    """
    amount = num_bytes / unit_bytes
    if amount >= 100:
        return f"{amount:,.0f}"
    if 0 < amount < 0.001:
        return "<0.001"
    return f"{amount:.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"


def size_text(shape: Sequence[int]) -> str:
    """Return voxels along X, Y, Z as people write them.

    Args:
        shape: Such as (192, 192, 160).
    """
    return "x".join(map(str, shape))


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _add_scores(table: Table, name: str, scores: Mapping[int, LabelScore]) -> None:
    for index, (value, score) in enumerate(scores.items()):
        table.add_row(
            name if index == 0 else "",
            str(value),
            NOTHING if score.dice is None else f"{score.dice:.4f}",
            NOTHING if score.hd95_mm is None else f"{score.hd95_mm:.2f}",
            f"{score.prediction_ml:.3f}",
            f"{score.label_ml:.3f}",
            end_section=index == len(scores) - 1,
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file.

    Args:
        figure: What was drawn.
        path: One of that name is replaced.
    """
    FigureCanvasAgg(figure)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=DOTS_PER_INCH))
