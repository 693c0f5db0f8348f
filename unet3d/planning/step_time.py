"""The predicted time of a training step: operations and bytes, divided by measured rates.

A slab has its share of both at divided levels. Ranks also wait for messages: planes, sums and
gradients. The rates were measured on one GPU and one CPU. On others the seconds are wrong, but by
nearly the same factor in every placement: the times serve to compare placements. Links differ by
more than that, so the link in use is measured (:mod:`unet3d.planning.link_speed`).
"""

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from unet3d.config import ParallelSettings, Shape
from unet3d.distributed.ranks import num_cores
from unet3d.errors import counted
from unet3d.kernels import CHANNELS_BY_HAND, convolves_by_hand
from unet3d.memory.fake_devices import fake_device
from unet3d.model import Topology, UNet3d
from unet3d.model.norms import InstanceNorm, OtherNorm
from unet3d.parallel.partition import block_flops, cheapest_cuts
from unet3d.parallel.spatial.division import Division, SlabRule
from unet3d.planning.memory_estimate import Step

logger = logging.getLogger(__name__)

LONG_SECONDS = 12 * 3600
"""A warning is shown if a training run on a CPU is predicted to take longer."""

NORM_PASSES = 8
"""Passes of a normalisation with its activation over its map: three forward, five backward."""
SLAB_FACTOR = 1.05
"""Factor of a block's time at a divided level, for the planes beside the slab. With it, predictions
are within 4 % of the 39.1, 123.4 and 294 ms measured at 256^3, 384^3 and 512^3 on two H200
(``benchmarks/results/spatial-2026-11-23.json``)."""
LEVEL_FACTOR = 4 / 3
"""Factor of the encoder's work with ``memory.recompute=level``: a second forward pass."""
OFFLOAD_FACTOR = 1.9
"""Factor of a step's time with ``memory.offload=skips``, estimated from bytes: at 256^3 the skips
are 1.33 GiB, which a link of 45 GB/s carries to the host and back in 64 ms, in addition to the 72.5
ms of a step."""
BATCH_DICE_FACTOR = 4 / 3
"""Factor of the work of micro-batches with ``training.batch_dice``: a second forward pass."""
BESIDE_SECONDS = 36e-6
"""Time on a GPU of the small kernels of a slab's normalisation that handle its neighbours' planes:
three times four kernels of 3 us each, in a captured step."""
SUM_BYTES = 4
"""Bytes of a number that is summed over ranks: float32."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a device in the steps of a network."""

    operations_per_second: float
    """Multiplications and additions of convolutions per second."""
    bytes_per_second: float
    """Bytes of maps read and written per second."""
    step_seconds: float
    """Constant seconds of any step."""
    sent_bytes_per_second: float = math.inf
    """Bytes per second of maps that go to another stage, for what their maker does in addition:
    normalising without the help of their reader, and adding up gradients."""


