"""Records for reports, and functions that read the reports' output."""

import io
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.image
import torch
from rich.console import Console

from unet3d.memory.meter import Mark, SlotMemory, Timeline
from unet3d.memory.record import memory_record
from unet3d.parallel import Slot
from unet3d.reports.tables import score

MIB = 1024**2
ENCODER = ("encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1")
STEP = ((0, "forward"), (1, "loss"), (1, "backward"))
DECODER = ("decoder.0.skip", "decoder.0.up", "decoder.0.0", "decoder.0.1", "head")


def memory_of(activations_mib, parameters_mib=7, peak_mib=None):
    """Return the memory of a slot; gradients and momentum are as large as the parameters."""
    counted = activations_mib + 3 * parameters_mib
    peak = counted if peak_mib is None else peak_mib
    sizes = (*[parameters_mib] * 3, activations_mib, peak)
    names = ("parameters", "gradients", "optimizer", "activations", "peak")
    return SlotMemory(
        **{f"{name}_bytes": round(size * MIB) for name, size in zip(names, sizes, strict=True)}
    )


def record_of(devices, memories):
    """Return the content of ``memory.json``; each predicted peak is 1 MiB too large."""
    cpu = torch.device("cpu")
    slots = [
        Slot(index=index, device=cpu, blocks=DECODER if index else ENCODER)
        for index in range(len(devices))
    ]
    predicted = [replace(one, peak_bytes=one.peak_bytes + MIB) for one in memories]
    made = memory_record("model", slots, dict(enumerate(memories)), dict(enumerate(predicted)))
    for slot, device in zip(made["slots"], devices, strict=True):
        slot |= {"device": device, "device_bytes": 80 * 1024 * MIB}  # pretend that it was a GPU
    return made


def cells(table):
    """Return the rows of a table as they are shown."""
    return [
        tuple(cell.strip() if isinstance(cell, str) else score(cell) for cell in row)
        for group in table.groups
        for row in group
    ]


def printed(table, width):
    """Return a table as a terminal without colours shows it."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table.for_terminal())
    return capture.get()


class Terminal:
    """The output of a terminal with some width, and a clock."""

    def __init__(self, monkeypatch, width=80):
        self.seconds = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)
        self._text = io.StringIO()
        self.console = Console(file=self._text, force_terminal=True, width=width)

    def shown(self):
        """Return the lines since the last call, without colours and movements of the cursor."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._text.getvalue())
        self._text.seek(0)
        self._text.truncate()
        return [line.rstrip() for line in re.split("[\r\n]", text) if line.strip()]


def assert_is_picture(path: Path) -> None:
    """Check that a file is a PNG with more than one colour."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = matplotlib.image.imread(path)
    assert pixels.min() < pixels.max()


def timeline(num_micro_batches, device="cuda:0", slots=(0,)):
    """Return a step: forward on slot 0, loss and backward on slot 1, for each micro-batch."""
    actions = [
        *((slot, kind, number) for number in range(num_micro_batches) for slot, kind in STEP),
        (None, "optimizer", None),
    ]
    names = ("slot", "kind", "micro_batch", "bytes", "peak_bytes")
    values = ((*one, (50 + at) * MIB, (100 - at) * MIB) for at, one in enumerate(actions))
    marks = tuple(Mark(**dict(zip(names, one, strict=True))) for one in values)
    return asdict(Timeline(device=device, slots=slots, marks=marks))


def legend(axes):
    """Return the names in a legend."""
    return [text.get_text() for text in axes.get_legend().get_texts()]


def curves(axes):
    """Return the x and y of the points of each line, by its name."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }
