"""Hand-written convolutions against cuDNN's, including the passes of a normalisation around them.

    python benchmarks/kernels.py --json kernels.json
    python benchmarks/kernels.py --sizes 32-32@256,64-64@128 --only forward,weight-gradient
    python benchmarks/kernels.py --device cpu --sizes 8-8@8,8-16@2x6 --launches 3

A size such as ``32-64@4x128`` means a 3x3x3 convolution from 32 to 64 channels of four maps of
128^3 in bfloat16. The forms are the convolutions of a training step: forward, with moments of the
result, or with moments of its sum with another map; of a map that is normalised first, without and
with moments of the result; the gradient of the input, without and with the sums that backward of
the normalisation before it needs; and the gradient of the weights, without and with normalising the
input. With cuDNN the normalisation takes separate passes. "cuDNN, folded" computes two neighbours
along Z as one voxel, of maps stored with zeros around Z.

A time is the median of ``--launches`` over three inputs in turn, all queued before the first
begins, so that no GPU waits for the host. TFLOP/s count the convolution's operations only, over the
whole time. Errors are relative norms against float64; of maps, only planes in the middle are
compared. The time of a first use, with an empty and with a filled cache, is for all forms together
in a separate process. On a CPU the plain versions stand for the hand-written ones.
"""

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import (
    devices_named,
    new_parser,
    one_device,
    reason_of,
    say,
    synchronize,
    words,
    write_record,
)
from torch import Tensor

from unet3d.kernels.conv import folded
from unet3d.kernels.conv.folded import pad_z
from unet3d.kernels.conv.hopper import op, reference
from unet3d.kernels.maps import MAX_CHANNELS, channels_last, empty_map, mark_padded
from unet3d.kernels.norm.volume import stages_for

SIZES = "32-32@256,32-32@4x128,32-32@128,64-64@128,64-64@64,32-64@128,64-32@128"
SLOPE = 0.01
EPS = 1e-5
SIDES = (1, 1)
NO_AFFINE = (None, None, None, None)
NO_HALO = (None, None)
NUM_INPUTS = 3
WARM_SECONDS = 0.06
"""Seconds of launches before the first one that is timed: a GPU's clock falls while it works."""
AHEAD_CYCLES = 2 * 10**7
"""Cycles that a GPU first waits, about 10 ms, while the host queues the launches."""
CHECKED_PLANES = 2
PRODUCT_EDGE = 8192
COPIED_ELEMENTS = 2**29


class Form(NamedTuple):
    """A convolution or one of its gradients, with or without parts of a normalisation."""

    name: str
    kind: str
    """The operation: ``convolve``, ``input_gradient`` or ``weight_gradient``."""
    normalizes: bool = False
    """Whether the convolution's input is normalised."""
    adds_up: bool = False
    """Whether moments or sums are computed, too."""
    of_sum: bool = False
    """Whether the result is added to another map, and the moments are of the sum."""


Way = Callable[[Form, "Maps"], Tensor]

