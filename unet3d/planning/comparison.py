"""All placements of a training run compared, as ``unet3d plan`` shows them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unet3d.config import Config, ParallelSettings
from unet3d.memory.allocations import UNCOUNTED_BYTES
from unet3d.memory.host import readable
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import ParallelDims
from unet3d.planning.link_speed import link_line, measure_link
from unet3d.planning.memory_estimate import predict_shards
from unet3d.planning.network_plan import NetworkPlan, check_stages
from unet3d.planning.placements import (
    Devices,
    PlacementOption,
    all_devices,
    best_of,
    choice_line,
    devices_of_ranks,
    dims_of,
    has_gpu,
    if_possible,
    memory_of,
    numbered,
    possible_dims,
    settings_for,
    timed_options,
)
from unet3d.planning.step_time import wanted_cuts
from unet3d.planning.tuning_cache import resolve_auto


def compare(
    config: Config,
    network: NetworkPlan,
    memory_bytes: int | None,
    watch: Callable[[int, int], object] = lambda number, total: None,
) -> tuple[list[PlacementOption], dict[str, Any]]:
    """Predict each placement, with one micro-batch and with the configured number.

    Returns the options and their record, with slots as in a run's ``memory.json`` and, under
    ``choice``, the line on what mode ``auto`` chooses. The record lacks the largest patches, which
    take longer to find. ``memory_bytes`` is the memory of each GPU, or of the CPU if there is no
    GPU; None: this machine's. Before each prediction, ``watch`` gets the number of finished
    predictions and their total.
    """
    config = network.settled(config)
    asked = dims_of(config.parallel, memory_bytes)
    check_stages(config, network, asked.num_stages)
    # Predictions would not notice a lack of host memory: they never touch the weights.
    refuse_beyond_memory(network.topology)
    candidates = [asked]  # the candidates of mode auto, or the single placement
    if config.parallel.mode == "auto":
        candidates = possible_dims(config, network, asked.all_devices) or candidates
    every = _beside(candidates, config, network, asked.all_devices)
    several = all_devices(every)
    link = measure_link(several, are_here=memory_bytes is None)
    notes = list(_notes(config.parallel, memory_bytes))
    notes += [] if link is None else [f"{link_line(link)}."]
    if any(device.type == "cuda" for device in several):
        beside = readable(UNCOUNTED_BYTES)
        notes.append(f"A GPU needs {beside} beside its peak; the column fits includes it.")
    memory = memory_of(several, memory_bytes)
    timed = {option.dims: option for option in timed_options(config, network, every, memory, link)}
    options = [timed[dims] for dims in candidates]
    chosen, choice = options[0], None
    if candidates != [asked]:
        watch(0, len(every))
        chosen = best_of(options)
        choice = choice_line(options, chosen)
    if memory_bytes is None:
        placement = settings_for(config.parallel, chosen.dims)
        config = resolve_auto(config.model_copy(update={"parallel": placement}), chosen.step)
    counts = sorted({1, config.training.num_micro_batches})
    ways: list[PlacementOption] = []
    rows: list[dict[str, Any]] = []
    for way in timed.values():
        for count in counts:
            watch(len(ways), len(every) * len(counts))
            is_same = count == way.step.layout.num_micro_batches
            one, is_chosen = way if is_same else way.divided(count), way is chosen
            if is_chosen and (cuts := wanted_cuts(config.parallel, one.step)):
                one = way.divided(count, cuts)
            ways.append(one)
            is_asked = is_chosen and count == config.training.num_micro_batches
            balance = "time" if is_chosen and config.parallel.cuts == "time" else None
            rows.append({**_row(one, memory), "balance": balance, "asked": is_asked})
    step = ways[0].step  # the option of one device, which has the whole batch
    return ways, {
        "shape": list(step.size),
        "batch_size": step.batch_size,
        "precision": step.precision,
        "channels": list(step.topology.channels),
        "notes": notes,
        "choice": choice,
        "ways": rows,
    }


def _row(way: PlacementOption, memory: Mapping[Any, int]) -> dict[str, Any]:
    dims, shards = way.dims, predict_shards(way.step)
    slots: list[dict[str, Any]] = []
    for rank, devices in enumerate(devices_of_ranks(dims)):
        prediction = shards[dims.shard_of(rank)]
        for slot, device in zip(prediction.slots, devices, strict=True):
            row = {
                "slot": len(slots),
                "device": str(device),
                "blocks": list(slot.blocks),
                "device_bytes": memory[device],
                "predicted": prediction.memory[slot.index].to_dict(),
            }
            slots.append({**row, "rank": rank} if dims.num_processes > 1 else row)
    return {
        "parallel": dims.mode,
        "replicas": dims.num_replicas,
        "shards": dims.num_shards,
        "num_micro_batches": way.step.layout.num_micro_batches,
        "fits": way.load <= 1,
        "step_seconds": way.seconds,
        "step_is_measured": way.is_measured,
        "slots": slots,
    }


def _beside(
    candidates: Sequence[ParallelDims], config: Config, network: NetworkPlan, devices: Devices
) -> list[ParallelDims]:
    """Return the candidates and placements to compare them with, one device first.

    Beside the candidates there are all placements on the same devices, and one with two stages. If
    there is only one device, a second one of its kind is assumed.
    """
    if len(devices) == 1:
        devices = (devices[0], numbered(devices[0], (devices[0].index or 0) + 1))
    alone = config.parallel.model_copy(update={"replicas": 1})
    free = config.model_copy(update={"parallel": alone})
    found = [*possible_dims(free, network, devices), *candidates]
    if all(dims.mode != "model" for dims in found):
        found += if_possible(free, network, "model", devices[:2], 1)
    return list(dict.fromkeys(found))


def _notes(settings: ParallelSettings, memory_bytes: int | None) -> Iterator[str]:
    if settings.devices is None and not has_gpu(memory_bytes):
        yield (
            "This machine has no GPU, so the plan is for its CPU; --device-memory GIB plans for "
            "GPUs."
        )
    if settings.data_parallel is not False:
        yield (
            "parallel.data_parallel=true is not predicted: each step copies the network to every "
            "GPU but the first, which gathers the results. The numbers are for one process on each "
            "GPU."
        )
