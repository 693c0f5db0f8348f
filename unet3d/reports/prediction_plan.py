"""What a prediction takes, for people."""

from collections.abc import Mapping
from typing import Any

from unet3d.memory.host import readable
from unet3d.reports.format import size_text


def prediction_lines(record: Mapping[str, Any], name: str) -> list[str]:
    """Return what a scan takes of each machine, a line each.

    Args:
        record: What :meth:`unet3d.inference.prediction_memory.PredictionMemory.to_dict` returns.
        name: The scan's.
    """
    parts = {
        "the program and the network": record["program_bytes"],
        "the slab that is worked on": record["slab_bytes"],
        "voxels that are unpacked": record["voxel_bytes"],
        "labels": record["label_bytes"],
    }
    said = ", ".join(f"{readable(size)} {what}" for what, size in parts.items() if size)
    lines = [
        f"{name}: {record['num_windows']} windows of {size_text(record['window'])} voxels, "
        f"{min(record['windows_at_a_time'], record['num_windows'])} at a time",
    ]
    if record["device_bytes"]:
        fits = "fits" if record["device_bytes"] <= record["device_has_bytes"] else "DOES NOT FIT"
        lines.append(
            f"{record['device']}: {readable(record['device_bytes'])} of "
            f"{readable(record['device_has_bytes'])}, {fits}"
        )
    lines.append(f"host: {readable(record['host_bytes'])} ({said})")
    if record["scratch_bytes"]:
        lines.append(
            f"host with --scratch DIR: {readable(record['scratch_host_bytes'])}, and "
            f"{readable(record['scratch_bytes'])} of that disk"
        )
    if record["host_bytes"] > record["host_available_bytes"]:
        lines.append(
            f"this machine has {readable(record['host_available_bytes'])} available, which is less"
        )
    return lines
