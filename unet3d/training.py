"""Training: from settings to data, network, devices and the loop that runs on them."""

import logging
import os
from dataclasses import replace

import torch
from rich.console import Console

from unet3d.advice import explain_out_of_memory, warn_if_too_large
from unet3d.choices import Circumstances, settle
from unet3d.config import Config
from unet3d.errors import DoesNotFitError, Unet3dError
from unet3d.experiment import Experiment, plan_experiment
from unet3d.loop import TrainingLoop, TrainingResult
from unet3d.model import UNet3d
from unet3d.optimization import autocast_dtype, num_states
from unet3d.parallel import (
    Layout,
    check_precision,
    choose_cuts,
    default_precision,
    parallelize,
    resolve_devices,
)
from unet3d.planner import Step, predict_memory
from unet3d.run_folder import RunFolder
from unet3d.volumes.cache import Cache

logger = logging.getLogger(__name__)


def train(
    config: Config, folder: RunFolder, resume: bool, console: Console, quiet: bool
) -> TrainingResult:
    """Train a network, or continue to.

    Args:
        config: The settings; when resuming, those of the run with what the user changed.
        folder: Where the run's files go.
        resume: Continue from the folder's latest checkpoint.
        console: For the live line.
        quiet: No progress at all.

    Raises:
        Unet3dError: For every reason that we can explain.
        Interrupted: Ctrl-C or SIGTERM, after a checkpoint was saved.
    """
    devices = resolve_devices(config.parallel)
    wanted = config.training.precision
    precision = default_precision(devices) if wanted == "auto" else wanted
    check_precision(precision, devices)
    with folder.locked():
        return _train(config, folder, resume, console, quiet, devices, precision)


def _train(
    config: Config,
    folder: RunFolder,
    resume: bool,
    console: Console,
    quiet: bool,
    devices: tuple[torch.device, ...],
    precision: str,
) -> TrainingResult:
    """Train in a folder that is this process's own."""
    num_workers = _num_workers(config, on_gpu=any(d.type == "cuda" for d in devices))
    try:
        if resume:
            folder.reopen()
        else:
            folder.create()
        experiment = plan_experiment(config, num_workers)
    except Unet3dError:
        folder.discard_if_empty()
        raise
    topology, size = experiment.topology, experiment.planned_size
    config = settle(Circumstances(experiment.config, topology, size, devices, precision))
    experiment = replace(experiment, config=config)
    torch.manual_seed(config.training.seed)
    model = UNet3d(experiment.topology)
    if precision == "float64":
        model.double()
    layout = Layout(
        devices,
        config.parallel.cuts,
        config.training.num_micro_batches,
        autocast_dtype(precision),
        config.parallel.schedule,
        config.memory.recompute,
        config.memory.offload,
    )
    if config.memory.offload != "none" and all(device.type == "cpu" for device in devices):
        logger.warning(
            "memory.offload=%s does nothing here: a CPU's memory is the host's already",
            config.memory.offload,
        )
    step = _largest_step(experiment, layout, precision)
    try:
        step = replace(step, layout=_balanced(layout, model, experiment))
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(explain_out_of_memory(error, step)) from error
    prediction = predict_memory(step)
    warn_if_too_large(prediction)
    executor = parallelize(model, step.layout)
    loop = TrainingLoop(experiment, executor, folder, precision, num_workers, prediction)
    if resume:
        loop.load()
        folder.summary.unlink(missing_ok=True)  # not finished any more
    folder.write_config(experiment.config)
    for slot in executor.slots:
        logger.info("slot %d on %s: %s", slot.index, slot.device, ", ".join(slot.blocks))
    try:
        return loop.run(console, quiet)
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(explain_out_of_memory(error, step)) from error


def _largest_step(experiment: Experiment, layout: Layout, precision: str) -> Step:
    config = experiment.config
    per_case = 1 if experiment.patch_size is None else config.patches.per_case
    batch_size = min(config.training.batch_size, per_case * len(experiment.training))
    size = experiment.largest_patch()
    return Step(experiment.topology, layout, size, batch_size, config.training, precision)


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
        layout,
        parallel.wanted_balance,
        experiment.largest_patch(),
        settings.batch_size,
        num_states(settings),
        Cache(experiment.config.data.cache).folder / "timings",
    )
    return replace(layout, cuts=cuts)


def _num_workers(config: Config, on_gpu: bool) -> int:
    """Return how many processes cut patches: on a CPU the network wants the cores itself."""
    if config.data.num_workers != "auto":
        return config.data.num_workers
    cores = len(os.sched_getaffinity(0))
    return min(16, cores - 1) if on_gpu else min(4, (cores - 1) // 2)
