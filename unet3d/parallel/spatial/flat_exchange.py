"""The gradients of devices that share volumes: one message when a step has ended.

``DistributedDataParallel`` would send while backward still exchanges planes, and two of NCCL's
communicators that are at work in one process at a time can wait for one another for ever. So
the gradients are copied to one piece of memory, which is averaged over all ranks at once. They lie
in it until they are cleared.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.distributed.group import Group
from unet3d.model import BlockNetwork
from unet3d.parallel.gradient_exchange import add_to_parameters
from unet3d.parallel.partition import Stage
from unet3d.torch_private import copy_all


class FlatExchange:
    """The mean over all ranks; see :class:`~unet3d.parallel.gradient_exchange.GradientExchange`."""

    def __init__(
        self,
        module: BlockNetwork,
        group: Group | None,
        process_group: dist.ProcessGroup | None,
        shards: Callable[[bool], bool],
        num_shards: int,
    ) -> None:
        """Copy the first rank's parameters.

        Args:
            module: The network, on its device.
            group: The ranks; None: memory is predicted, and there is nobody.
            process_group: Moves their tensors.
            shards: Tells the other shards of a replica a wish, and returns whether all have it.
            num_shards: How many ranks a replica has, one after the other.
        """
        self._module = module
        self._num_ranks = 1 if group is None else group.size
        self._num_shards = num_shards
        self.num_replicas = 1 if group is None else group.size // num_shards
        self._errors = nullcontext if group is None else group.translate_dist_errors
        self._process_group = process_group
        self._shards = shards
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
            yield
            flat = self._flattened()
            if self._process_group is None:
                return
            # What gradients held before is the same in all ranks, and so is the mean of it.
            if flat.device.type == "cuda":
                dist.all_reduce(flat, dist.ReduceOp.AVG, group=self._process_group)
            else:  # gloo knows no mean
                dist.all_reduce(flat, group=self._process_group)
                flat /= self._num_ranks

    def total(self, sums: Tensor) -> Tensor:
        """Add up over the replicas; see :class:`GradientExchange`.

        Args:
            sums: Of the replica's volumes, the same in all its ranks.
        """
        if self._process_group is None:
            return sums
        total = sums.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._process_group)
        return total / self._num_shards

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

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients to the parameters' own; see :class:`GradientExchange`."""
        add_to_parameters(gradients)

    def _flattened(self) -> Tensor:
        """Copy the gradients to one piece of memory, make them views of it, and return it."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        total = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        flat = torch.empty(total, dtype=first.dtype, device=first.device)
        parts, gradients, start = [], [], 0
        for parameter in parameters:
            part = flat.as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()
            if parameter.grad is None:  # no rank's loss depends on it
                part.zero_()
            else:
                parts.append(part)
                gradients.append(_with_strides_of(part, parameter.grad))
            parameter.grad = part
        copy_all(parts, gradients)
        return flat


def _with_strides_of(other: Tensor, x: Tensor) -> Tensor:
    """View a tensor with another's strides where these mean the same.

    Along an axis of length one a stride means nothing. But PyTorch compares it, and copies all
    tensors one by one if one differs.
    """
    strides = zip(x.shape, x.stride(), other.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in strides):
        return x.as_strided(x.shape, other.stride())
    return x
