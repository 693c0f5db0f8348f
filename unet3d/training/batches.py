"""What makes the batches of a rank: the share of its replica, and its slab of that."""

from functools import partial

from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import PatchSampler
from unet3d.training.context import RunContext


def make_loader(context: RunContext, num_workers: int) -> PatchLoader:
    """Return the loader of a rank; ``num_workers`` processes cut patches, 0: this one."""
    experiment, dims, executor = context.experiment, context.dims, context.executor
    settings, device = experiment.config, executor.input_device
    spatial = executor if isinstance(executor, SpatialExecutor) else None
    shard = dims.shard_of(dims.rank)
    sampler = PatchSampler(
        cases=experiment.training,
        settings=settings.patches,
        size=experiment.patch_size,
        stride=experiment.topology.total_stride,
        batch_size=settings.training.num_patches,
        seed=settings.training.seed,
    )
    return PatchLoader(
        sampler,
        num_steps=settings.training.steps_per_epoch,
        num_workers=num_workers,
        device=device,
        augments_on_device=device.type == "cuda",
        rank=dims.replica_of(dims.rank),
        num_ranks=dims.world_size // dims.num_shards,  # threads share what their process has
        slab=None if spatial is None else partial(spatial.rule.slab, shard),
        gather=None if spatial is None else spatial.gather,
    )
