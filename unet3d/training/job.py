"""Training: from settings to data, network, devices and the loop that runs on them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console

from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DoesNotFitError
from unet3d.memory.host import is_out_of_memory
from unet3d.model import UNet3d
from unet3d.model.unet import refuse_beyond_memory
from unet3d.parallel import (
    DataParallelExecutor,
    Executor,
    Layout,
    ParallelDims,
    parallelize,
    resolve_precision,
)
from unet3d.parallel.precision import cpu_has_bfloat16, precision_on, to_parameter_dtype
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.planning.cuts import choose_cuts
from unet3d.planning.experiment import plan_experiment
from unet3d.planning.memory_estimate import Step, predict_memory
from unet3d.planning.out_of_memory import (
    explain_out_of_memory,
    refuse_beyond_host,
    warn_if_too_large,
)
from unet3d.planning.tuning_cache import resolve_auto
from unet3d.reports.slots import slab_line, slot_line
from unet3d.runs.run_folder import RunFolder
from unet3d.training.cores import (
    augmentation_line,
    leave_cores,
    loading_processes,
    preparing_processes,
)
from unet3d.training.data_record import data_lines
from unet3d.training.initialising import begin_with
from unet3d.training.loop import TrainingLoop, TrainingResult
from unet3d.training.resuming import Past
from unet3d.training.state import TrainingState

logger = logging.getLogger(__name__)

MIN_VALIDATION_CASES = 10
"""With fewer, which network is best on them is chance."""


def for_ranks(config: Config, dims: ParallelDims) -> Config:
    """Return the settings with the mode that they mean.

    Args:
        config: As the user wrote it.
        dims: The devices.
    """
    if config.parallel.mode == dims.mode:
        return config
    return config.with_values({"parallel.mode": dims.mode})


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
        Interrupted: Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
    """
    group = group or Group(Ranks())
    dims = ParallelDims.resolve(config.parallel, ranks=group.ranks)
    if group.size != dims.world_size:
        raise ConfigError(
            f"parallel.mode {dims.mode} on {len(dims.all_devices)} devices is "
            f"{dims.world_size} processes, but this is {group.size}; start them with unet3d train, "
            "or with torchrun"
        )
    config = for_ranks(config, dims)
    batch_size = config.training.batch_size
    warning = None if batch_size == "auto" else dims.check_batch(batch_size)
    if warning is not None and group.is_first:
        logger.warning(warning)
    with folder.locked() if group.is_first else nullcontext():
        try:
            return _train(
                config=config,
                folder=folder,
                resume=resume,
                console=console,
                quiet=quiet,
                dims=dims,
                group=group,
            )
        finally:
            if group.is_first:
                folder.discard_if_empty()


def _train(
    *,
    config: Config,
    folder: RunFolder,
    resume: bool,
    console: Console,
    quiet: bool,
    dims: ParallelDims,
    group: Group,
) -> TrainingResult:
    """Train in a folder that is this process's own, or its first rank's."""
    num_ranks = group.ranks.local_world_size
    num_preparing = preparing_processes(config, dims.devices, num_ranks)
    num_workers = loading_processes(config, dims.devices, num_ranks)
    augmentation = augmentation_line(config, dims, num_workers)
    past: Past | None = None
    if group.is_first:
        past = _open_folder(config, folder, resume)
    finished = _if_finished(group, past, config, is_checked=False)
    if finished is not None:
        return TrainingResult(folder=folder, state=finished, memory=None)
    wanted = group.from_first(lambda: _wanted_precision(config, dims, past))
    precision = resolve_precision(wanted, dims.devices, group.exchange)
    if group.is_first:
        group.begin(str(folder.path))
    experiment = group.in_turn(
        lambda: plan_experiment(
            config, num_preparing, dims.num_stages, dims.num_shards, dims.num_replicas
        )
    )
    if past is not None:
        past.check_experiment(experiment)
    finished = _if_finished(group, past, config, is_checked=True)
    if finished is not None:
        return TrainingResult(folder=folder, state=finished, memory=None)
    for line in data_lines(experiment):
        logger.info("%s", line)
    num_cases = len(experiment.validation)
    if group.is_first and not quiet and 0 < num_cases < MIN_VALIDATION_CASES:
        logger.warning(
            "%d validation case(s) are too few to choose a network by: their Dice depends on which "
            "ones they are; use the final network, as predict does, rather than %s",
            num_cases,
            folder.best.name,
        )
    group.open(config.parallel.timeout_seconds)
    step = experiment.step(dims, precision)
    planned = experiment.network.size_in(step.batch_size)
    config = group.from_first(
        lambda: resolve_auto(experiment.config, replace(step, size=planned)),
        to_plain=lambda resolved: resolved.model_dump(mode="json"),
        from_plain=Config.from_plain,
    )
    experiment = replace(experiment, config=config)
    torch.default_generator.manual_seed(config.training.seed)  # nothing is drawn on GPUs
    refuse_beyond_memory(experiment.topology)
    model = UNet3d(experiment.topology)
    if config.training.init is not None and not resume:
        begin_with(config.training.init, model, experiment.preprocessing, group)
    to_parameter_dtype(model, precision)
    step = replace(step, layout=Layout.of(config, dims, precision), settings=config.training)
    if config.memory.offload != "none" and all(device.type == "cpu" for device in dims.devices):
        logger.warning(
            "memory.offload=%s does nothing here: a CPU's memory is the host's already",
            config.memory.offload,
        )
    with _explaining_memory(step, dims):
        cuts = group.from_first(lambda: _cuts(config, step))
    step = replace(step, layout=replace(step.layout, cuts=cuts and tuple(cuts)))
    prediction = None
    if dims.predicts_memory:
        prediction = predict_memory(step)
        refuse_beyond_host(prediction)
        warn_if_too_large(prediction)
    leave_cores(num_workers, dims.devices, num_ranks)
    executor = _executor(dims, model, step.layout, group)
    loop = TrainingLoop(
        experiment=experiment,
        executor=executor,
        folder=folder,
        precision=precision,
        num_workers=num_workers,
        prediction=prediction,
        dims=dims,
        group=group,
    )
    if resume:
        loop.load()
    for slot in executor.slots:
        precise = precision_on(slot.device, precision)
        logger.info("%s", slot_line(slot.index, str(slot.device), precise, slot.blocks))
    if isinstance(executor, SpatialExecutor):
        division = executor.rule.divide(step.size)
        planes = [len(division.slab(shard)) for shard in range(dims.num_shards)]
        logger.info("%s", slab_line(planes))
    logger.info("%s", augmentation)
    with _explaining_memory(step, dims):
        return loop.run(console, quiet)


