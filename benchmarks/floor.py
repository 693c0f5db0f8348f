"""The shortest time that a training step could take, from what the device was measured to do.

Each layer of the network of nnU-Net's plain kind (two 3x3x3 convolutions a level, each with
normalisation; strided convolution down, transposed convolution up) is counted by itself, from
channels and shapes alone, without looking at our code. With N voxels of its output, batch included:

* a convolution from I to O channels with k weights a pair takes 2 k I O N operations forward, as
  many for the gradient of its input and as many for that of its weights; the first has no gradient
  of its input. A transposed convolution whose kernel is its stride has k = 1 here: each voxel of
  its output comes from one of its input;
* upsampling and the convolution behind it are one transposed convolution whose kernel has s + 2
  taps along an axis that is upsampled s times, of which a voxel reads (s + 2) / s: for s = 2 eight
  in all. It is counted, and the operations that make its kernel from both weights each time, where
  that is less than both apart;
* a normalisation with its activation moves its tensor 3 times forward (read for the statistics,
  read, write) and 5 times backward (input and gradient read for the sums, both again, write). The
  first need not write its gradient, which only the weights' gradient reads: 4 times backward. The
  last need not write its result, which only the head reads, nor read its gradient, which follows
  from that of the logits: 2 times forward and 3 backward;
* the loss reads the logits forward, and reads and writes them backward;
* the optimizer (SGD with momentum) reads weight, gradient and momentum, and writes weight and
  momentum, in float32.

The floor is all operations over the measured rate of a matrix product, plus the bytes of
normalisations, loss and optimizer over the measured rate of a copy (read and written bytes both
count). A convolution's own reads and writes are taken to hide behind its arithmetic. That is the
lowest of three sums; the others, which a step may not reach either, are given beside it: per layer
and pass the longer of arithmetic and traffic, and the two added.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import synchronize
from peers import Problem

KERNEL_VOXELS = 27


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One way through one layer."""

    layer: str
    """Such as ``encoder.0.1`` or ``norm``."""
    direction: str
    """``forward``, ``data gradient``, ``weight gradient``, ``backward`` or ``update``."""
    num_operations: int
    """A multiplication and an addition are two."""
    moved_bytes: int
    """Each tensor read or written once, but where the layer must read twice."""


