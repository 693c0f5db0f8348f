"""The gradients of ranks that train one network: the mean over all of them, in every mode.

The gradients of a stage are copied to a few pieces of memory, and stay there until they are
cleared. One message averages each piece. With one GPU per replica, or on several machines, each
piece is sent as soon as its gradients are complete, while backward goes on::

    stage 1   .. F0 B0 F1 B1 F2 B2 ┬─ pieces ─┐
    stage 0   F0 F1 .. B0 F2 B1 .. B2 ┬─ pieces ─┐  step

The messages of a step on one device are part of its CUDA graph. Ranks that capture a step and ranks
that launch it send the same messages in the same order, so ranks need not agree on which of the two
they do.

If devices share volumes, nothing overlaps: their backward exchanges planes, and two NCCL
communicators that run at the same time in one process can deadlock. Then all gradients of a stage
are one piece, as in a pipeline on one machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from unet3d.distributed.group import Group
from unet3d.errors import DeviceError
from unet3d.memory.fake_devices import is_gpu
from unet3d.parallel.partition import Stage
from unet3d.parallel.spatial.shard import GroupMessages, NoMessages
from unet3d.torch_private import copy_all

PIECE_BYTES = 25 * 2**20
"""Size of a piece that is sent while backward goes on: the size of DDP's buckets."""


class NoExchange:
    """No-op exchange of gradients, for a single rank."""

    num_replicas = 1
    """Number of replicas that the gradients are averaged over."""

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all replicas, without a graph; all replicas call it in each step.

        The sums have one shape everywhere, and are on the device of the loss.
        """
        return sums

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step."""
        return nullcontext()

    def averaging(self) -> AbstractContextManager[None]:
        """Return a context that averages the gradients of the stages when it ends.

        Within it, aliases may replace the parameters of the modules, as during a capture.
        """
        return nullcontext()

    def before_last_backward(self, stage: Stage) -> None:
        """Note that the gradients of a stage are about to be complete."""

    def all_agree(self, wish: bool) -> bool:
        """Return whether all processes whose messages are part of a step wish to capture it."""
        return wish


@dataclass(kw_only=True, eq=False)
class _Piece:
    """Parameters of one stage whose gradients go out in one message."""

    stage: Stage
    parameters: list[Tensor]
    missing: set[Tensor]
    """Parameters whose gradients are not complete yet."""
    flat: Tensor | None = None
    """The gradients, once their message is queued."""
    work: Any = None