FORMS = (
    Form("forward", "convolve"),
    Form("moments", "convolve", adds_up=True),
    Form("moments-of-sum", "convolve", adds_up=True, of_sum=True),
    Form("normalized", "convolve", normalizes=True),
    Form("both", "convolve", normalizes=True, adds_up=True),
    Form("input-gradient", "input_gradient"),
    Form("sums", "input_gradient", normalizes=True, adds_up=True),
    Form("weight-gradient", "weight_gradient"),
    Form("normalized-weight-gradient", "weight_gradient", normalizes=True),
)
RATES, FIRST = "rates", "first"
PARTS = (RATES, FIRST, *(form.name for form in FORMS))


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a convolution."""

    inputs: int
    outputs: int
    samples: int
    edge: int

    @classmethod
    def parsed(cls, text: str) -> "Size":
        """Read ``32-64@4x128``, or ``32-64@128`` for one map."""
        found = re.fullmatch(r"(\d+)-(\d+)@(?:(\d+)x)?(\d+)", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text}: write sizes like 32-64@4x128 or 32-32@256")
        inputs, outputs, samples, edge = (int(number or 1) for number in found.groups())
        return cls(inputs=inputs, outputs=outputs, samples=samples, edge=edge)

    @property
    def name(self) -> str:
        """Return the size in the notation of the command line."""
        count = f"{self.samples}x" if self.samples > 1 else ""
        return f"{self.inputs}-{self.outputs}@{count}{self.edge}"

    @property
    def num_operations(self) -> int:
        """Return the operations of a convolution; a multiplication and an addition are two."""
        return 2 * 27 * self.inputs * self.outputs * self.samples * self.edge**3


class Maps(NamedTuple):
    """Inputs of one launch."""

    x: Tensor
    dy: Tensor
    added: Tensor
    """A map like dy, to which convolutions may be added in its memory."""
    padded_x: Tensor
    """A copy of x, stored with zeros around Z."""
    padded_dy: Tensor
    kernel: Tensor
    affine: tuple[Tensor, ...]
    stages: ModuleType


def sizes(text: str) -> tuple[Size, ...]:
    """Return the sizes of ``32-32@256,64-64@128``."""
    return tuple(map(Size.parsed, words(text)))


def parts(text: str) -> tuple[str, ...]:
    """Return the names of ``forward,rates``."""
    unknown = set(words(text)) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{min(unknown)}: write some of {','.join(PARTS)}")
    return words(text)


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--sizes", type=sizes, default=SIZES)
    parser.add_argument("--only", type=parts, default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--device", default=one_device())
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--first-use", action="store_true", help=argparse.SUPPRESS)
    return parser


# What is measured


def make_maps(size: Size, device: torch.device) -> Maps:
    """Return noise, and the statistics of a normalisation."""

    def noise(channels: int) -> Tensor:
        shape = (size.samples, size.edge, size.edge, size.edge, channels)
        made = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return made.permute(0, 4, 1, 2, 3)

    x, dy = noise(size.inputs), noise(size.outputs)
    kernel = torch.randn(size.outputs, size.inputs, 3, 3, 3, device=device)
    kernel = channels_last((kernel / (27 * size.inputs) ** 0.5).bfloat16())
    stages = stages_for(x)
    mean, rstd, _ = stages.merge(stages.moments(x), size.edge**3, EPS)
    weight, bias = torch.randn(2, size.inputs, device=device)
    return Maps(
        x=x,
        dy=dy,
        added=dy.clone(),
        padded_x=padded(x),
        padded_dy=padded(dy),
        kernel=kernel,
        affine=(weight, bias, mean, rstd),
        stages=stages,
    )


def padded(x: Tensor) -> Tensor:
    return mark_padded(pad_z(x, 1, 1)[..., 1:-1])


def by_hand(form: Form, maps: Maps) -> Tensor:
    """Run a form with the hand-written operations."""
    return done_by(op, form, maps.x, second_of(form, maps), maps.kernel, maps.affine)


def second_of(form: Form, maps: Maps) -> Tensor:
    """Return the second input of a form."""
    return maps.added if form.of_sum else maps.dy


def done_by(
    operations: Any,
    form: Form,
    x: Tensor,
    dy: Tensor,
    kernel: Tensor,
    affine: Sequence[Tensor],
    sides: tuple[int, int] = SIDES,
) -> Tensor:
    """Run a form with ``operations``, and return the map or the weights' gradient that it makes."""
    given = affine if form.normalizes else NO_AFFINE
    before, after = sides
    result: Tensor
    if form.kind == "convolve":
        options: dict[str, Any] = {"slope": SLOPE, "before": before, "after": after}
        if form.of_sum:
            operations.add_convolution(dy, x, kernel, before=before, after=after)
            return dy
        result, _ = operations.convolve(
            x, kernel, *given, *NO_HALO, **options, moments=form.adds_up
        )
    elif form.kind == "input_gradient":
        options = {"slope": SLOPE, "before": before, "after": after}
        read = x if form.adds_up else None
        result, _ = operations.input_gradient(dy, kernel, read, *given, **options)
    else:
        result = operations.weight_gradient(dy, x, *given, *NO_HALO, slope=SLOPE, before=before)
    return result


def plain(form: Form, maps: Maps) -> Tensor:
    """Run a form with cuDNN as PyTorch calls it."""
    x = maps.x
    if form.normalizes and form.kind != "input_gradient":
        normal = channels_last(torch.empty_like(x))
        maps.stages.normalize(normal, x, *maps.affine, slope=SLOPE, pads=False)
        x = normal
    if form.kind == "convolve":
        made = F.conv3d(x, maps.kernel, padding=1)
    else:
        of_input = form.kind == "input_gradient"
        wanted = [of_input, not of_input, False]
        ones = (1, 1, 1)
        given = (None, ones, ones, ones, False, (0, 0, 0), 1, wanted)
        both = torch.ops.aten.convolution_backward(maps.dy, x, maps.kernel, *given)
        made = both[0 if of_input else 1]
    return with_numbers(form, made, maps)


