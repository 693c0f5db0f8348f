"""The memory of each slot in training: the table on the terminal and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from unet3d.reports.format import NOTHING, PICTURE_WIDTH_INCHES, amount, write_figure
from unet3d.reports.palette import BLUE, GREEN, GREY, ORANGE, SKY
from unet3d.reports.slots import PART_HEADS, PARTS, REST, bar_parts, memory_notes, unit_of
from unet3d.reports.timeline import PANEL_HEIGHT_INCHES, draw_timeline

COLOURS = dict(zip((*PARTS, REST), (BLUE, SKY, GREEN, ORANGE, GREY), strict=True))


def memory_table(record: Mapping[str, Any]) -> Table:
    """Return the memory of each slot as a table for the terminal.

    Args:
        record: What :func:`unet3d.memory.record.memory_record` returns.
    """
    slots = record["slots"]
    unit, unit_bytes = unit_of(slots)
    table = Table(
        title=f"Memory in training ({unit}), parallel mode {record['parallel']}",
        caption=" ".join([*memory_notes(slots), *_reserved_notes(slots, unit, unit_bytes)]),
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
        values = [measured[f"{name}_bytes"] for name in PARTS]
        predicted = slot["predicted"] and slot["predicted"]["peak_bytes"]
        values += [measured["peak_bytes"], predicted, slot["device_bytes"]]
        cells = [NOTHING if value is None else amount(value, unit_bytes) for value in values]
        table.add_row(str(slot["slot"]), slot["device"], _range(slot["blocks"]), *cells)
    return table


def _reserved_notes(slots: Sequence[Mapping[str, Any]], unit: str, unit_bytes: int) -> list[str]:
    """Return, for each GPU, what its allocator has reserved: gaps and captured steps included."""
    notes: dict[tuple[Any, str], str] = {}
    for slot in slots:
        if slot["device"] != "cpu":
            reserved = amount(slot["measured"]["reserved_bytes"], unit_bytes)
            place = slot.get("rank"), slot["device"]
            notes[place] = f"{slot['device']} reserved {reserved} {unit}."
    return list(notes.values())


def memory_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the memory of each slot as a bar, and below how it went through one step.

    Args:
        record: What :func:`unet3d.memory.record.memory_record` returns.
    """
    slots = record["slots"]
    unit, unit_bytes = unit_of(slots)
    timelines = record.get("timeline", [])
    heights = [2.3 + 0.85 * len(slots), *[PANEL_HEIGHT_INCHES] * len(timelines)]
    figure = Figure(figsize=(PICTURE_WIDTH_INCHES, sum(heights)), layout="constrained")
    axes, *panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(axes, slots, unit, unit_bytes)
    title = f"Memory in training, parallel mode {record['parallel']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    for panel, timeline in zip(panels, timelines, strict=True):
        totals = [slot["device_bytes"] for slot in slots if slot["slot"] in timeline["slots"]]
        draw_timeline(panel, timeline, min(totals), unit, unit_bytes)
    return figure


def write_memory_picture(record: Mapping[str, Any], path: Path) -> None:
    """Write :func:`memory_figure` as a PNG.

    Args:
        record: What :func:`unet3d.memory.record.memory_record` returns.
        path: A PNG file; one of that name is replaced.
    """
    write_figure(memory_figure(record), path)


def _draw_bars(axes: Axes, slots: Sequence[Mapping[str, Any]], unit: str, unit_bytes: int) -> None:
    rows = [bar_parts(slot, slots) for slot in slots]
    left = [0.0] * len(slots)
    shown: list[Artist | BarContainer] = []
    for part, colour in COLOURS.items():
        widths = [row[part] / unit_bytes for row in rows]
        bars = axes.barh(range(len(slots)), widths, 0.5, left, color=colour, label=part)
        if any(widths):
            shown.append(bars)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [slot["measured"]["peak_bytes"] / unit_bytes for slot in slots]
    mark = axes.scatter(peaks, range(len(slots)), s=420, marker="|", color="black", label="peak")
    axes.legend(
        handles=[*shown, mark],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.2,
        ncols=3,
        markerscale=0.6,
        frameon=False,
        fontsize=10,
    )
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        numbers = [f"{part} {amount(row[part], unit_bytes)}" for part in PARTS if row[part]]
        peak = amount(slot["measured"]["peak_bytes"], unit_bytes)
        total = amount(slot["device_bytes"], unit_bytes)
        axes.annotate(
            ",  ".join([*numbers, f"peak {peak} of {total} {unit}"]),
            (0, index + 0.29),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            fontsize=9,
        )
    names = [f"slot {s['slot']} on {s['device']}\n{_range(s['blocks'])}" for s in slots]
    axes.set_yticks(range(len(slots)), names)
    axes.set_ylim(len(slots) - 0.35, -0.45)  # slot 0 on top
    axes.set_xlim(0, max([*left, *peaks]) * 1.04 or 1)
    axes.set_xlabel("\n".join([unit, *memory_notes(slots)]))
    axes.spines[["top", "right"]].set_visible(False)


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
