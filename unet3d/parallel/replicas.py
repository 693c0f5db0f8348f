"""Copies of one network that see different samples and stay equal.

Between processes PyTorch's ``DistributedDataParallel`` moves the gradients, for a replica of one
stage and of several alike. Each stage is wrapped on its own, in a group of its own. Its ``forward``
is not used, for the pipeline runs the blocks; what is used is its reducer, which is armed just
before a stage's last backward of a step, as :mod:`torch.distributed.pipelining` does it. So the
gradients of earlier micro-batches only add up, there is one all-reduce a step, and it overlaps with
the last backward::

    stage 1   .. F0 B0 F1 B1 (arm) F2 B2 ┬─ all-reduce ─┐
    stage 0   F0 F1 .. B0 F2 B1 ..    (arm) B2 ┬─ all-reduce ─┐  step

A step that is replayed (:mod:`unet3d.parallel.cuda_graphs`) hands its gradients to the reducers at
its end.

Inside one process ``nn.DataParallel`` does it all, with a thread for each device.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unet3d.config import Recompute
from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, DeviceError
from unet3d.model import LossTerms, UNet3d
from unet3d.parallel.cuda_graphs import RecordedPipeline
from unet3d.parallel.executor import LossFunction, NoObserver, Observer
from unet3d.parallel.partition import Stage
from unet3d.parallel.placement import Slot
from unet3d.parallel.schedule import Schedule


class ReplicaExecutor(RecordedPipeline):
    """One of several equal replicas, each in a process of its own, of one stage or more.

    The gradients that it leaves are the means over all ranks; where a rank's samples are another
    share of the batch than its neighbour's, the scale of its loss must say so (see
    :attr:`unet3d.volumes.patches.Batch.weight`). The loss that it returns is that of its samples.
    """

    def __init__(
        self,
        *,
        module: UNet3d,
        stages: Sequence[Stage],
        num_micro_batches: int,
        schedule: Schedule,
        autocast: torch.dtype | None,
        recompute: Recompute,
        offloads_skips: bool,
        group: Group,
    ) -> None:
        """Move the stages to their devices, and take over the first rank's parameters.

        Args:
            module: The network.
            stages: Its blocks, divided alike in every rank.
            num_micro_batches: Portions of this rank's samples.
            schedule: When each of them runs where.
            autocast: Lower precision on the GPU stages, or None.
            recompute: What is made again in backward instead of being kept.
            offloads_skips: Whether GPU stages park skips in host memory while nothing reads them.
            group: The ranks.

        Raises:
            ConfigError: Batch normalisation.
            DeviceError: The ranks' devices are of different kinds.
        """
        if module.topology.norm == "batch":
            raise ConfigError(
                f"batch normalisation with {group.size} replicas would take its statistics from "
                "portions of the batch; use model.norm=instance"
            )
        super().__init__(
            module=module,
            stages=stages,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            autocast=autocast,
            recompute=recompute,
            offloads_skips=offloads_skips,
        )
        kinds = group.exchange([stage.slot.device.type for stage in stages])
        if any(kind != kinds[0] for kind in kinds):
            described = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
            raise DeviceError(
                f"the ranks' stages are on different kinds of devices ({described}); give every "
                "machine the same kinds"
            )
        use_plain_strides(module)
        self.group = group
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
        if self.input_device.type == "cuda":
            torch.cuda.set_device(self.input_device)

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> LossTerms:
        """Add the mean of all ranks' gradients to the module's; see the protocol.

        Raises:
            RankError: Another rank died or hangs.
        """
        for wrapped in self._wrapped:
            # Once, after the first step, DDP makes its buckets anew in the order in which the
            # gradients came; until then there is one, and nothing overlaps.
            wrapped.reducer._rebuild_buckets()
        with self.group.translate_dist_errors():
            return super().forward_backward(image, target, loss_fn, scale)

    def _before_last_backward(self, stage: Stage) -> None:
        self._prepare_reducer(stage)

    def _may_deliver(self) -> bool:
        return True

    def _deliver(self, stage: Stage, gradients: dict[Tensor, Tensor]) -> None:
        """Add what was replayed, by way of autograd, whose hooks the reducers wait for.

        The same messages go out as after a step that is not replayed, for the ranks may differ in
        which of their steps are.
        """
        self._prepare_reducer(stage)
        torch.autograd.backward(list(gradients), list(gradients.values()))

    def _prepare_reducer(self, stage: Stage) -> None:
        self._wrapped[stage.slot.index].reducer.prepare_for_backward([])


def use_plain_strides(module: nn.Module) -> None:
    """Give kernels of a single voxel the strides that autograd gives their gradients.

    Along an axis of length one a stride means nothing, and ``to(memory_format=...)`` sets another;
    but DDP compares them, and warns.

    Args:
        module: Its parameters stay where and what they are.
    """
    for parameter in module.parameters():
        if parameter.dim() == 5 and parameter.shape[2:].numel() == 1:
            parameter.data = parameter.data.flatten(1).view(parameter.shape)


class DataParallelExecutor:
    """``nn.DataParallel``: a replica on each GPU, in one process.

    The network stays on the first device and is copied to the others in every forward pass; the
    logits are gathered on the output device, where the loss of the whole batch is taken.

    cuDNN must not search for its fastest algorithms here (``torch.backends.cudnn.benchmark``):
    what it finds is remembered per thread, and the threads are new in every step.
    """

    def __init__(
        self,
        module: UNet3d,
        devices: Sequence[torch.device],
        output_device: torch.device | None,
        autocast: torch.dtype | None,
    ) -> None:
        """Move the network to the first device.

        Args:
            module: The network.
            devices: GPUs, each once.
            output_device: One of them, or None for the first.
            autocast: Lower precision, or None.

        Raises:
            DeviceError: The devices are not GPUs.
            ConfigError: Batch normalisation.
        """
        check_data_parallel(devices, output_device)
        if module.topology.norm == "batch":
            raise ConfigError(
                f"batch normalisation with {len(devices)} replicas would take its statistics from "
                "portions of the batch; use model.norm=instance"
            )
        torch.backends.cudnn.benchmark = False
        self.module = module.to(devices[0])
        if autocast is not None:
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        self.input_device = devices[0]
        self.output_device = output_device or devices[0]
        names = tuple(block.name for block in module.blocks())
        self.slots: Sequence[Slot] = tuple(
            Slot(index=index, device=device, blocks=names) for index, device in enumerate(devices)
        )
        self.observer: Observer = NoObserver()
        self._network = _Lowered(self, autocast)
        self._replicated: nn.Module = nn.DataParallel(
            self._network, [device.index or 0 for device in devices], self.output_device
        )

    def forward_backward(
        self, image: Tensor, target: Tensor, loss_fn: LossFunction, scale: float = 1.0
    ) -> LossTerms:
        """Add one batch's gradients to the module's; see the protocol."""
        self.module.check_shape(image)
        logits = self._replicated(image)
        first = self.slots[0]
        with self.observer.during(first, "loss", 0):
            terms = loss_fn(logits, target)
        with self.observer.during(first, "backward", 0):
            torch.autograd.backward(terms.total * scale)
        return terms.detached()

    @torch.no_grad()
    def predict(self, image: Tensor) -> Tensor:
        """Return logits without gradients, from the first device alone; see the protocol."""
        was_training = self.module.training
        self.module.eval()
        logits: Tensor = self._network(image)
        self.module.train(was_training)
        return logits.to(self.output_device)


class _Lowered(nn.Module):
    """The network in lower precision: entered in each replica's own thread, as autocast must be."""

    def __init__(self, executor: DataParallelExecutor, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = executor.module
        self.autocast = autocast
        self._slots = {slot.device: slot for slot in executor.slots}
        self._executor = weakref.proxy(executor)  # which owns this; and what it watches changes

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        lowering = (
            nullcontext()
            if self.autocast is None
            else torch.autocast(image.device.type, dtype=self.autocast)
        )
        slot = self._slots[image.device]
        with self._executor.observer.during(slot, "forward", 0), lowering:
            return self.network(image)  # type: ignore[no-any-return]


def check_data_parallel(
    devices: Sequence[torch.device],
    output_device: torch.device | None,
    batch_size: int | None = None,
) -> None:
    """Refuse what ``nn.DataParallel`` cannot do, or would do wrongly without a word.

    Args:
        devices: Of the replicas.
        output_device: Where logits are gathered; None: on the first.
        batch_size: Samples in a step, where they are known.

    Raises:
        DeviceError: The devices are not different GPUs, or the output device is none of them.
        ConfigError: There are fewer samples than devices.
    """
    named = ",".join(map(str, devices))
    if any(device.type != "cuda" for device in devices) or len(set(devices)) != len(devices):
        raise DeviceError(
            f"parallel.engine dataparallel copies the network to GPUs, each named once, not to "
            f"{named}; use parallel.engine=ddp"
        )
    if output_device is not None and output_device not in devices:
        raise DeviceError(
            f"parallel.output_device is {output_device}, which is none of {named}; name one of them"
        )
    if batch_size is not None and batch_size < len(devices):
        raise ConfigError(
            f"a batch of {batch_size} gives {len(devices) - batch_size} of the {len(devices)} "
            f"devices no patch; use --batch-size {len(devices)} or more, or fewer --devices"
        )
