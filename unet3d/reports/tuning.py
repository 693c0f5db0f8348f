"""Measured steps for people: a table, and a picture of time against micro-batches."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from unet3d.errors import counted
from unet3d.images.files import times
from unet3d.reports.figures import LINES, WIDTH_INCHES, legend_beside, tidy
from unet3d.reports.tables import CPU_BOUND, NOTHING, Table, amount, unit_for

NOTE_LETTERS = 80
"""Letters of a line below the picture."""


def tuning_table(record: Mapping[str, Any]) -> Table:
    """Return time and memory of every setting.

    ``record`` is what :meth:`unet3d.planning.sweep.Sweep.to_dict` returns, here and below.
    """
    peaks = [peak for row in record["rows"] for peak in row["peak_bytes"]]
    unit, unit_bytes = unit_for(max(peaks, default=0))

    def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        seconds, predicted, ratio = row["seconds"], row["predicted_seconds"], row["ratio"]
        return (
            name,
            f"{row['num_micro_batches']}{'*' if row['fastest'] else ' '}",
            "out of memory" if seconds is None else f"{1000 * seconds:.1f}",
            NOTHING if predicted is None else f"{1000 * predicted:.1f}",
            NOTHING if ratio is None else f"{ratio:.2f}x",
            amount(max(row["peak_bytes"]), unit_bytes) if row["peak_bytes"] else "",
        )

    return Table(
        title=f"Measured training steps\n{counted(record['batch_size'], 'patch')} of "
        f"{times(record['size'])} voxels, {record['precision']}",
        heads=(
            *("parallel", "micro-\nbatches", "ms a\nstep", "pre-\ndicted"),
            *("against\none device", f"peak\n{unit}"),
        ),
        groups=[
            [cells("" if number else name, row) for number, row in enumerate(rows)]
            for name, rows in _lines(record)
        ],
        notes=[
            "*: the fastest. Times are medians of the slowest rank. The ratio compares with the "
            "fastest step of one device. The peak is that of the device with the highest peak.",
            *[CPU_BOUND] * any("cpu" in row["devices"] for row in record["rows"]),
        ],
    )


def tuning_figure(record: Mapping[str, Any]) -> Figure:
    """Draw the time of a step against micro-batches, a line for each mode and each cut."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.0), layout="constrained")
    axes = figure.add_subplot()
    counts = sorted({row["num_micro_batches"] for row in record["rows"]})
    number = 0
    for name, rows in _lines(record):
        timed = [row for row in rows if row["seconds"] is not None]
        style: dict[str, Any] = {"color": "black", "linestyle": "--", "marker": "x"}
        if rows[0]["parallel"] != "none":
            colour, marker = LINES[number % len(LINES)]
            style = {"color": colour, "marker": marker}
            number += 1
        out = "" if len(timed) == len(rows) else "\n(no point: out of memory)"
        axes.plot(
            [row["num_micro_batches"] for row in timed],
            [1000 * row["seconds"] for row in timed],
            label=name + out,
            **style,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    notes = [part for line in tuning_lines(record) for part in textwrap.wrap(line, NOTE_LETTERS)]
    axes.set_xlabel("\n".join([f"micro-batches of a batch of {record['batch_size']}", *notes]))
    axes.set_ylabel("time of a training step (ms)")
    axes.margins(y=0.15)
    axes.set_title(
        f"{counted(record['batch_size'], 'patch')} of {times(record['size'])} voxels, "
        f"{record['precision']}, on {_hardware(record['devices'])}"
    )
    tidy(axes)
    legend_beside(axes, title="parallel", alignment="left")
    return figure


def tuning_lines(record: Mapping[str, Any]) -> list[str]:
    """Return conclusions from the times for a user of these devices, a line each."""
    lines = []
    fastest = next((row for row in record["rows"] if row["fastest"]), None)
    chosen = next((row for row in record["rows"] if row["chosen"]), None)
    one = record["best_one_device_seconds"]
    if fastest is not None and chosen is None:
        lines.append(f"The step fits only on one device, {fastest['devices'][0]}.")
    elif fastest is not None and chosen is not None and fastest is not chosen:
        lines.append(
            f"One device is faster here: {1000 * fastest['seconds']:.1f} ms a step on "
            f"{fastest['devices'][0]} against {1000 * chosen['seconds']:.1f} on "
            f"{','.join(chosen['devices'])}. Leave out --parallel {chosen['parallel']}, unless one "
            "device has too little memory."
        )
    elif fastest is not None:
        against = ""
        if one is not None and fastest["parallel"] != "none":
            against = f" against {1000 * one:.1f} on one device"
        lines.append(
            f"The fastest is {_name(fastest)}, with "
            f"{counted(fastest['num_micro_batches'], 'micro-batch')}: "
            f"{1000 * fastest['seconds']:.1f} ms a step{against}."
        )
    if record["num_left_out"]:
        lines.append(
            f"Not measured, because time was up: {record['num_left_out']} of "
            f"{len(record['rows']) + record['num_left_out']} settings."
        )
    return lines


def _lines(record: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the rows of one device, then the rows of each mode or cut, with a name for each."""
    return [(name, list(rows)) for name, rows in groupby(record["rows"], _name)]


def _name(row: Mapping[str, Any]) -> str:
    if not row["cuts"]:
        return str(row["name"])
    return f"cut before {', '.join(row['cut_before'])} ({','.join(map(str, row['cuts']))})"


def _hardware(names: Sequence[str]) -> str:
    kinds = {name: names.count(name) for name in names}
    return " and ".join(f"{count} x {name}" for name, count in kinds.items())
