"""Messages for training that does not fit: on which device, by how much, and what would fit."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from unet3d.errors import DoesNotFitError, counted
from unet3d.images.files import times
from unet3d.memory import host
from unet3d.memory.record import device_bytes
from unet3d.planning.memory_estimate import GIB, MemoryEstimate, Step, predict_memory
from unet3d.planning.step_size import largest_fitting, largest_size

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
HEADROOM = 0.9
"""An option is advised only if it is predicted to need at most this share of the memory that was
predicted for the failed step: predictions may be too low."""


def warn_if_too_large(prediction: MemoryEstimate) -> None:
    """Log a warning for each GPU with less memory than training is predicted to need."""
    for device, needed in prediction.needed_bytes().items():
        if device.type == "cuda" and needed > available_bytes(device):
            logger.warning(
                "%s: predicted need %.1f GiB, available %.1f GiB; training may run out of memory, "
                "unet3d plan shows what fits",
                device,
                needed / GIB,
                available_bytes(device) / GIB,
            )


def refuse_beyond_host(prediction: MemoryEstimate) -> None:
    """Refuse a training run whose slots on the CPU need more than the host has available.

    The prediction for a CPU is a lower bound, so such a run cannot fit, and Linux would kill it
    without a message.
    """
    lacking = host.shortage(prediction.needed_bytes().get(CPU, 0))
    if lacking is not None:
        raise DoesNotFitError(f"training on the CPU {lacking}; {_what_would_fit(prediction)}")


def explain_out_of_memory(error: BaseException, step: Step) -> str:
    """Return one line: the device with its slots, requested and free memory, and what would fit."""
    prediction, layout = predict_memory(step), step.layout
    patterns = (r"allocate ([\d.]+ \w+)", r"GPU (\d+)", r"of which ([\d.]+ \w+) is free")
    found = (re.search(pattern, str(error)) for pattern in patterns)  # PyTorch's words
    asked, index, free = (match[1] if match else "" for match in found)
    if not host.is_out_of_gpu_memory(error):
        device = CPU
    else:
        device = torch.device("cuda", int(index)) if index else prediction.slots[-1].device
    names = ", ".join(
        f"slot {slot.index} ({slot.blocks[0]} to {slot.blocks[-1]})"
        for slot in prediction.slots
        if slot.device == device
    )
    part = f"slab {layout.shard} of {layout.num_shards} of " if layout.num_shards > 1 else ""
    amounts = f": {asked} asked, {free} free" if asked and free else ""
    return (
        f"{device} ran out of memory{amounts}; it holds {names or 'no slot'}, with "
        f"{part}patches of {times(step.size)} voxels and a batch of {step.batch_size} in "
        f"{counted(layout.num_micro_batches, 'micro-batch')}; {_what_would_fit(prediction)}"
    )


def available_bytes(device: torch.device) -> int:
    """Return the memory that this process can use on a device, including what it holds."""
    if device.type != "cuda":
        return host.available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def _what_would_fit(prediction: MemoryEstimate) -> str:
    options = "; ".join(_alternatives(prediction)) or (
        "no alternative that was tried; use a smaller network (model.base_channels) or more "
        "devices with --parallel spatial"
    )
    return f"what would fit: {options}"


def _alternatives(prediction: MemoryEstimate) -> Iterator[str]:
    """Yield options with which training fits, with their predicted memory."""
    step, layout = prediction.step, prediction.step.layout
    # The step did not fit, even if its prediction did.
    limits = {
        device: min(available_bytes(device), int(HEADROOM * needed))
        for device, needed in prediction.needed_bytes().items()
    }
    if layout.num_micro_batches < step.batch_size and _divides_batches(step):
        whole = replace(step, layout=replace(layout, num_micro_batches=step.batch_size))
        yield from _advice(f"--micro-batches {step.batch_size}", whole, limits)
    if layout.recompute != "level":
        again = replace(step, layout=replace(layout, recompute="level", offload="none"))
        without = "" if layout.offload == "none" else "--set memory.offload=none "
        yield from _advice(f"{without}--set memory.recompute=level", again, limits)
        if layout.offload == "none" and any(device.type == "cuda" for device in limits):
            offloaded = replace(step, layout=replace(layout, offload="skips"))
            yield from _advice("--set memory.offload=skips", offloaded, limits)
    yield from _over_more_gpus(step, limits)
    size = largest_size(step, limits, prediction)
    if size is not None:
        smaller = replace(step, size=size).fullest()
        yield from _advice(f"--set patches.size={','.join(map(str, size))}", smaller, limits)


def _over_more_gpus(step: Step, limits: Mapping[torch.device, int]) -> Iterator[str]:
    """Yield an option over more GPUs: slabs of a volume if possible, else stages."""
    num_gpus, most_shards = torch.cuda.device_count(), step.most_shards()
    gpus = tuple(torch.device("cuda", index) for index in range(num_gpus))
    # Other replicas now use the other GPUs, but would not with this option.
    room = available_bytes if step.layout.num_replicas == 1 else device_bytes
    free = {gpu: room(gpu) for gpu in gpus} | dict(limits)
    layout = replace(step.layout, num_replicas=1, cuts=None)
    step = replace(step, batch_size=step.layout.num_replicas * step.batch_size)
    if gpus and _divides_batches(step) and most_shards > 1:
        counts = range(most_shards, layout.num_shards, -1)
        least = min(free[gpu] for gpu in gpus)

        def spread(index: int) -> MemoryEstimate:
            shards = replace(layout, devices=gpus[:1], num_shards=counts[index], shard=0)
            return predict_memory(replace(step, layout=shards).fullest())

        fewest = largest_fitting(
            [1 / count for count in counts], lambda index: spread(index).load({gpus[0]: least})
        )
        if fewest is not None:
            count, peak = counts[fewest], spread(fewest).memory[0].peak_bytes / GIB
            names, is_here = ",".join(map(str, range(count))), count <= num_gpus
            where = f"--devices {names}" if is_here else f"over {count} GPUs like {gpus[0]}"
            yield f"--parallel spatial {where} (predicted peak {peak:.1f} GiB on each)"
    elif len(layout.devices) < num_gpus:
        flags = f"--parallel model --devices {','.join(map(str, range(num_gpus)))}"
        if step.batch_size > 1 and _divides_batches(step):
            flags += f" --micro-batches {step.batch_size}"
            layout = replace(layout, num_micro_batches=step.batch_size)
        yield from _advice(flags, replace(step, layout=replace(layout, devices=gpus)), free)


def _divides_batches(step: Step) -> bool:
    """Return whether samples are independent; batch normalisation needs the whole batch."""
    return step.topology.norm != "batch"


def _advice(flags: str, step: Step, limits: Mapping[torch.device, int]) -> Iterator[str]:
    prediction = predict_memory(step)
    if prediction.load(limits) <= 1:
        peaks = {slot.device: prediction.memory[slot.index].peak_bytes for slot in prediction.slots}
        amounts = (f"{peak / GIB:.1f} GiB on {device}" for device, peak in peaks.items())
        yield f"{flags} (predicted peak {', '.join(amounts)})"
