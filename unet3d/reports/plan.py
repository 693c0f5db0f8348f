"""Text of plans: all placements of a training run compared, and the memory of a prediction."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from unet3d.errors import counted
from unet3d.images.files import times
from unet3d.memory.host import readable
from unet3d.reports.tables import PART_HEADS, Table, amount, bar_parts, memory_notes, unit_of

MAX_ROWS = 8
"""Most devices of a placement that have a row each; of more devices, equal rows are merged."""


def plan_table(record: Mapping[str, Any]) -> Table:
    """Return the table of the placements of :func:`unet3d.planning.comparison.compare`."""
    ways = record["ways"]
    unit, unit_bytes = unit_of([slot for way in ways for slot in way["slots"]], "predicted")
    notes = [note for way in ways for note in memory_notes(way["slots"], "predicted")]
    groups = []
    for way in ways:
        name, fits = way_name(way) + "*" * way["asked"], "yes" if way["fits"] else "NO"
        groups.append(
            [
                (name, *row, fits) if index == 0 else ("", *row, "")
                for index, row in enumerate(_rows(way, unit_bytes))
            ]
        )
    return Table(
        title=f"Predicted memory ({unit}): {counted(record['batch_size'], 'patch')} of "
        f"{times(record['shape'])} voxels, {record['precision']}",
        heads=(
            *("parallel,\nmicro-batches", "slot", "device"),
            *(*PART_HEADS, "rest", "peak", "device\ntotal", "fits"),
        ),
        groups=groups,
        num_names=3,
        notes=list(dict.fromkeys([*record["notes"], *notes])),
    )


def _rows(way: Mapping[str, Any], unit_bytes: int) -> list[tuple[str, ...]]:
    """Return slot, device and numbers of each row; with many devices, equal rows are merged."""
    rows = []
    for slot in way["slots"]:
        bar = bar_parts(slot, way["slots"], "predicted")
        values = [*bar.values(), slot["predicted"]["peak_bytes"], slot["device_bytes"]]
        rows.append((slot, [amount(value, unit_bytes) for value in values]))
    runs = []
    key = (lambda row: row[1]) if len(rows) > MAX_ROWS else (lambda row: row[0]["slot"])
    for _, run in groupby(rows, key=key):
        (first, values), *others = run
        number, device = str(first["slot"]), first["device"]
        if others:
            last, _ = others[-1]
            number += f"-{last['slot']}"
            device += "" if device == last["device"] else f"-{last['device'].partition(':')[2]}"
        runs.append((number, device, *values))
    return runs


def plan_line(way: Mapping[str, Any]) -> str:
    """Return a placement's options, the time of a step, and the largest volume."""
    devices = ",".join(slot["device"] for slot in way["slots"])
    shape = way["largest_shape"]
    return (
        f"--parallel {way['parallel']} --devices {devices} "
        + (f"--replicas {way['replicas']} " if _has_groups(way) else "")
        + f"--micro-batches {way['num_micro_batches']}"
        + (f" --set parallel.cuts={way['balance']}: " if way["balance"] else ": ")
        + (f"{_milliseconds(way)} ms a step, " if way["step_seconds"] else "")
        + (f"up to {times(shape)} voxels" if shape else "not even the smallest volume fits")
        + (" (chosen)" if way["asked"] else "")
    )


def way_name(way: Mapping[str, Any]) -> str:
    """Return the name of a placement in the table: replicas, mode and micro-batches."""
    copies = f"{way['replicas']} x " if _has_groups(way) else ""
    return f"{copies}{way['parallel']}, {way['num_micro_batches']}"


def _has_groups(way: Mapping[str, Any]) -> bool:
    return bool(way["parallel"] in ("model", "spatial") and way["replicas"] > 1)


def _milliseconds(way: Mapping[str, Any]) -> str:
    milliseconds = 1000 * way["step_seconds"]
    return f"{milliseconds:.1f}" if milliseconds < 10 else f"{milliseconds:.0f}"


def prediction_lines(record: Mapping[str, Any], name: str) -> list[str]:
    """Return lines on a scan's memory on device and host, predicted by ``plan --predict``."""
    parts = {
        "the program and the network": record["program_bytes"],
        "the slab being computed": record["slab_bytes"],
        "unpacked voxels": record["voxel_bytes"],
        "labels": record["label_bytes"],
    }
    said = ", ".join(f"{readable(size)} {what}" for what, size in parts.items() if size)
    lines = [
        f"{name}: {counted(record['num_windows'], 'window')} of {times(record['window'])} voxels, "
        f"{min(record['windows_at_a_time'], record['num_windows'])} at a time",
    ]
    if record["device_bytes"]:
        fits = "fits" if record["device_bytes"] <= record["device_has_bytes"] else "DOES NOT FIT"
        lines.append(
            f"{record['device']}: {readable(record['device_bytes'])} of "
            f"{readable(record['device_has_bytes'])}, {fits}"
        )
    lines.append(f"host: {readable(record['host_bytes'])} ({said})")
    if record["label_file_bytes"]:
        lines.append(f"disk beside the segmentation: {readable(record['label_file_bytes'])}")
    if record["scratch_host_bytes"] < record["host_bytes"]:
        lines.append(
            f"host with --scratch DIR: {readable(record['scratch_host_bytes'])}, and "
            f"{readable(record['scratch_bytes'])} on the disk of DIR"
        )
    if record["host_bytes"] > record["host_available_bytes"]:
        lines.append(
            f"the scan does not fit: this machine has only "
            f"{readable(record['host_available_bytes'])} available"
        )
    return lines