def count_passes(problem: Problem, element_bytes: int) -> list[Pass]:
    """Return every pass of a training step.

    Args:
        problem: Channels, size and batch.
        element_bytes: Of an activation.
    """
    topology = problem.topology
    voxels, channels = [], topology.channels
    size = problem.size
    for stride in topology.strides:
        x, y, z = (-(-length // step) for length, step in zip(size, stride, strict=True))
        size = (x, y, z)
        voxels.append(problem.batch_size * math.prod(size))
    passes: list[Pass] = []
    num_weights = 0

    def convolution(
        layer: str, *, inputs: int, outputs: int, read: int, written: int, kernel: int, stored: int
    ) -> None:
        nonlocal num_weights
        num_weights += inputs * outputs * stored
        operations = 2 * kernel * inputs * outputs * written
        moved = element_bytes * (inputs * read + outputs * written)
        directions = ["forward", "data gradient", "weight gradient"]
        if layer == "encoder.0.0":
            directions.remove("data gradient")
        passes.extend(
            Pass(layer=layer, direction=direction, num_operations=operations, moved_bytes=moved)
            for direction in directions
        )

    def norm(layer: str, level: int) -> None:
        nonlocal num_weights
        num_weights += 2 * channels[level]
        tensor = element_bytes * channels[level] * voxels[level]
        is_first, is_last = layer == "encoder.0.0", layer == "decoder.0.1"
        moved = {"forward": 2 if is_last else 3, "backward": 4 if is_first else 3 if is_last else 5}
        for direction, times in moved.items():
            passes.append(
                Pass(
                    layer=f"{layer}.norm",
                    direction=direction,
                    num_operations=0,
                    moved_bytes=times * tensor,
                )
            )

    def convolve(layer: str, inputs: int, read: int, level: int) -> None:
        kernel = KERNEL_VOXELS
        convolution(
            layer,
            inputs=inputs,
            outputs=channels[level],
            read=read,
            written=voxels[level],
            kernel=kernel,
            stored=kernel,
        )

    def unit(layer: str, inputs: int, read: int, level: int) -> None:
        convolve(layer, inputs, read, level)
        norm(layer, level)

    def upsampled(level: int) -> None:
        nonlocal num_weights
        stride, below = topology.strides[level + 1], level + 1
        inputs, outputs = channels[below], channels[level]
        up, name = math.prod(stride), f"decoder.{level}"
        taps = math.prod(step + 2 for step in stride)
        made = 2 * KERNEL_VOXELS * taps * inputs * outputs**2
        apart = 2 * outputs * voxels[level] * (inputs + KERNEL_VOXELS * outputs)
        together = 2 * outputs * voxels[level] * inputs * taps // up
        if together + made >= apart:
            convolution(
                f"{name}.up",
                inputs=inputs,
                outputs=outputs,
                read=voxels[below],
                written=voxels[level],
                kernel=1,
                stored=up,
            )
            convolve(f"{name}.0", outputs, voxels[level], level)
            return
        num_weights += inputs * outputs * up + KERNEL_VOXELS * outputs**2
        moved = element_bytes * (inputs * voxels[below] + outputs * voxels[level])
        for direction in ("forward", "data gradient", "weight gradient"):
            passes.append(
                Pass(
                    layer=f"{name}.up and {name}.0",
                    direction=direction,
                    num_operations=together,
                    moved_bytes=moved,
                )
            )
            passes.append(
                Pass(
                    layer=f"kernel of {name}.up and {name}.0",
                    direction=direction,
                    num_operations=made,
                    moved_bytes=4 * inputs * outputs * taps,
                )
            )

    inputs, read = topology.in_channels, voxels[0]
    for level in range(topology.num_levels):
        unit(f"encoder.{level}.0", inputs, read, level)
        unit(f"encoder.{level}.1", channels[level], voxels[level], level)
        inputs, read = channels[level], voxels[level]
    for level in reversed(range(topology.num_levels - 1)):
        upsampled(level)
        convolve(f"decoder.{level}.skip", channels[level], voxels[level], level)
        norm(f"decoder.{level}.0", level)
        unit(f"decoder.{level}.1", channels[level], voxels[level], level)
    convolution(
        "head",
        inputs=channels[0],
        outputs=topology.num_classes,
        read=voxels[0],
        written=voxels[0],
        kernel=1,
        stored=1,
    )
    logits = element_bytes * topology.num_classes * voxels[0]
    passes.append(Pass(layer="loss", direction="forward", num_operations=0, moved_bytes=logits))
    passes.append(
        Pass(layer="loss", direction="backward", num_operations=0, moved_bytes=2 * logits)
    )
    passes.append(
        Pass(
            layer="optimizer", direction="update", num_operations=0, moved_bytes=5 * 4 * num_weights
        )
    )
    return passes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device was measured to do."""

    operations_per_second: float
    """Of a large matrix product in the precision of the step."""
    bytes_per_second: float
    """Of a copy on the device, read and written bytes together."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Time matrix products and copies, large enough that launching them does not matter."""
    edge, copied = (8192, 2**30) if device.type == "cuda" else (768, 2**25)
    left = torch.randn(edge, edge, device=device, dtype=dtype)
    right = torch.randn(edge, edge, device=device, dtype=dtype)
    product = torch.empty_like(left)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Rates(
        operations_per_second=2 * edge**3 / _seconds_of(lambda: torch.mm(left, right, out=product)),
        bytes_per_second=2 * copied / _seconds_of(lambda: target.copy_(source)),
    )


def _seconds_of(action: Callable[[], object], num_in_a_row: int = 10) -> float:
    """Return the median time of an action, several launched together."""
    seconds = []
    for _ in range(6):
        synchronize()
        began = time.perf_counter()
        for _ in range(num_in_a_row):
            action()
        synchronize()
        seconds.append((time.perf_counter() - began) / num_in_a_row)
    return statistics.median(seconds[1:])


def floor_seconds(passes: list[Pass], rates: Rates) -> dict[str, float]:
    """Return the floor and, beside it, the two sums that count convolutions' traffic.

    Args:
        passes: Of one step.
        rates: Of the device.

    Returns:
        ``floor``, ``longer_of_both`` and ``both_added``, in seconds.
    """
    floor = longer = added = 0.0
    for one in passes:
        arithmetic = one.num_operations / rates.operations_per_second
        traffic = one.moved_bytes / rates.bytes_per_second
        floor += arithmetic if one.num_operations else traffic
        longer += max(arithmetic, traffic)
        added += arithmetic + traffic
    return {"floor": floor, "longer_of_both": longer, "both_added": added}