def in_pairs(form: Form, maps: Maps) -> Tensor:
    """Run a form with cuDNN, two neighbours along Z as one voxel."""
    x, kernel, on_gpu = maps.padded_x, maps.kernel, maps.x.is_cuda
    if form.normalizes and form.kind != "input_gradient":
        x = empty_map(maps.x, on_gpu)
        maps.stages.normalize(x, maps.x, *maps.affine, slope=SLOPE, pads=on_gpu)
        x = mark_padded(x) if on_gpu else x
    if form.kind == "convolve":
        made = folded._convolve(x, kernel, 1)
    elif form.kind == "input_gradient":
        made = folded._convolve(maps.padded_dy, kernel.flip(2, 3, 4).transpose(0, 1), 1)
    else:
        made = folded._weight_gradient(maps.padded_dy, x, kernel, 1)
    return with_numbers(form, made, maps)


def with_numbers(form: Form, made: Tensor, maps: Maps) -> Tensor:
    """Return a result, after a separate pass that computes its moments or sums, if needed."""
    if form.of_sum and made.is_cuda:
        maps.stages.sum_moments(made, maps.added)
    elif form.kind == "convolve" and form.adds_up:
        maps.stages.moments(made.add_(maps.added) if form.of_sum else made)
    elif form.adds_up:
        maps.stages.sums(channels_last(made), maps.x, *maps.affine, slope=SLOPE)
    return made


def ways_for(size: Size) -> dict[str, Way]:
    """Return the functions that can run at a size, by name."""
    ways: dict[str, Way] = {"by hand": by_hand, "cuDNN": plain}
    if max(size.inputs, size.outputs) <= MAX_CHANNELS and size.edge % 2 == 0:
        ways["cuDNN, folded"] = in_pairs
    return ways


# Times and errors


