"""The gradients of devices that share volumes: one message when a step has ended.

``DistributedDataParallel`` would send while backward still exchanges planes, and two of NCCL's
communicators that are at work in one process at a time can wait for one another for ever. So
the gradients add up in one piece of memory, which is averaged over all ranks at once.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.distributed.group import Group
from unet3d.model import BlockNetwork
from unet3d.parallel.partition import Stage


class FlatExchange:
    """The mean over all ranks; see :class:`~unet3d.parallel.gradient_exchange.GradientExchange`."""

    def __init__(
        self,
        module: BlockNetwork,
        group: Group | None,
        process_group: dist.ProcessGroup | None,
        shards: Callable[[bool], bool],
    ) -> None:
        """Copy the first rank's parameters.

        Args:
            module: The network, on its device.
            group: The ranks; None: memory is predicted, and there is nobody.
            process_group: Moves their tensors.
            shards: Tells the other shards of a replica a wish, and returns whether all have it.
        """
        self._module = module
        self._num_ranks = 1 if group is None else group.size
        self._errors = nullcontext if group is None else group.translate_dist_errors
        self._process_group = process_group
        self._shards = shards
        self._flat: Tensor | None = None
        self._own: dict[Tensor, Tensor] = {}
        if group is not None:
            with self._errors(), torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    # A kernel may be stored channels-last, and a message wants it contiguous.
                    value = tensor.contiguous()
                    dist.broadcast(value, 0, group=process_group)
                    tensor.copy_(value)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Exchange what a step has added to the gradients.

        Raises:
            RankError: Another rank died or hangs.
        """
        with self._errors():
            flat = self._own_gradients()
            yield
            if self._process_group is None:
                return
            # What gradients held before is the same in all ranks, and so is the mean of it.
            if flat.device.type == "cuda":
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._process_group)
            else:  # gloo knows no mean
                dist.all_reduce(flat, group=self._process_group)
                flat /= self._num_ranks

    def before_last_backward(self, stage: Stage) -> None:
        """Do nothing: the message goes out when backward has ended."""

    def all_agree(self, wish: bool) -> bool:
        """Return whether all shards of the replica wish it: their messages are part of the step.

        Other replicas may have other numbers of samples, and so capture other steps.

        Raises:
            RankError: Another rank died or hangs.
        """
        with self._errors():
            return self._shards(wish)

    def memory_for(self, parameter: Tensor) -> Tensor:
        """Return the gradient itself, to which replays add."""
        self._own_gradients()
        return self._own[parameter]

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Do nothing: the gradients are where they belong."""

    def _own_gradients(self) -> Tensor:
        """See that each gradient is its part of the flat memory, and return that."""
        if self._flat is None:
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            total = sum(parameter.numel() for parameter in parameters)
            first = parameters[0]
            self._flat = torch.zeros(total, dtype=first.dtype, device=first.device)
            start = 0
            for parameter in parameters:
                part = self._flat.narrow(0, start, parameter.numel())
                self._own[parameter] = part.as_strided(
                    parameter.shape, parameter.stride(), part.storage_offset()
                )
                start += parameter.numel()
        for owner, own in self._own.items():
            if owner.grad is own:
                continue
            if owner.grad is None:
                own.zero_()
            else:
                own.copy_(owner.grad)
            owner.grad = own
        return self._flat
