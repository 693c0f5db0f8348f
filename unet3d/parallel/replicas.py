"""How replicas that see different samples, each in its own process, stay equal.

Between processes PyTorch's ``DistributedDataParallel`` moves the gradients, for a replica of one
stage and of several. Each stage is wrapped on its own, in a group of its own. Its ``forward``
is not used, because the pipeline runs the blocks; what is used is its reducer, which is prepared
just before a stage's last backward of a step, as :mod:`torch.distributed.pipelining` does it. So
the gradients of earlier micro-batches only add up, there is one all-reduce a step, and it overlaps
with the last backward::

    stage 1   .. F0 B0 F1 B1 (prepare) F2 B2 ┬─ all-reduce ─┐
    stage 0   F0 F1 .. B0 F2 B1 ..    (prepare) B2 ┬─ all-reduce ─┐  step

A step that is replayed from CUDA graphs hands its gradients to the reducers at its end.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, DeviceError
from unet3d.model import BlockNetwork
from unet3d.parallel.partition import Stage


class ReducerExchange:
    """The mean over the ranks of a group, each of which has a replica on the same kinds of devices.

    Where a rank's samples are another share of the batch than its neighbour's, the weight of its
    loss must say so (see :attr:`unet3d.patches.patches.Batch.weight`). The loss that an executor
    returns is that of its own samples, unless it is one of the batch as one.
    """

    def __init__(self, module: BlockNetwork, stages: Sequence[Stage], group: Group) -> None:
        """Copy the first rank's parameters.

        Args:
            module: The network, on its devices.
            stages: Its blocks, divided in the same way in every rank.
            group: The ranks.

        Raises:
            ConfigError: The network's samples are not independent.
            DeviceError: The ranks' devices are of different kinds.
        """
        if not module.samples_are_independent:
            raise ConfigError(
                f"batch normalisation with {group.size} replicas would take its statistics from "
                "portions of the batch; use model.norm=instance"
            )
        check_kinds(stages, group)
        if any(stage.slot.device.type == "cuda" for stage in stages):
            use_plain_strides(module)
        self._group = group
        self._devices = tuple(dict.fromkeys(stage.slot.device for stage in stages))
        self.num_replicas = group.size
        self._wrapped = []
        for stage in stages:
            if stage.slot.device.type == "cuda":
                torch.cuda.set_device(stage.slot.device)
            with group.translate_dist_errors():
                self._wrapped.append(
                    DistributedDataParallel(
                        nn.ModuleList([block.module for block in stage.blocks]),
                        process_group=group.new_group(stage.slot.device),
                        gradient_as_bucket_view=True,
                    )
                )
        if stages[0].slot.device.type == "cuda":
            torch.cuda.set_device(stages[0].slot.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Name ranks that are lost in a step; see :class:`GradientExchange`.

        Raises:
            RankError: Another rank died or hangs.
        """
        with self._group.translate_dist_errors(), self._group.watching(*self._devices):
            for wrapped in self._wrapped:
                # After the first step, DDP rebuilds its buckets once, in the order in which the
                # gradients came; until then there is one bucket, and nothing overlaps.
                wrapped.reducer._rebuild_buckets()
            yield

    def total(self, sums: Tensor) -> Tensor:
        """Add up over the ranks; see :class:`GradientExchange`."""
        total = sums.clone(memory_format=torch.contiguous_format)
        # In the group of the last stage, on whose device they are.
        dist.all_reduce(total, group=self._wrapped[-1].process_group)
        return total

    def before_last_backward(self, stage: Stage) -> None:
        """Have the stage's gradients exchanged as they come; see :class:`GradientExchange`."""
        self._prepare_reducer(stage)

    def all_agree(self, wish: bool) -> bool:
        """Return the wish: the same messages go out whether a step is captured or not."""
        return wish

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients through autograd, because the reducers wait for its hooks.

        The same messages go out as after a step that is launched, because ranks may differ in
        which steps are launched.
        """
        self._prepare_reducer(stage)
        torch.autograd.backward(list(gradients), list(gradients.values()))

    def _prepare_reducer(self, stage: Stage) -> None:
        self._wrapped[stage.slot.index].reducer.prepare_for_backward([])


def check_kinds(stages: Sequence[Stage], group: Group) -> None:
    """Refuse ranks that could not exchange gradients; all of them call it.

    Args:
        stages: Of this rank.
        group: The ranks.

    Raises:
        DeviceError: The ranks' devices are of different kinds.
    """
    kinds = group.exchange([stage.slot.device.type for stage in stages])
    if any(kind != kinds[0] for kind in kinds):
        described = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise DeviceError(
            f"the ranks' stages are on different kinds of devices ({described}); give every "
            "machine the same kinds"
        )


def use_plain_strides(module: BlockNetwork) -> None:
    """Give kernels of one voxel, or of one channel, the strides of the gradients that GPUs compute.

    Along an axis of length one a stride means nothing, and ``to(memory_format=...)`` sets another;
    but DDP compares them, and warns.

    Args:
        module: The network. Devices and values of its parameters do not change.
    """
    for parameter in module.parameters():
        if parameter.dim() == 5 and 1 in (parameter.shape[1], parameter.shape[2:].numel()):
            parameter.data = parameter.data.flatten(1).view(parameter.shape)
