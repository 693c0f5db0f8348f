"""Training: from settings to data, network, devices and the loop that runs on them."""

import logging
import math
import os
from contextlib import nullcontext
from dataclasses import replace

import torch
from rich.console import Console

from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DoesNotFitError, Unet3dError
from unet3d.model import UNet3d
from unet3d.model.optimizer import (
    num_states,
)
from unet3d.parallel import (
    DataParallelExecutor,
    Executor,
    Layout,
    check_data_parallel,
    check_precision,
    choose_cuts,
    default_precision,
    devices_of_rank,
    devices_of_replicas,
    output_device,
    parallelize,
)
from unet3d.parallel.precision import (
    autocast_dtype,
)
from unet3d.planning.experiment import Experiment, plan_experiment
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.planning.out_of_memory import explain_out_of_memory, warn_if_too_large
from unet3d.planning.tuning_cache import TuningKey, resolve_auto
from unet3d.runs.run_folder import RunFolder
from unet3d.training.loop import TrainingLoop, TrainingResult
from unet3d.volumes.cache import Cache

logger = logging.getLogger(__name__)


def num_processes(config: Config) -> int:
    """Return how many processes a training wants on this machine, one for each replica.

    Raises:
        DeviceError: A device is unknown or absent, or their number does not suit the mode.
    """
    return len(devices_of_replicas(config.parallel))


def for_ranks(config: Config, num_ranks: int) -> Config:
    """Return the settings that several ranks train with.

    Args:
        config: As the user wrote it. With mode none each rank takes one device, as with data; a
            batch size that was not set is large enough to give each replica its micro-batches.
        num_ranks: How many there are.
    """
    values: dict[str, object] = {}
    if num_ranks > 1 and config.parallel.mode == "none":
        values["parallel.mode"] = "data"
    threads = config.parallel.engine == "dataparallel"
    num_replicas = len(devices_of_replicas(config.parallel)[0]) if threads else num_ranks
    training = config.training
    wanted = num_replicas * training.num_micro_batches
    if "batch_size" not in training.model_fields_set and wanted > training.batch_size:
        values["training.batch_size"] = wanted
        logger.info("training.batch_size is %d, for %d replicas", wanted, num_replicas)
    return config.with_values(values) if values else config


def train(
    config: Config,
    folder: RunFolder,
    resume: bool,
    console: Console,
    quiet: bool,
    group: Group | None = None,
) -> TrainingResult:
    """Train a network, or continue to.

    Args:
        config: The settings; when resuming, those of the run with what the user changed.
        folder: Where the run's files go.
        resume: Continue from the folder's latest checkpoint.
        console: For the live line.
        quiet: No progress at all.
        group: The ranks that do it together; None: this process alone.

    Raises:
        Unet3dError: For every reason that we can explain.
        Interrupted: Ctrl-C or SIGTERM, after a checkpoint was saved.
    """
    group = group or Group(Ranks())
    devices = _devices(config, group)
    precision = _precision(config, devices, group)
    with folder.locked() if group.is_first else nullcontext():
        return _train(
            config,
            folder=folder,
            resume=resume,
            console=console,
            quiet=quiet,
            devices=devices,
            precision=precision,
            group=group,
        )


