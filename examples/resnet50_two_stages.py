"""ResNet-50 in 3D on one device, on two in turn, and as a pipeline with several split sizes.

    python examples/resnet50_two_stages.py --devices 0,1
    python examples/resnet50_two_stages.py --devices cpu,cpu --output times.png --json times.json

PyTorch's tutorial "Single-Machine Model Parallel Best Practices" divides a ResNet-50 by hand. Here
MONAI's three-dimensional one is a chain of modules, which ``parallelize`` cuts and runs. Your own
network works the same way. A batch is split along its samples, and the micro-batches pass through
the stages one after another. Small ones keep all devices busy, but their kernels are less
efficient.

Times are those of whole training steps, forward, backward and optimizer, each from an idle machine
to an idle machine, after a warm-up. The loss of the first step is the same in every row, because
network and batch are the same. Instance normalisation replaces MONAI's batch normalisation, whose
statistics would be those of a micro-batch instead of the batch.

On CPUs the default network and volumes are small; a run takes about a minute.
"""

import gc
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from monai.networks.nets.resnet import resnet50
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from unet3d.errors import Unet3dError
from unet3d.model import SequentialNetwork
from unet3d.parallel import (
    Executor,
    Layout,
    Machine,
    autocast_dtype,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.partition import default_cuts
from unet3d.reports.figures import BLUE, ORANGE, VERMILION

NUM_CLASSES = 10
MAX_STRIDE = 16
"""Stride of the last layers, which must have more than one voxel to normalise."""
PARTS = ("conv1", "bn1", "act", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool")
HEADINGS = (
    "split\nsize",
    "micro-\nbatches",
    "ms",
    "fastest",
    "slowest",
    "speed-\nup",
    "first\nloss",
)

Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The network, data and steps, for any devices."""

    shape: tuple[int, ...]
    """Voxels of a volume along X, Y, Z."""
    batch_size: int
    """Volumes of a step."""
    width: float
    """Factor of ResNet-50's channels."""
    precision: str
    """Number type on GPUs."""
    num_warm_up_steps: int
    """Not timed."""
    num_steps: int
    """Timed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train, and its times."""

    name: str
    """Of the way."""
    num_stages: int
    """Devices that share the network."""
    split_size: int
    """Samples that go through the stages together."""
    first_loss: float
    """Loss of the first step."""
    seconds: tuple[float, ...]
    """Of each timed step."""

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


def make_network(work: Work) -> SequentialNetwork:
    """Return ResNet-50 with random weights, the same at every call."""
    torch.manual_seed(0)
    resnet = resnet50(
        spatial_dims=3, n_input_channels=1, num_classes=NUM_CLASSES, widen_factor=work.width
    )
    parts = [(name, getattr(resnet, name)) for name in PARTS]
    chain = nn.Sequential(OrderedDict([*parts, ("flatten", nn.Flatten()), ("fc", resnet.fc)]))
    for parent in list(chain.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm3d):
                setattr(parent, name, nn.InstanceNorm3d(child.num_features, affine=True))
    return SequentialNetwork(chain, (1, *work.shape))


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy, in full precision."""
    return functional.cross_entropy(logits.float(), target)


def measure(name: str, work: Work, devices: Devices, split_size: int) -> Row:
    """Train for some steps in one way."""
    layout = Layout(
        devices=devices,
        num_micro_batches=work.batch_size // split_size,
        autocast=autocast_dtype(work.precision),
    )
    executor = parallelize(make_network(work), layout)
    first_loss, seconds = time_steps(executor, work)
    del executor
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Row(
        name=name,
        num_stages=len(devices),
        split_size=split_size,
        first_loss=first_loss,
        seconds=tuple(seconds),
    )


def time_steps(executor: Executor, work: Work) -> tuple[float, list[float]]:
    """Return the loss of the first step, and the seconds of the steps after the warm-up."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(work.batch_size, 1, *work.shape, generator=generator)
    target = torch.randint(NUM_CLASSES, (work.batch_size,), generator=generator)
    image, target = image.to(executor.input_device), target.to(executor.output_device)
    optimizer = torch.optim.SGD(executor.module.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(work.num_warm_up_steps + work.num_steps):
        synchronize()
        began = time.perf_counter()
        loss = executor.forward_backward(image, target, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.total.item())
    return losses[0], seconds[work.num_warm_up_steps :]


def synchronize() -> None:
    """Wait until every GPU is idle."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def table_of(rows: Sequence[Row], work: Work) -> Table:
    """Return the times as a table, relative to a single device."""
    table = Table(title="One training step", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", vertical="bottom")
    for row in rows:
        table.add_row(
            row.name,
            str(row.split_size),
            str(work.batch_size // row.split_size),
            f"{1000 * row.median:.1f}",
            f"{1000 * min(row.seconds):.1f}",
            f"{1000 * max(row.seconds):.1f}",
            f"{rows[0].median / row.median:.2f}x",
            f"{row.first_loss:.4f}",
        )
    return table


def draw(rows: Sequence[Row], work: Work, device_names: Sequence[str]) -> Figure:
    """Draw time against split size: the curve of the pipeline, and a line for one device."""
    one, in_turn, *pipelined = rows
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lowest, highest = (1000 * limit for limit in (min(one.seconds), max(one.seconds)))
    axes.axhspan(lowest, highest, color=ORANGE, alpha=0.2, linewidth=0)
    axes.axhline(1000 * one.median, color=ORANGE, label=f"{one.name}, whole batch")
    curve = sorted(pipelined, key=lambda row: row.split_size)
    _errorbars(axes, curve, color=BLUE, fmt="o-", label=f"{in_turn.num_stages} stages pipelined")
    _errorbars(axes, [in_turn], color=VERMILION, fmt="s", label=in_turn.name)
    # The pipeline with a single micro-batch equals the stages in turn: the end of its curve.
    ends = [*curve[-1:], in_turn]
    axes.plot(
        [row.split_size for row in ends],
        [1000 * row.median for row in ends],
        color=BLUE,
        linestyle=":",
        zorder=1,
    )
    axes.set_xscale("log", base=2)
    sizes = sorted({row.split_size for row in rows})
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("split size (volumes in a micro-batch)")
    axes.set_ylabel("one training step (ms): median, fastest and slowest")
    size = "x".join(map(str, work.shape))
    places = ", ".join(device_names)
    axes.set_title(
        f"3D ResNet-50, width {work.width:g}, a batch of {work.batch_size} volumes of {size}\n"
        f"{places}; {work.precision}; torch {torch.__version__}",
        loc="left",
        fontsize=10,
    )
    axes.grid(axis="y", color="#E5E5E5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    return figure


def _errorbars(axes: Any, rows: Sequence[Row], **style: Any) -> None:
    milliseconds = [1000 * row.median for row in rows]
    below = [1000 * (row.median - min(row.seconds)) for row in rows]
    above = [1000 * (max(row.seconds) - row.median) for row in rows]
    sizes = [row.split_size for row in rows]
    axes.errorbar(sizes, milliseconds, yerr=(below, above), capsize=4, **style)


def name_of(device: torch.device) -> str:
    """Return a device's name, with the model of a GPU."""
    return str(device) if device.type == "cpu" else torch.cuda.get_device_name(device)


def numbers(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Read whole numbers from 1 on, such as ``1,2,4``."""
    if text is None:
        return None
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise click.BadParameter(f"{text!r} are not whole numbers from 1 on, such as 1,2,4")
    return tuple(values)


def split_sizes(asked: tuple[int, ...] | None, batch_size: int) -> tuple[int, ...]:
    """Return the split sizes to try: the requested ones, or all that divide the batch."""
    possible = tuple(size for size in range(1, batch_size) if batch_size % size == 0)
    for size in asked or ():
        if size not in possible:
            named = ", ".join(map(str, possible))
            raise click.BadParameter(
                f"splits of {size} do not divide a batch of {batch_size}; use any of {named}"
            )
    return asked or possible


def default_devices() -> str:
    """Return two GPUs where there are two, else the CPU twice."""
    return "0,1" if torch.cuda.device_count() > 1 else "cpu,cpu"


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--devices", default=default_devices, help="One for each stage.  [0,1 or cpu,cpu]")
@click.option("--shape", callback=numbers, help="Voxels along X, Y, Z.  [GPUs 96,96,96; 32,32,32]")
@click.option("--batch-size", type=click.IntRange(2), default=12, show_default=True)
@click.option("--width", type=click.FloatRange(1 / 64), help="Factor of channels.  [GPUs 1; 0.25]")
@click.option("--splits", callback=numbers, help="Split sizes to try.  [all that divide the batch]")
@click.option("--steps", type=click.IntRange(1), default=7, show_default=True, help="Timed steps.")
@click.option("--output", type=Path, default=Path("resnet50_two_stages.png"), show_default=True)
@click.option("--json", "json_path", type=Path, help="Write the times here too.")
def main(
    *,
    devices: str,
    shape: tuple[int, ...] | None,
    batch_size: int,
    width: float | None,
    splits: tuple[int, ...] | None,
    steps: int,
    output: Path,
    json_path: Path | None,
) -> None:
    """Measure every way, print the table, draw the curve."""
    try:
        placed = tuple(Machine.here().device(name) for name in devices.split(","))
        precision = resolve_precision("auto", placed)
    except Unet3dError as error:
        raise click.ClickException(str(error)) from error
    if len(placed) < 2:
        raise click.BadParameter(f"{devices!r} is one device; name one for each stage")
    if shape is not None and (len(shape) != 3 or min(shape) <= MAX_STRIDE):
        raise click.BadParameter(f"a shape has three sizes above {MAX_STRIDE}, such as 32,32,32")
    splits = split_sizes(splits, batch_size)
    has_gpus = any(device.type == "cuda" for device in placed)
    work = Work(
        shape=shape or ((96, 96, 96) if has_gpus else (32, 32, 32)),
        batch_size=batch_size,
        width=width or (1.0 if has_gpus else 0.25),
        precision=precision,
        num_warm_up_steps=5 if has_gpus else 2,  # on GPUs steps are captured after three
        num_steps=steps,
    )
    console = Console()
    network = make_network(work)
    cuts = [network.blocks()[cut].name for cut in default_cuts(network, Layout(devices=placed))]
    console.print(f"{len(network.blocks())} blocks, cut before {', '.join(cuts)}")
    count = len(placed)
    ways = [("one device", placed[:1], batch_size), (f"{count} stages in turn", placed, batch_size)]
    ways += [(f"{count} stages pipelined", placed, split) for split in splits]
    rows = []
    for name, where, split in ways:
        with console.status(f"{name}, split size {split}"):
            rows.append(measure(name, work, where, split))
    console.print(table_of(rows, work))
    if len(set(placed)) < count:
        console.print("Stages on one device do not work at the same time: splitting only costs.")
    device_names = [name_of(device) for device in placed]
    draw(rows, work, device_names).savefig(output, dpi=120)
    console.print(f"drawn: {output}")
    if json_path is not None:
        record = {
            **asdict(work),
            "devices": device_names,
            "torch": torch.__version__,
            "cut_before": cuts,
            "rows": [asdict(row) for row in rows],
        }
        json_path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