@contextmanager
def _explaining_memory(step: Step, dims: ParallelDims) -> Iterator[None]:
    """Say of memory that runs out, of a GPU or of the host, which slots took it and what fits."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (
            explain_out_of_memory(error, step)
            if dims.predicts_memory
            else "a GPU of parallel.data_parallel=true ran out of memory with a batch of "
            f"{step.settings.num_patches}; leave that out, which takes less of the "
            "first GPU, or use a smaller --batch-size"
        )
        raise DoesNotFitError(reason) from error


def _open_folder(config: Config, folder: RunFolder, resume: bool) -> Past | None:
    """Make the folder of a new run; of one that is continued, return what it was, unchanged."""
    if not resume:
        folder.create()
        return None
    folder.check_resumable()
    past = Past.of(folder)
    past.check_settings(config)
    return past


def _wanted_precision(config: Config, dims: ParallelDims, past: Past | None) -> str:
    """Return the setting, or what a run on CPUs that it leaves open has computed in before."""
    wanted, recorded = config.training.precision, past.state.cpu_precision if past else ""
    is_on_cpus = all(device.type == "cpu" for device in dims.all_devices)
    keeps = recorded == "float32" or (recorded == "bfloat16" and cpu_has_bfloat16())
    return recorded if wanted == "auto" and is_on_cpus and keeps else wanted


def _if_finished(
    group: Group, past: Past | None, config: Config, is_checked: bool
) -> TrainingState | None:
    """Return where a run with nothing left to do stands, and say how to go on; else None.

    Args:
        group: The ranks; all of them call it, and only the first one knows the run.
        past: The run; None: it is a new one.
        config: The settings of now.
        is_checked: Whether its data and network are known to be those of now. If not, only a run
            whose settings say so counts.
    """

    def state() -> TrainingState | None:
        if past is None or not past.is_finished(config):
            return None
        if not is_checked and not past.has_source_of(config):
            return None
        logger.info(
            "%s is finished: %d of %d epochs are done; to train on, give --resume --epochs with "
            "more",
            past.folder.path,
            past.state.epoch,
            config.training.epochs,
        )
        return past.state

    def from_plain(values: Any) -> TrainingState | None:
        return None if values is None else TrainingState.from_plain(values)

    def to_plain(found: TrainingState | None) -> Any:
        return None if found is None else asdict(found)

    return group.from_first(state, to_plain=to_plain, from_plain=from_plain)


def _executor(dims: ParallelDims, model: UNet3d, layout: Layout, group: Group) -> Executor:
    if dims.uses_threads:
        return DataParallelExecutor(model, dims.devices, dims.gather_device, layout.autocast)
    return parallelize(model, layout, group)


def _cuts(config: Config, step: Step) -> tuple[int, ...] | None:
    """Return where the settings cut the network; None: at the default place."""
    balance = config.parallel.balance
    return config.parallel.cut_blocks if balance is None else choose_cuts(step, balance)
