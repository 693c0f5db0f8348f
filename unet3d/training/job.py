"""One training run, in this process or in ranks that it starts: data, network, devices, loop."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from rich.console import Console

from unet3d.config import Config
from unet3d.distributed.commands import Say
from unet3d.distributed.group import Group
from unet3d.distributed.launcher import launch, meeting_folder
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.rendezvous import joined
from unet3d.errors import DoesNotFitError, counted
from unet3d.images.files import times
from unet3d.interruption import Interrupted
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
from unet3d.planning.experiment import Experiment, plan_experiment
from unet3d.planning.memory_estimate import MemoryEstimate, Step, predict_memory
from unet3d.planning.out_of_memory import (
    explain_out_of_memory,
    refuse_beyond_host,
    warn_if_too_large,
)
from unet3d.planning.step_time import long_on_cpu, wanted_cuts
from unet3d.planning.tuning_cache import resolve_auto
from unet3d.training.cases import RunContext
from unet3d.training.cores import (
    leave_cores,
    loading_processes,
    preparing_processes,
)
from unet3d.training.initialising import begin_with
from unet3d.training.loop import TrainingLoop, TrainingResult
from unet3d.training.plan import Plan, Run, choose_run
from unet3d.training.recording import data_lines
from unet3d.training.request import Request
from unet3d.training.resuming import Past

logger = logging.getLogger(__name__)

SPREAD = {
    "none": "",
    "data": ": a copy of the network on each",
    "spatial": ": a slab of each volume on each",
    "model": ": a part of the network on each",
}
"""The part of a training run on each device, by parallel mode."""


def start_training(
    request: Request, ranks: Ranks, console: Console, quiet: bool
) -> TrainingResult | None:
    """Train as requested; None: other processes trained, and showed their results themselves."""
    with joined(ranks) as group:
        return train_run(choose_run(request, group), group, console, quiet)


def train_run(
    run: Run, group: Group, console: Console, quiet: bool, say: Say | None = None
) -> TrainingResult | None:
    """Train in this process; or in one process for each replica or slab, and return None.

    ``say`` gets the lines of these processes; None: they go to the terminal.
    """
    try:
        if group.size < run.plan.dims.num_processes:
            start_ranks(run, quiet, say)
            return None
        return train(run, console, quiet, group)
    finally:
        if group.is_first:
            run.folder.discard_if_empty()


def start_ranks(run: Run, quiet: bool, say: Say | None = None) -> None:
    """Train in a process for each replica or slab, each started with the settings of the plan."""
    config, dims = run.plan.config, run.plan.dims
    with meeting_folder() as folder:
        settings = folder / "settings.yaml"
        settings.write_text(config.to_yaml())
        arguments = ["train", "--config", str(settings), "--output", str(run.folder.path)]
        arguments += ["--resume"] if run.resume else []
        arguments += ["--quiet"] if quiet else []
        try:
            launch(
                arguments,
                folder,
                num_ranks=dims.num_processes,
                max_restarts=config.parallel.max_restarts,
                on_gpus=any(device.type == "cuda" for device in dims.all_devices),
                say=say,
            )
        except Interrupted as interruption:
            raise Interrupted(
                interruption.signal_number, can_resume=run.folder.latest.exists()
            ) from interruption


def train(run: Run, console: Console, quiet: bool, group: Group) -> TrainingResult:
    """Train as planned in this process, or continue a run; all ranks call it.

    Raises Interrupted for Ctrl-C, SIGTERM or SIGHUP, after a checkpoint was saved.
    """
    plan, folder = run.plan, run.folder
    config, dims = plan.config, plan.dims
    num_workers = loading_processes(config, dims.devices, group.ranks.local_world_size)
    with folder.locked() if group.is_first else nullcontext():
        past = _open_folder(run) if group.is_first else None
        precision = _resolve_precision(plan, past, group)
        if group.is_first:
            group.begin(str(folder.path))
        experiment = _prepare_data(plan, group)
        if _is_finished(past, experiment, group):
            return TrainingResult(folder=folder, memory=None)
        for line in data_lines(experiment):
            logger.info("%s", line)
        group.open(config.parallel.timeout_seconds)
        experiment, step, prediction = _place(experiment, dims, precision, group)
        leave_cores(num_workers, dims.devices, group.ranks.local_world_size)
        with _explaining_memory(step, dims):
            executor = _make_network(experiment, step, dims, group, is_new=not run.resume)
            num_shards, cpu = dims.num_shards, torch.device("cpu")
            context = RunContext(
                experiment=experiment,
                executor=executor,
                folder=folder,
                group=group,
                dims=dims,
                precision=precision,
                slabs=group.new_group(cpu, num_shards) if num_shards > 1 else None,
            )
            loop = TrainingLoop(context, num_workers, prediction)
            if run.resume:
                loop.load()
            _say_how_it_is_trained(context, step)
            return loop.run(console, quiet)


def _open_folder(run: Run) -> Past | None:
    """Make the folder of a new run, or return the past of a resumed run without changing it."""
    if not run.resume:
        run.folder.create()
        return None
    run.folder.check_resumable()
    past = Past.of(run.folder)
    past.check_settings(run.plan.config)
    return past


def _resolve_precision(plan: Plan, past: Past | None, group: Group) -> str:
    """Return the number type; a resumed run on CPUs keeps its own unless the settings name one."""

    def wanted() -> str:
        setting, recorded = plan.config.training.precision, past.state.cpu_precision if past else ""
        is_on_cpus = all(device.type == "cpu" for device in plan.dims.all_devices)
        keeps = recorded == "float32" or (recorded == "bfloat16" and cpu_has_bfloat16())
        return recorded if setting == "auto" and is_on_cpus and keeps else setting

    return resolve_precision(group.from_first(wanted), plan.dims.devices, group.exchange)


def _prepare_data(plan: Plan, group: Group) -> Experiment:
    """Check and prepare the data, once on each machine, and plan the network for them."""
    config, dims = plan.config, plan.dims
    warning = None
    if config.training.batch_size != "auto":
        warning = dims.check_batch(config.training.batch_size)
    if warning is not None and group.is_first:
        logger.warning(warning)
    num_processes = preparing_processes(config, dims.devices, group.ranks.local_world_size)
    return group.in_turn(
        lambda: plan_experiment(
            config,
            num_processes,
            dims.num_stages,
            dims.num_shards,
            dims.num_replicas,
            plan.architecture,
        )
    )


def _is_finished(past: Past | None, experiment: Experiment, group: Group) -> bool:
    """Return whether the run is finished, and log how to extend it; a collective call.

    Only the first rank reads the run, and refuses other data or another network.
    """

    def finished() -> bool:
        if past is None:
            return False
        past.check_experiment(experiment)
        epochs = experiment.config.training.epochs
        if not past.is_finished(epochs):
            return False
        logger.info(
            "%s is finished: %d of %d epochs are done; to train longer, give --resume --epochs "
            "with a larger number",
            past.folder.path,
            past.state.epoch,
            epochs,
        )
        return True

    return group.from_first(finished)


def _place(
    experiment: Experiment, dims: ParallelDims, precision: str, group: Group
) -> tuple[Experiment, Step, MemoryEstimate | None]:
    """Decide micro-batches and cuts, and predict the memory of a step; None: no prediction."""
    step = experiment.step(dims, precision)
    planned = experiment.network.size_in(step.batch_size)
    config = group.from_first(
        lambda: resolve_auto(experiment.config, replace(step, size=planned)),
        to_plain=lambda resolved: resolved.model_dump(mode="json"),
        from_plain=Config.from_plain,
    )
    step = replace(step, layout=Layout.of(config, dims, precision), settings=config.training)
    cuts = group.from_first(lambda: wanted_cuts(config.parallel, step))
    step = replace(step, layout=replace(step.layout, cuts=cuts and tuple(cuts)))
    prediction = None
    # The prediction would not notice a lack of host memory: it never touches the weights.
    refuse_beyond_memory(experiment.topology)
    if dims.predicts_memory:
        prediction = predict_memory(step)
        refuse_beyond_host(prediction)
        warn_if_too_large(prediction)
    if group.is_first and (long := long_on_cpu(step)) is not None:
        logger.warning("%s", long)
    return replace(experiment, config=config), step, prediction


def _make_network(
    experiment: Experiment, step: Step, dims: ParallelDims, group: Group, is_new: bool
) -> Executor:
    """Return a new network on its devices, with random weights or weights of ``training.init``."""
    settings = experiment.config.training
    torch.default_generator.manual_seed(settings.seed)  # all random numbers come from the CPU
    model = UNet3d(experiment.topology)
    if settings.init is not None and is_new:
        validation = experiment.split.validation
        begin_with(settings.init, model, experiment.preprocessing, group, validation)
    to_parameter_dtype(model, step.precision)
    if dims.uses_threads:
        layout = step.layout
        return DataParallelExecutor(model, dims.devices, dims.gather_device, layout.autocast)
    return parallelize(model, step.layout, group)


def _say_how_it_is_trained(context: RunContext, step: Step) -> None:
    executor, dims, training = context.executor, context.dims, context.experiment.config.training
    channels = context.experiment.topology.channels
    num_weights = sum(weight.numel() for weight in executor.module.parameters())
    logger.info(
        "network: %d to %d channels on %d levels, %.3g million weights",
        *(channels[0], channels[-1], len(channels), num_weights / 1e6),
    )
    patches = counted(step.settings.num_patches, "patch")
    logger.info("each step: %s of %s voxels", patches, times(step.size))
    devices_in: dict[str, list[str]] = {}
    for device in dims.all_devices:
        devices_in.setdefault(precision_on(device, context.precision), []).append(str(device))
    where = " and ".join(f"{', '.join(names)} in {name}" for name, names in devices_in.items())
    logger.info("runs on: %s%s", where, SPREAD[dims.mode])
    logger.info(
        "length: %s of %s; the first epoch tells how long they take",
        *(counted(training.epochs, "epoch"), counted(training.steps_per_epoch, "step")),
    )


@contextmanager
def _explaining_memory(step: Step, dims: ParallelDims) -> Iterator[None]:
    """Explain an out-of-memory error of a GPU or of the host: which slots, and what would fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (
            explain_out_of_memory(error, step)
            if dims.predicts_memory
            else "a GPU of parallel.data_parallel=true ran out of memory with a batch of "
            f"{step.settings.num_patches}; leave out parallel.data_parallel, because one process a "
            "GPU needs less memory on the first, or use a smaller --batch-size"
        )
        raise DoesNotFitError(reason) from error
