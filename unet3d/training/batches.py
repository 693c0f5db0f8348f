"""What makes the batches of a rank: the share of its replica, and its slab of that."""

from functools import partial

from unet3d.config import Config
from unet3d.parallel import Executor, ParallelDims
from unet3d.parallel.spatial.executor import SpatialExecutor
from unet3d.patches.loader import PatchLoader
from unet3d.patches.patches import PatchSampler
from unet3d.planning.experiment import Experiment
from unet3d.training.waiting import Loading


def make_loader(
    experiment: Experiment, executor: Executor, dims: ParallelDims, num_workers: int
) -> PatchLoader:
    """Return the loader of a rank.

    Args:
        experiment: Cases, patches and settings.
        executor: The placed network; what it says of slabs is what is loaded.
        dims: Which replica and which shard this rank is.
        num_workers: Processes that cut patches; 0: this one.

    Raises:
        DeviceError: Patches are to be augmented on a GPU, and the network begins on a CPU.
    """
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


def loading_of(config: Config, executor: Executor, num_workers: int, num_ranks: int) -> Loading:
    """Return what an epoch that waits for its data can be told of.

    Args:
        config: The settings.
        executor: The placed network.
        num_workers: Processes that cut patches; 0: this one.
        num_ranks: Ranks that share this machine.
    """
    return Loading(
        devices=[slot.device for slot in executor.slots],
        num_workers=num_workers,
        num_ranks=num_ranks,
    )