def _train(
    config: Config,
    *,
    folder: RunFolder,
    resume: bool,
    console: Console,
    quiet: bool,
    devices: tuple[torch.device, ...],
    precision: str,
    group: Group,
) -> TrainingResult:
    """Train in a folder that is this process's own, or its first rank's."""
    num_workers = _num_workers(config, devices, group.ranks.local_world_size)
    try:
        if group.is_first:
            if resume:
                folder.reopen()
            else:
                folder.create()
            group.begin(str(folder.path))
        experiment = group.in_turn(lambda: plan_experiment(config, num_workers))
    except Unet3dError:
        if group.is_first:
            folder.discard_if_empty()
        raise
    group.open(config.parallel.timeout_seconds)
    tuning_key = TuningKey(
        config=experiment.config,
        topology=experiment.topology,
        size=experiment.planned_size,
        devices=devices,
        precision=precision,
        num_replicas=group.size,
    )
    settled = group.from_first(lambda: resolve_auto(tuning_key).to_yaml())
    config = Config.from_yaml(settled)
    experiment = replace(experiment, config=config)
    torch.manual_seed(config.training.seed)
    model = UNet3d(experiment.topology)
    if precision == "float64":
        model.double()
    layout = Layout(
        devices=devices,
        cuts=config.parallel.cuts,
        num_micro_batches=config.training.num_micro_batches,
        autocast=autocast_dtype(precision),
        schedule=config.parallel.schedule,
        recompute=config.memory.recompute,
        offload=config.memory.offload,
        num_replicas=group.size,
    )
    if config.memory.offload != "none" and all(device.type == "cpu" for device in devices):
        logger.warning(
            "memory.offload=%s does nothing here: a CPU's memory is the host's already",
            config.memory.offload,
        )
    step = _largest_step(experiment, layout, precision)
    try:
        cuts = group.from_first(lambda: _balanced(layout, model, experiment).cuts)
        step = replace(step, layout=replace(layout, cuts=cuts and tuple(cuts)))
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(explain_out_of_memory(error, step)) from error
    prediction = None
    if config.parallel.engine == "ddp":  # nn.DataParallel copies and gathers, which no step shows
        prediction = predict_memory(step)
        warn_if_too_large(prediction)
    executor = _executor(config, model, step.layout, group)
    loop = TrainingLoop(
        experiment=experiment,
        executor=executor,
        folder=folder,
        precision=precision,
        num_workers=num_workers,
        prediction=prediction,
        group=group,
    )
    if resume:
        loop.load()
    if group.is_first:
        folder.summary.unlink(missing_ok=True)  # not finished any more
        folder.write_config(experiment.config)
    for slot in executor.slots:
        logger.info("slot %d on %s: %s", slot.index, slot.device, ", ".join(slot.blocks))
    try:
        return loop.run(console, quiet)
    except torch.OutOfMemoryError as error:
        reason = (
            "a GPU of parallel.engine=dataparallel ran out of memory with a batch of "
            f"{config.training.batch_size}; use parallel.engine=ddp, which takes less of the "
            "first GPU, or a smaller --batch-size"
            if prediction is None
            else explain_out_of_memory(error, step)
        )
        raise DoesNotFitError(reason) from error


def _devices(config: Config, group: Group) -> tuple[torch.device, ...]:
    """Return what this process drives, after a look at whether every replica gets work."""
    if group.size > 1:
        devices = devices_of_rank(config.parallel, group.ranks)
    else:
        (devices,) = devices_of_replicas(config.parallel)
    batch_size = config.training.batch_size
    if config.parallel.engine == "dataparallel":
        check_data_parallel(devices, output_device(config.parallel), batch_size)
    elif batch_size < group.size and group.is_first:
        logger.warning(
            "a batch of %d leaves %d of %d replicas without work; use --batch-size %d or more",
            *(batch_size, group.size - batch_size, group.size, group.size),
        )
    return devices


def _precision(config: Config, devices: tuple[torch.device, ...], group: Group) -> str:
    """Return the precision, the same on all ranks whatever GPUs they have."""
    wanted = config.training.precision
    if wanted == "auto":
        choices = set(group.exchange(default_precision(devices)))
        wanted = choices.pop() if len(choices) == 1 else "float16"
    check_precision(wanted, devices)
    return wanted


def _executor(config: Config, model: UNet3d, layout: Layout, group: Group) -> Executor:
    if config.parallel.engine == "dataparallel":
        output = output_device(config.parallel)
        return DataParallelExecutor(model, layout.devices, output, layout.autocast)
    return parallelize(model, layout, group)


def _largest_step(experiment: Experiment, layout: Layout, precision: str) -> Step:
    config = experiment.config
    per_case = 1 if experiment.patch_size is None else config.patches.per_case
    whole = min(config.training.batch_size, per_case * len(experiment.training))
    batch_size = math.ceil(whole / layout.num_replicas)  # of the replica that has most
    size = experiment.largest_patch()
    return Step(
        topology=experiment.topology,
        layout=layout,
        size=size,
        batch_size=batch_size,
        settings=config.training,
        precision=precision,
    )


def _balanced(layout: Layout, model: UNet3d, experiment: Experiment) -> Layout:
    """Return the layout with the cuts that the settings ask for."""
    parallel, settings = experiment.config.parallel, experiment.config.training
    if parallel.wanted_balance == "encoder-decoder":
        return layout
    if parallel.cuts is not None:
        logger.warning(
            "parallel.cuts says where the network is cut; parallel.balance=%s is not used",
            parallel.balance,
        )
        return layout
    cuts = choose_cuts(
        model,
        layout=layout,
        balance=parallel.wanted_balance,
        size=experiment.largest_patch(),
        batch_size=math.ceil(settings.batch_size / layout.num_replicas),
        num_states=num_states(settings),
        folder=Cache(experiment.config.data.cache).folder / "timings",
    )
    return replace(layout, cuts=cuts)


def _num_workers(config: Config, devices: tuple[torch.device, ...], num_ranks: int) -> int:
    """Return how many processes cut patches: on a CPU the network wants the cores itself."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    cores = len(os.sched_getaffinity(0)) // num_ranks
    on_gpu = any(device.type == "cuda" for device in devices)
    return max(0, min(16, cores - 1) if on_gpu else min(4, (cores - 1) // 2))