def times_of(launches: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Return the seconds of each of ``count`` launches; the given ones take turns."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        taken = []
        for number in range(count + 1):
            began = time.perf_counter()
            launches[number % len(launches)]()
            taken.append(time.perf_counter() - began)
        return taken[1:]
    until = time.perf_counter() + WARM_SECONDS
    while True:
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        if time.perf_counter() > until:
            break
    new: Any = torch.cuda.Event
    marks = [new(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    marks[0].record()
    for number in range(count):
        launches[number % len(launches)]()
        marks[number + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in zip(marks, marks[1:], strict=False)]


def measured(
    size: Size, forms: Sequence[Form], device: torch.device, num_launches: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each form and way at a size."""
    inputs = [make_maps(size, device) for _ in range(NUM_INPUTS)]
    for form in forms:
        exact = None
        for name, way in ways_for(size).items():
            row: dict[str, Any] = {"size": size.name, "form": form.name, "way": name}
            try:
                launches = [partial(way, form, maps) for maps in inputs]
                if exact is None or form.of_sum:  # a sum overwrites one of its inputs
                    exact = exactly(form, inputs[0])
                made = way(form, inputs[0])
                row["error"] = error_of(form, made, exact)
                del made
                taken = times_of(launches, num_launches)
                row |= {"seconds": statistics.median(taken), "least_seconds": min(taken)}
                row["tflops"] = size.num_operations / row["seconds"] / 1e12
            except Exception as error:  # no Hopper GPU, say
                row["reason"] = reason_of(error)
            yield row


def exactly(form: Form, maps: Maps) -> Tensor:
    """Return the weights' gradient, or the planes of a map that are checked, in float64."""
    affine = [value.double() for value in maps.affine]
    if form.kind == "weight_gradient":
        x = maps.x.double()
        if form.normalizes:
            x = normalized(x, affine)
        return gradient_in_float64(x, maps.dy)
    start, stop = checked(maps.x)
    both = (maps.x, second_of(form, maps))
    x, dy = (one[:, :, start - 1 : stop + 1].double() for one in both)
    # One plane more on each side, so that nothing is padded along X.
    sides = (2, 2)
    if form.kind == "convolve":
        sides, dy = (0, 0), dy[:, :, 1:-1]
    alone = form._replace(adds_up=False)
    return done_by(reference, alone, x, dy, maps.kernel.double(), affine, sides)


def normalized(x: Tensor, affine: Sequence[Tensor]) -> Tensor:
    """Return a map normalised, with LeakyReLU."""
    weight, bias, mean, rstd = affine
    scale = rstd * weight
    rows = (*x.shape[:2], 1, 1, 1)
    shift = bias - mean.sum(-1) * scale
    return F.leaky_relu(x * scale.view(rows) + shift.view(rows), SLOPE)


def gradient_in_float64(x: Tensor, dy: Tensor) -> Tensor:
    """Return the weights' gradient by matrix products; cuDNN takes much longer in float64."""
    outputs, inputs = dy.shape[1], x.shape[1]
    total = x.new_zeros((outputs, inputs, 3, 3, 3))
    planes, rows, columns = x.shape[2:]
    for read, given in zip(x, dy, strict=True):
        around = F.pad(read, (1,) * 6).permute(1, 2, 3, 0)
        voxels = given.permute(1, 2, 3, 0).double().reshape(planes, -1, outputs)
        for i, j, k in itertools.product(range(3), repeat=3):
            seen = around[i : i + planes, j : j + rows, k : k + columns]
            total[:, :, i, j, k] += (voxels.mT @ seen.reshape(planes, -1, inputs)).sum(0)
    return total


def checked(x: Tensor) -> tuple[int, int]:
    """Return the range of planes to compare, as start and stop."""
    start = (x.shape[2] - CHECKED_PLANES) // 2
    return start, start + CHECKED_PLANES


def error_of(form: Form, made: Tensor, exact: Tensor) -> float:
    """Return the relative error of a result against float64, by norms."""
    if form.kind != "weight_gradient":
        start, stop = checked(made)
        made = made[:, :, start:stop]
    error: float = ((made.double() - exact).norm() / exact.norm()).item()
    return error


def rates(device: torch.device, num_launches: int) -> dict[str, float]:
    """Return a GPU's speed in a matrix product and in a copy, in TFLOP/s and TB/s."""
    product = torch.randn(2, PRODUCT_EDGE, PRODUCT_EDGE, device=device).bfloat16()
    copied = torch.zeros(2, COPIED_ELEMENTS, dtype=torch.bfloat16, device=device)
    multiplied = statistics.median(times_of([lambda: product[0] @ product[1]], num_launches))
    moved = statistics.median(times_of([lambda: copied[0].copy_(copied[1])], num_launches))
    return {
        "product_tflops": 2 * PRODUCT_EDGE**3 / multiplied / 1e12,
        "copy_terabytes": copied.nbytes / moved / 1e12,
    }


# The first use


def first_uses() -> dict[str, Any]:
    """Return the seconds of a first use with an empty cache, and with a filled one."""
    command = [sys.executable, __file__, "--first-use"]
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("compiled_seconds", "kept_seconds"):
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                lines = done.stderr.strip().splitlines()
                return {"reason": lines[-1] if lines else f"it ended with {done.returncode}"}
            row[name] = float(done.stdout)
    return row


def use_first() -> float:
    """Return the seconds of the first launches of all forms, including compilation."""
    device = torch.device("cuda")
    small = (Size(inputs=channels, outputs=channels, samples=1, edge=16) for channels in (32, 64))
    todo = [(form, make_maps(size, device)) for size in small for form in FORMS]
    synchronize()
    began = time.perf_counter()
    with ThreadPoolExecutor(len(todo)) as pool:  # so that several are compiled at a time
        list(pool.map(lambda given: by_hand(*given), todo))
    synchronize()
    return time.perf_counter() - began


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each size and form, with time, TFLOP/s and error of each way."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    print(f"{'ms, TFLOP/s, error':44}" + "".join(f"{way:>26}" for way in ways))
    for size, form in dict.fromkeys((row["size"], row["form"]) for row in rows):
        line = f"{size:16}{form:28}"
        for way in ways:
            (row,) = [
                row for row in rows if (row["size"], row["form"], row["way"]) == (size, form, way)
            ] or [{}]
            if "seconds" in row:
                taken = f"{1000 * row['seconds']:.3f} {row['tflops']:4.0f} {row['error']:.1e}"
                line += f"{taken:>26}"
            else:
                line += f"{row.get('reason', '')[:24]:>26}"
        print(line)


def main() -> None:
    """Measure every size, print the table, write the record."""
    arguments = make_parser().parse_args()
    if arguments.first_use:
        print(use_first())
        return
    (device,) = devices_named((arguments.device,))
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    measured_too: dict[str, Any] = {}
    if on_gpu and RATES in arguments.only:
        measured_too[RATES] = rates(device, arguments.launches)
        say(measured_too[RATES])
    if on_gpu and FIRST in arguments.only:
        measured_too[FIRST] = first_uses()
        say(measured_too[FIRST])
    forms = [form for form in FORMS if form.name in arguments.only]
    rows = []
    for size in arguments.sizes:
        for row in measured(size, forms, device, arguments.launches):
            rows.append(row)
            say(row)
        if on_gpu:
            torch.cuda.empty_cache()
    print_table(rows)
    for name, found in measured_too.items():
        print(name, found)
    write_record(arguments.json, [device], launches=arguments.launches, rows=rows, **measured_too)


if __name__ == "__main__":
    main()
