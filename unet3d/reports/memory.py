"""The memory of a training run: a table for the terminal, and a picture of one step."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from unet3d.reports import figures
from unet3d.reports.figures import legend_beside, tidy
from unet3d.reports.tables import (
    PARTS,
    REST,
    Slots,
    amount,
    bar_parts,
    blocks_text,
    is_one_cpu,
    measured_slots,
    memory_notes,
    unit_of,
)

ELSEWHERE = "another slot acts"

PART_COLOURS = {
    **dict(zip(PARTS, (figures.BLUE, figures.SKY, figures.GREEN, figures.ORANGE), strict=True)),
    REST: figures.GREY,
}
ACTION_COLOURS = {
    **{"forward": figures.SKY, "loss": figures.PURPLE, "backward": figures.ORANGE},
    **{"optimizer": figures.GREEN, ELSEWHERE: figures.GREY},
}
PANEL_HEIGHT_INCHES = 2.3


def memory_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the memory of each slot as a bar and, underneath, the memory over one step."""
    slots = measured_slots(record)
    unit, unit_bytes = unit_of(slots)
    timelines = record.get("timeline", [])
    heights = [2.3 + 0.85 * len(slots), *[PANEL_HEIGHT_INCHES] * len(timelines)]
    figure = Figure(figsize=(figures.WIDTH_INCHES, sum(heights)), layout="constrained")
    axes, *panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(axes, slots, unit, unit_bytes)
    where = "on one CPU" if is_one_cpu(slots) else f"parallel mode {record['parallel']}"
    figure.suptitle(
        f"Memory in training, {where}", x=0.01, ha="left", fontsize=13, fontweight="bold"
    )
    for panel, timeline in zip(panels, timelines, strict=True):
        draw_timeline(panel, timeline, unit, unit_bytes)
        names = ", ".join(map(str, timeline["slots"]))
        of = f", slot{'s' if len(timeline['slots']) > 1 else ''} {names}"
        title = f"One step on {timeline['device']}{'' if is_one_cpu(slots) else of}"
        panel.set_title(title, fontsize=10, loc="left")
    return figure


def _draw_bars(axes: Axes, slots: Slots, unit: str, unit_bytes: int) -> None:
    rows = [bar_parts(slot, slots) for slot in slots]
    left = [0.0] * len(slots)
    shown: list[Any] = []
    for part, colour in PART_COLOURS.items():
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
    names = ["the process"]
    if not is_one_cpu(slots):
        names = [f"slot {s['slot']} on {s['device']}\n{blocks_text(s['blocks'])}" for s in slots]
    axes.set_yticks(range(len(slots)), names)
    axes.set_ylim(len(slots) - 0.35, -0.45)  # slot 0 on top
    axes.set_xlim(0, max([*left, *peaks]) * 1.04 or 1)
    axes.set_xlabel("\n".join([unit, *memory_notes(slots)]))
    tidy(axes, has_grid=False)


def draw_timeline(axes: Axes, timeline: Mapping[str, Any], unit: str, unit_bytes: int) -> None:
    """Draw the memory in use over the actions of one step."""
    marks, slots = timeline["marks"], timeline["slots"]
    kinds = [mark["kind"] if mark["slot"] in (None, *slots) else ELSEWHERE for mark in marks]
    peaks = [mark["peak_bytes"] / unit_bytes for mark in marks]
    axes.bar(range(len(marks)), peaks, 1.0, color=[ACTION_COLOURS[kind] for kind in kinds])
    line = axes.stairs(
        [mark["bytes"] / unit_bytes for mark in marks],
        [index - 0.5 for index in range(len(marks) + 1)],
        color="black",
        linewidth=1.2,
        baseline=None,
        label="after each action",
    )
    axes.set_ylabel(unit)
    axes.set_ylim(0, max(peaks, default=0.0) * 1.15 or 1)
    axes.set_xlim(-0.5, max(len(marks) - 0.5, 0.5))
    axes.set_xticks([])
    axes.set_xlabel(
        "actions in the order in which they are queued; bars: peak memory during an action",
        fontsize=9,
    )
    shown = {kind: colour for kind, colour in ACTION_COLOURS.items() if kind in kinds}
    patches = [Patch(color=colour, label=kind) for kind, colour in shown.items()]
    legend_beside(axes, handles=[*patches, line])
    tidy(axes, has_grid=False)