H200 = Rates(
    operations_per_second=657e12,
    bytes_per_second=6.56e12,
    step_seconds=1.5e-3,
    sent_bytes_per_second=270e9,
)
"""An H200 in bfloat16, with hand-written convolutions, which save about half of the traffic that
is counted here. Fitted to steps with 32 to 320 channels
(``benchmarks/results/hopper-h200-2026-11-27.json``): 13.7 ms at 128^3 with batch 2, 44.5 ms with
batch 7, 49.3 ms at 256^3 and 166 ms at 384^3; all within 2 %. The last rate makes the best of nine
cuts at 192^3, measured on two H100, the one that is predicted to be best
(``benchmarks/results/scaling-h100x4-2026-11-28.json``)."""
H200_BY_CUDNN = Rates(operations_per_second=600e12, bytes_per_second=3.18e12, step_seconds=2.3e-3)
"""An H200 in bfloat16 with cuDNN alone: the rates of a matrix product and of a copy, both divided
by 1.32. Fitted to 10.4 ms at 128^3, 68.9 ms at 256^3 and 230 ms at 384^3; all within 2.5 %."""
CPU_CORE = Rates(operations_per_second=500e9, bytes_per_second=3.3e9, step_seconds=25e-3)
"""A core of an AMD EPYC with AVX512-BF16, fitted to steps on two of them
(``benchmarks/results/step-cpu-2026-11-22.json``): 599 and 1903 ms at 64^3 and 96^3 with 32 to 320
channels, within 3 %; small networks take up to 50 % longer."""
CPU_FLOAT32_OPERATIONS = 300e9
"""Operations a second of the same core in float32: 3398 ms at 96^3."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Latency and bandwidth between the devices of one machine."""

    latency_seconds: float
    """Latency of any message."""
    planes_per_second: float
    """Bytes per second to a neighbour while as many come back, and bandwidth of gathering maps."""
    sums_per_second: float
    """Bytes per second through a device in an all-reduce, which sends 2 (n - 1) / n times the
    summed bytes."""

    def exchange(self, num_bytes: float) -> float:
        """Return the seconds of exchanging a plane between neighbours, by its bytes."""
        return self.latency_seconds + num_bytes / self.planes_per_second

    def sum(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds of an all-reduce."""
        through = 2 * (num_ranks - 1) / num_ranks * num_bytes
        return self.latency_seconds + through / self.sums_per_second


NVLINK = Links(latency_seconds=12e-6, planes_per_second=175e9, sums_per_second=291e9)
"""NCCL inside a CUDA graph, measured on two H200 of one host: an exchange of half a KiB each way
takes 11 us, of half a MiB 17, of 2 MiB 24 and of 8 MiB 57; a gather of 640 floats 8 to 13 us, a sum
12; a sum of 125 MB 0.44 ms (``benchmarks/results/spatial-2026-11-23.json``)."""
LAUNCHED_LATENCY_SECONDS = 65e-6
"""Latency of a message outside a CUDA graph: measured 36 to 124 us between two H200."""
GLOO = Links(latency_seconds=1e-3, planes_per_second=1e9, sums_per_second=1e9)
"""Gloo between processes of one machine, only the order of magnitude: between two processes that
shared two busy cores, a message took 1 to 4 ms."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """The work of a block in one step, forward and backward, on one device."""

    name: str
    inputs: tuple[str, ...]
    """Names of the blocks whose maps it reads, or ``image``."""
    level: int
    in_encoder: bool
    num_norms: int
    num_parameters: int
    num_operations: float
    """Floating-point operations; a multiplication with an addition counts as two."""
    moved_bytes: float
    """Bytes that it reads and writes."""
    made_bytes: float
    """Bytes of its map."""

    def seconds(self, rates: Rates) -> float:
        """Return the block's time at these rates."""
        moving = self.moved_bytes / rates.bytes_per_second
        return self.num_operations / rates.operations_per_second + moving


@lru_cache(maxsize=64)
def count_work(
    topology: Topology, size: Shape, batch_size: int, element_bytes: int
) -> tuple[BlockWork, ...]:
    """Count the work of each block of a network in a step with a whole volume.

    Forward, input gradient and weight gradient of a convolution take the same number of operations,
    and each reads or writes input and result once. Operations are counted on meta tensors.
    """
    with torch.device("meta"):
        model = UNet3d(topology)
    image = torch.empty((batch_size, topology.in_channels, *size), device="meta")
    num_elements = {"image": image.numel()}
    work = []
    for block, operations in zip(model.blocks(), block_flops(model, image), strict=True):
        read = sum(num_elements[name] for name in block.inputs)
        made = topology.channels[block.level] * batch_size * map_voxels(topology, size, block.level)
        num_elements[block.name] = made
        num_norms = sum(isinstance(m, InstanceNorm | OtherNorm) for m in block.module.modules())
        num_passes = 2 if block.inputs == ("image",) else 3  # the image needs no gradient
        num_moved = num_passes * (read + made) + NORM_PASSES * num_norms * made
        work.append(
            BlockWork(
                name=block.name,
                inputs=block.inputs,
                level=block.level,
                in_encoder=block.path == "encoder",
                num_norms=num_norms,
                num_parameters=sum(one.numel() for one in block.module.parameters()),
                num_operations=num_passes * operations,
                moved_bytes=element_bytes * num_moved,
                made_bytes=element_bytes * made,
            )
        )
    return tuple(work)


def map_voxels(topology: Topology, size: Shape, level: int) -> int:
    """Return the voxels of a map of a whole volume."""
    strides = topology.strides[: level + 1]
    return math.prod(
        voxels // math.prod(stride[axis] for stride in strides) for axis, voxels in enumerate(size)
    )


def element_bytes(precision: str) -> int:
    """Return the bytes of a number in a map, in a resolved precision."""
    dtype: torch.dtype = getattr(torch, precision)
    return dtype.itemsize


def rates_of(step: Step, device: torch.device, num_sharing: int = 1) -> Rates:
    """Return the rates of an H200, for any GPU, or of this machine's CPU.

    ``num_sharing`` processes compute on the CPU at the same time.
    """
    longer = element_bytes(step.precision) / 2
    if device.type != "cpu":
        by_hand = step.topology.channels[0] in CHANNELS_BY_HAND and convolves_by_hand(
            fake_device(device), getattr(torch, step.precision)
        )
        rates = H200 if by_hand else H200_BY_CUDNN
        return replace(rates, operations_per_second=rates.operations_per_second / longer)
    cores = num_cores() / num_sharing
    operations = CPU_CORE.operations_per_second
    if longer > 1:
        operations = CPU_FLOAT32_OPERATIONS * 2 / longer
    return replace(
        CPU_CORE,
        operations_per_second=cores * operations,
        bytes_per_second=cores * CPU_CORE.bytes_per_second,
    )


def links_between(on_cpu: bool, captured: bool, copied_per_second: float | None = None) -> Links:
    """Return latency and bandwidth between the devices of one machine.

    No message between GPUs is faster than simultaneous copies to and from a neighbour,
    ``copied_per_second``; if that is unknown, NVLink is assumed.
    """
    if on_cpu:
        return GLOO
    most = copied_per_second or math.inf
    return Links(
        latency_seconds=NVLINK.latency_seconds if captured else LAUNCHED_LATENCY_SECONDS,
        planes_per_second=min(NVLINK.planes_per_second, most),
        sums_per_second=min(NVLINK.sums_per_second, most),
    )


def step_seconds(step: Step, copied_per_second: float | None = None) -> float | None:
    """Predict the time of a step of one replica; None for a network in stages.

    ``copied_per_second`` is the speed of the link between its GPUs, as in :func:`links_between`.
    """
    layout, topology = step.layout, step.topology
    if len(layout.devices) > 1:
        return None
    (device,) = layout.devices
    on_cpu = device.type == "cpu"
    num_ranks = layout.num_replicas * layout.num_shards
    rates = rates_of(step, device, num_ranks if on_cpu else 1)
    links = links_between(on_cpu, layout.captures, copied_per_second)
    work = count_work(topology, step.size, step.batch_size, element_bytes(step.precision))
    division = None
    if layout.num_shards > 1:
        division = SlabRule(topology=topology, num_shards=layout.num_shards).divide(step.size)

    def seconds(block: BlockWork) -> float:
        factor = LEVEL_FACTOR if layout.recompute == "level" and block.in_encoder else 1.0
        if division is not None and block.level < division.num_divided:
            factor *= SLAB_FACTOR * division.most_planes() / division.planes()
        return factor * block.seconds(rates)

    total = sum(map(seconds, work))
    if layout.offload == "skips" and layout.recompute != "level" and not on_cpu:
        total *= OFFLOAD_FACTOR
    num_portions = min(layout.num_micro_batches, step.batch_size)
    total += num_portions * rates.step_seconds
    if division is not None:
        samples = math.ceil(step.batch_size / num_portions)
        total += num_portions * message_seconds(step, division, links, samples)
    if step.loss.joins_samples and num_portions > 1:
        total *= BATCH_DICE_FACTOR
    if num_ranks > 1:  # the gradients are averaged
        num_parameters = sum(block.num_parameters for block in work)
        total += links.sum(SUM_BYTES * num_parameters, num_ranks)
    return total


def message_seconds(step: Step, division: Division, links: Links, num_samples: int) -> float:
    """Return the seconds of the messages between the slabs of one volume, per micro-batch.

    The slabs first exchange planes of the image. Each normalisation on a divided level gathers its
    moments in forward and the sums of its gradient in backward; each time, the slabs exchange
    planes, except for the last normalisation, which the head reads. The map that enters the whole
    levels is gathered, and the gradient of the map that leaves them is averaged. The loss takes one
    sum.
    """
    topology, size, num_shards = step.topology, step.size, division.num_shards
    channels, number_bytes = topology.channels, element_bytes(step.precision)
    num_neighbours = min(2, num_shards - 1)
    levels = [
        block.level
        for block in count_work(topology, size, step.batch_size, number_bytes)
        for _ in range(block.num_norms)
        if block.level < division.num_divided
    ]

    def exchange(level: int, channels: int) -> float:
        elements = channels * map_voxels(topology, size, level) / division.planes(level)
        return links.exchange(num_neighbours * num_samples * number_bytes * elements)

    seconds = links.latency_seconds + exchange(0, topology.in_channels)
    seconds += len(levels) * (2 * links.latency_seconds + BESIDE_SECONDS)
    seconds += 2 * sum(exchange(level, channels[level]) for level in levels)
    seconds -= 2 * exchange(0, channels[0])
    if division.num_divided < topology.num_levels:
        above, below = division.num_divided - 1, division.num_divided
        gathered = number_bytes * channels[above] * map_voxels(topology, size, above)
        averaged = SUM_BYTES * channels[below] * map_voxels(topology, size, below)
        seconds += links.exchange((num_shards - 1) / num_shards * num_samples * gathered)
        seconds += links.sum(num_samples * averaged, num_shards)
    return seconds


def wanted_cuts(settings: ParallelSettings, step: Step) -> tuple[int, ...] | None:
    """Return where settings cut the network of a step; None: at the default place."""
    return time_cuts(step) if settings.cuts == "time" else settings.cut_blocks


def time_cuts(step: Step) -> tuple[int, ...]:
    """Return the cuts of a step's network that make its slowest stage as fast as possible.

    The other stages wait for it once the pipeline is full.
    """
    devices = step.layout.devices
    num_samples = math.ceil(step.batch_size / min(step.layout.num_micro_batches, step.batch_size))
    work = count_work(step.topology, step.size, num_samples, element_bytes(step.precision))
    rates = [rates_of(step, device) for device in devices]

    def cost(stage: int, start: int, end: int) -> float:
        own, of_device = work[start:end], rates[stage]
        read_later = {name for block in work[end:] for name in block.inputs}
        sent = sum(block.made_bytes for block in own if block.name in read_later)
        seconds = sum(block.seconds(of_device) for block in own)
        seconds += of_device.step_seconds * len(own) / len(work)
        return seconds + sent / of_device.sent_bytes_per_second

    cuts = cheapest_cuts(cost, len(work), len(devices))
    if cuts:
        runs = enumerate(pairwise((0, *cuts, len(work))))
        logger.info(
            "balanced by time: cut before %s (parallel.cuts=%s); predicted time of each stage: %s",
            " and ".join(work[cut].name for cut in cuts),
            ",".join(map(str, cuts)),
            ", ".join(f"{1000 * cost(stage, *run):.3g} ms" for stage, run in runs),
        )
    return cuts


def long_on_cpu(step: Step) -> str | None:
    """Return a warning if a training run is predicted to take very long on a CPU, or None."""
    seconds = step_seconds(step) if step.layout.devices[0].type == "cpu" else None
    epochs, steps = step.settings.epochs, step.settings.steps_per_epoch
    hours = (seconds or 0.0) * epochs * steps / 3600
    if seconds is None or 3600 * hours < LONG_SECONDS:
        return None
    words = f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.0f} hours"
    return (
        f"training is predicted to take about {words} on a CPU ({counted(epochs, 'epoch')} of "
        f"{counted(steps, 'step')} of {seconds:.2g} s); train on a GPU, or leave presets out: the "
        "defaults on a CPU are smaller"
    )