class FlatExchange(NoExchange):
    """The mean over all ranks.

    If ranks have different numbers of samples, the weights of their losses must correct for it (see
    :attr:`unet3d.patches.patches.Batch.weight`). An executor returns the loss of its own samples,
    except for a loss of the whole batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group: Group | None,
        num_shards: int = 1,
        messages: NoMessages | None = None,
    ) -> None:
        """Connect the ranks and copy the first one's parameters; all ranks call it.

        A replica is ``num_shards`` consecutive ranks, which exchange ``messages`` (None: the
        group's messages). Without a group no messages are sent, for predicting memory.
        """
        self._num_ranks = 1 if group is None else group.size
        self._num_shards = num_shards
        self.num_replicas = self._num_ranks // num_shards if group else 1
        self.errors = nullcontext if group is None else group.translate_dist_errors
        devices = dict.fromkeys(stage.slot.device for stage in stages)
        self.watching = nullcontext if group is None else partial(group.watching, *devices)
        several_machines = group is not None and group.ranks.local_world_size < group.size
        one_gpu = len(stages) == 1 and is_gpu(stages[0].slot.device)
        self._overlaps = num_shards == 1 and (several_machines or one_gpu)
        # The last stage comes first, because its backward ends first.
        self._stages = stages[::-1]
        self._hooks: list[RemovableHandle] = []
        self._pieces: list[_Piece] = []
        """The pieces of a step, in the order in which they are sent."""
        self._groups: dict[int, dist.ProcessGroup] = {}
        """The group that exchanges the tensors of each stage, by its index."""
        self.messages = messages or NoMessages()
        if group is not None:
            with self.errors():
                self._connect(stages, group, messages)

    def _connect(self, stages: Sequence[Stage], group: Group, messages: NoMessages | None) -> None:
        _check_kinds(stages, group)
        devices = [stage.slot.device for stage in stages]
        for index, device in enumerate(devices):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._groups[index] = group.new_group(device)
        if devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])
        if self._num_shards > 1 and messages is None:
            own = self._groups[0]
            if self.num_replicas > 1:
                own = group.new_group(devices[0], self._num_shards)
            self.messages = GroupMessages(own)
        for stage in self._stages:
            for tensor in _tensors_of(stage):
                # A kernel may be stored channels-last, but a message must be contiguous.
                value = tensor.detach().contiguous()
                dist.broadcast(value, 0, group=self._groups[stage.slot.index])
                tensor.detach().copy_(value)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch the messages of a step, and name a lost rank."""
        with self.errors(), self.watching():
            yield

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Average the gradients at the end; see :class:`NoExchange`."""
        self._pieces = [piece for stage in self._stages for piece in self._divide(stage)]
        try:
            yield
            for piece in self._pieces:
                if piece.flat is None:
                    self._send(piece)
            for piece in self._pieces:
                if piece.work is not None:
                    piece.work.wait()
                if piece.flat is not None and piece.flat.device.type != "cuda":
                    piece.flat /= self._num_ranks  # gloo has no mean
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._pieces.clear()

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all replicas; see :class:`NoExchange`.

        All shards of a replica pass the same sums, over the replica's whole volumes.
        """
        if not self._groups:
            return sums
        total = sums.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._groups[self._stages[0].slot.index])
        return total / self._num_shards

    def before_last_backward(self, stage: Stage) -> None:
        """Send each piece when it is complete, if pieces overlap; see :class:`NoExchange`."""
        for piece in self._pieces if self._overlaps else ():
            if piece.stage is stage:
                for parameter in piece.parameters:
                    noted = partial(self._note, piece)
                    hook = parameter.register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def all_agree(self, wish: bool) -> bool:
        """Return whether all shards, whose messages are part of the step, wish to capture it.

        Replicas may have different numbers of samples, and so capture different steps. A captured
        step sends the same messages as a launched one.
        """
        if type(self.messages) is NoMessages:
            return wish
        with self.errors():
            with self.watching():  # must end before the host waits below
                number = torch.tensor([float(wish)], device=self._stages[0].slot.device)
                self.messages.sum(number)
            return int(number.item()) == self._num_shards

    def _divide(self, stage: Stage) -> list[_Piece]:
        trained = [tensor for tensor in _tensors_of(stage) if tensor.requires_grad][::-1]
        parts = _divided(trained, PIECE_BYTES) if self._overlaps else [trained]
        return [_Piece(stage=stage, parameters=part, missing=set(part)) for part in parts if part]

    def _note(self, piece: _Piece, parameter: Tensor) -> None:
        """Send complete pieces, in an order that is the same in all ranks."""
        piece.missing.discard(parameter)
        for one in self._pieces:
            if one.missing:
                return
            if one.flat is None:
                self._send(one)

    @torch.no_grad()
    def _send(self, piece: _Piece) -> None:
        """Copy gradients to one piece of memory, make them views of it, and average it."""
        first = piece.parameters[0]
        total = sum(parameter.numel() for parameter in piece.parameters)
        piece.flat = flat = torch.empty(total, dtype=first.dtype, device=first.device)
        parts, gradients, start = [], [], 0
        for parameter in piece.parameters:
            part = flat.as_strided(parameter.shape, parameter.stride(), start)
            start += parameter.numel()
            if parameter.grad is None:  # no rank's loss depends on it
                part.zero_()
            else:
                parts.append(part)
                gradients.append(_with_strides_of(part, parameter.grad))
            parameter.grad = part
        copy_all(parts, gradients)
        if self._groups:
            mean = dist.ReduceOp.AVG if flat.device.type == "cuda" else dist.ReduceOp.SUM
            piece.work = self._reduce(flat, mean, self._groups[piece.stage.slot.index])

    def _reduce(self, flat: Tensor, kind: Any, group: dist.ProcessGroup) -> Any:
        return dist.all_reduce(flat, kind, group=group, async_op=self._overlaps)


def _check_kinds(stages: Sequence[Stage], group: Group) -> None:
    """Refuse ranks that could not exchange gradients; all of them call it."""
    kinds = group.exchange([stage.slot.device.type for stage in stages])
    if any(kind != kinds[0] for kind in kinds):
        described = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise DeviceError(
            f"the ranks' stages are on different kinds of devices ({described}); give every "
            "machine the same kinds"
        )


def _tensors_of(stage: Stage) -> list[Tensor]:
    """Return the parameters and buffers of a stage without duplicates."""
    modules = [block.module for block in stage.blocks]
    return list(dict.fromkeys(t for one in modules for t in (*one.parameters(), *one.buffers())))


def _divided(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Return tensors in groups of about ``most_bytes``, in order."""
    groups: list[list[Tensor]] = []
    held = most_bytes
    for tensor in tensors:
        if held >= most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    return groups


def _with_strides_of(other: Tensor, x: Tensor) -> Tensor:
    """View a tensor with another's strides where both address the same memory.

    The stride of an axis of length one has no effect. But PyTorch compares it, and copies all
    tensors one by one if one stride differs.
    """
    strides = zip(x.shape, x.stride(), other.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in strides):
        return x.as_strided(x.shape, other.stride())
    return x
