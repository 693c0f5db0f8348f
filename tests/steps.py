"""Training steps whose memory is predicted, and measured."""

from dataclasses import replace
from functools import cache

import torch

from tests.shards import run_shards
from unet3d.config import ModelSettings, TrainingSettings
from unet3d.kernels import recompute
from unet3d.kernels.conv.hopper import api as hopper
from unet3d.memory.meter import MemoryMeter
from unet3d.model import UNet3d, plan_topology
from unet3d.model.optimizer import Optimization
from unet3d.parallel import Layout, parallelize, precision
from unet3d.parallel.precision import autocast_dtype, image_dtype
from unet3d.parallel.spatial import division
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.planning.memory_estimate import Step, predict_memory

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(4))
SMALL = ModelSettings(base_channels=4, num_levels=3, deep_supervision=False)
WIDE = ModelSettings(channels=(32, 64, 128), deep_supervision=False)
LARGE = ModelSettings(channels=(32, 64, 128, 256, 320, 320), deep_supervision=False)


def make_step(
    devices,
    size=(16, 16, 16),
    batch_size=2,
    num_micro_batches=1,
    precision="float32",
    model=SMALL,
    optimizer="sgd",
    spacing_mm=(1.0, 1.0, 1.0),
    batch_dice=False,
    regions=(),
    **layout,
):
    """Return a step of a network with two channels and three classes."""
    topology = plan_topology(model, size, spacing_mm, 2, 3)
    autocast = autocast_dtype(precision)
    return Step(
        topology=topology,
        layout=Layout(
            devices=devices, num_micro_batches=num_micro_batches, autocast=autocast, **layout
        ),
        size=size,
        batch_size=batch_size,
        settings=TrainingSettings(optimizer=optimizer, batch_dice=batch_dice),
        precision=precision,
        regions=regions,
    )


def predicted(step):
    """Return the prediction for a step; each step is predicted once in a process."""
    # Values that tests patch, and on which a prediction depends.
    sizes = (recompute.MIN_ELEMENTS, division.MIN_DIVIDED_ELEMENTS)
    return _predicted(step, (*sizes, precision.cpu_has_bfloat16(), hopper.available))


@cache
def _predicted(step, here):
    return predict_memory(step)


def measure(step, num_steps=1):
    """Take a step as training does, then measure further steps."""
    return _measure(step, parallelize(_network(step), step.layout), num_steps)


def measure_shards(step):
    """Measure every shard; shards are threads."""

    def work(shard, messages):
        own = replace(step, layout=replace(step.layout, shard=shard))
        return _measure(own, SpatialExecutor(_network(step), own.layout, messages=messages))

    return run_shards(step.layout.num_shards, work)


def _network(step):
    model = UNet3d(step.topology)
    return model.double() if step.precision == "float64" else model


def _measure(step, executor, num_steps=1):
    model, size, num_shards = executor.module, step.own_size, step.layout.num_shards
    optimization = Optimization(model, step.settings, step.precision)
    image = torch.randn(step.batch_size, step.topology.in_channels, *size)
    image = image.to(executor.input_device, image_dtype(model))
    batch = (step.batch_size, *size)
    target = torch.zeros(batch, dtype=torch.uint8, device=executor.output_device)
    planes = step.size[0] if num_shards > 1 else None
    meter = MemoryMeter(executor.slots, model)
    for number in range(1 + num_steps):
        if number == 1:
            meter.start()
            executor.observer = meter
        executor.forward_backward(image, target, step.loss, optimization.scale, planes=planes)
        meter.note_gradients()
        optimization.step(0.01)
    return meter.read(optimization.optimizer)
