"""The memory of a device through one training step, drawn."""

from collections.abc import Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from unet3d.reports.palette import GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

PANEL_HEIGHT_INCHES = 2.3
COLOURS = {"forward": SKY, "loss": PURPLE, "backward": ORANGE, "optimizer": GREEN}
ELSEWHERE = "another slot acts"
NEAR = 1.5
"""The device's total is drawn where it is at most this many times the peak."""
MAX_NAMED_ACTIONS = 100
"""More numbers of micro-batches than this cannot be read."""


def draw_timeline(
    axes: Axes, timeline: Mapping[str, Any], device_bytes: int, unit: str, unit_bytes: int
) -> None:
    """Draw the memory in use over the actions of one step.

    Args:
        axes: Where to draw.
        timeline: A :class:`unet3d.memory.meter.Timeline` as a dictionary.
        device_bytes: Memory of the device.
        unit: Name of the unit.
        unit_bytes: Bytes in the unit.
    """
    marks, slots = timeline["marks"], timeline["slots"]
    own = [mark["slot"] is None or mark["slot"] in slots for mark in marks]
    kinds = [mark["kind"] if is_own else ELSEWHERE for mark, is_own in zip(marks, own, strict=True)]
    colours = COLOURS | {ELSEWHERE: GREY}
    peaks = [mark["peak_bytes"] / unit_bytes for mark in marks]
    ends = [mark["bytes"] / unit_bytes for mark in marks]
    axes.bar(range(len(marks)), peaks, 1.0, color=[colours[kind] for kind in kinds])
    edges = [index - 0.5 for index in range(len(marks) + 1)]
    line = axes.stairs(ends, edges, color="black", linewidth=1.2, baseline=None)
    line.set_label("at the end of each action")
    lines: list[Artist] = [line]
    top = max(peaks, default=0.0) * 1.15
    if device_bytes / unit_bytes <= NEAR * max(peaks, default=0.0):
        total = axes.axhline(
            device_bytes / unit_bytes, color=VERMILION, linestyle="--", linewidth=2
        )
        total.set_label("device total")
        lines.append(total)
        top = max(top, device_bytes / unit_bytes * 1.05)
    numbers = [mark["micro_batch"] for mark in marks]
    # The only micro-batch needs no number.
    is_numbered = len(marks) <= MAX_NAMED_ACTIONS and len(set(numbers) - {None}) > 1
    for index, number in enumerate(numbers):
        if is_numbered and own[index] and number is not None:
            axes.annotate(
                str(number + 1),
                (index, 0),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8 if len(marks) <= MAX_NAMED_ACTIONS / 2 else 5,
            )
    names = ", ".join(map(str, slots))
    axes.set_title(
        f"One step on {timeline['device']}, slot{'s' if len(slots) > 1 else ''} {names}",
        fontsize=10,
        loc="left",
    )
    axes.set_ylabel(unit)
    axes.set_ylim(0, top or 1)
    axes.set_xlim(-0.5, max(len(marks) - 0.5, 0.5))
    axes.set_xticks([])
    numbering = ", with the numbers of their micro-batches" if is_numbered else ""
    axes.set_xlabel(
        f"actions in the order in which they are queued{numbering};\n"
        "bars: the most in use during an action",
        fontsize=9,
    )
    patches = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in kinds]
    axes.legend(
        handles=[*patches, *lines],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
