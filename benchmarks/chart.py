"""Draw the records of ``step.py`` and ``capacity.py`` as bars.

    python benchmarks/chart.py docs/benchmarks.png step-256.json step-128.json capacity.json

A record of steps gives two panels, time and peak memory; the dashed line is the floor. A record of
capacities gives one. A variant without a figure has an empty bar with the reason.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, PEERS = "#1f6f8b", "#b8b8b8"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One group of bars."""

    title: str
    """Above it, with what was measured where."""
    unit: str
    """Below the axis."""
    bars: dict[str, float | None]
    """Name to figure; None where there is none."""
    reasons: dict[str, str]
    """Name to why there is none."""
    floor: float | None = None
    """Where the dashed line is, or None."""
    form: str = ".1f"
    """Of the figures beside the bars."""


def panels_of(record: dict[str, Any]) -> list[Panel]:
    """Return what a record shows."""
    rows, where = record["rows"], ", ".join(sorted(set(record["devices"])))
    reasons = {row["key"]: row.get("reason", "") for row in rows}
    if "floor" not in record:
        cubes = {row["key"]: row["num_voxels"] / 1e6 or None for row in rows}
        none = {row["key"]: "none trained" for row in rows}
        return [
            Panel(
                title=f"largest cube that trains, {where}",
                unit="million voxels",
                bars=cubes,
                reasons=none,
            )
        ]
    size = "×".join(map(str, record["size"]))
    what = f"{size}, batch {record['batch_size']}, {where}"
    seconds = {row["key"]: row.get("seconds") for row in rows}
    times = {key: value and 1000 * value for key, value in seconds.items()}
    floor = 1000 * record["floor"]["floor"]
    panels = [
        Panel(title=f"training step, {what}", unit="ms", bars=times, reasons=reasons, floor=floor)
    ]
    peaks = {row["key"]: row.get("peak_bytes") for row in rows}
    if any(peaks.values()):
        memory = {key: value and value / 2**30 for key, value in peaks.items()}
        panels.append(
            Panel(
                title=f"peak memory, {what}", unit="GiB", bars=memory, reasons=reasons, form=".2f"
            )
        )
    return panels


def draw(panels: list[Panel], path: Path) -> None:
    """Write the panels below one another as a PNG."""
    heights = [0.3 * len(panel.bars) + 0.9 for panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(8, sum(heights)),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        names = list(panel.bars)
        values = [panel.bars[name] or 0.0 for name in names]
        colours = [OURS if name.startswith("ours") else PEERS for name in names]
        axis.barh(names, values, color=colours, height=0.7)
        axis.invert_yaxis()
        for place, (name, value) in enumerate(panel.bars.items()):
            text = panel.reasons[name][:60] if value is None else f"{value:{panel.form}}"
            axis.annotate(
                text, (value or 0, place), (4, 0), textcoords="offset points", va="center", size=9
            )
        if panel.floor is not None:
            axis.axvline(panel.floor, color="black", linestyle="--", linewidth=1)
        axis.set_title(panel.title, loc="left", size=10)
        floor = f" (dashed: floor {panel.floor:{panel.form}})" if panel.floor is not None else ""
        axis.set_xlabel(panel.unit + floor, size=9)
        axis.set_xlim(0, 1.12 * max([*values, panel.floor or 0]) or 1)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Read the records and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text()) for path in arguments.records]
    draw([panel for record in records for panel in panels_of(record)], arguments.picture)


if __name__ == "__main__":
    main()
