"""What all parts of one training share."""

from dataclasses import dataclass

from unet3d.distributed.group import Group
from unet3d.parallel import Executor, ParallelDims
from unet3d.planning.experiment import Experiment
from unet3d.runs.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One training, or one rank's share of it."""

    experiment: Experiment
    """Cases, preparation, network and settings."""
    executor: Executor
    """The placed network."""
    folder: RunFolder
    """Where the run's files go."""
    group: Group
    """The ranks that train together; the first one writes and shows."""
    dims: ParallelDims
    """Which replica, and which slab of its volumes, are this rank's."""
    precision: str
    """What the network computes in, such as ``bfloat16``."""
