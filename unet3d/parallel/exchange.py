"""The gradients of ranks that train one network: the mean over all of them, in every mode.

The gradients of a stage are copied to a few pieces of memory, each of which one message averages;
they lie there until they are cleared. A replica on one GPU, or on another machine than the next,
sends each piece as soon as its gradients are complete, while backward goes on::

    stage 1   .. F0 B0 F1 B1 F2 B2 ┬─ pieces ─┐
    stage 0   F0 F1 .. B0 F2 B1 .. B2 ┬─ pieces ─┐  step

The messages of a step on one device are part of its CUDA graph. Ranks that capture and ranks that
launch send the same messages in the same order, so they need not agree.

Nothing overlaps where devices share volumes: their backward exchanges planes, and two of NCCL's
communicators that are at work in one process at a time can wait for one another for ever. There a
stage has one piece, and so has one of a pipeline on one machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from unet3d.distributed.group import Group
from unet3d.errors import ConfigError, DeviceError
from unet3d.model import BlockNetwork
from unet3d.parallel.partition import Stage
from unet3d.torch_private import copy_all

PIECE_BYTES = 25 * 2**20
"""Of gradients that are sent together while backward goes on, the size of DDP's buckets."""


class NoExchange:
    """What is done with a step's gradients besides computing them: nothing, for a single rank."""

    num_replicas = 1
    """Over how many replicas the gradients are averaged."""

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over all replicas, without a graph; each of them calls it in a step.

        The sums have one shape everywhere, and are on the device of the loss.
        """
        return sums

    def step(self) -> AbstractContextManager[None]:
        """Return a context for one step."""
        return nullcontext()

    def averaging(self) -> AbstractContextManager[None]:
        """Return a context whose end averages the gradients that the stages have then.

        Their modules may have aliases of their parameters meanwhile, as in a capture.
        """
        return nullcontext()

    def before_last_backward(self, stage: Stage) -> None:
        """Note that the gradients of a stage are about to be complete."""

    def all_agree(self, wish: bool) -> bool:
        """Return whether all processes whose messages are part of a step wish to capture it."""
        return wish

    def add(self, stage: Stage, gradients: Mapping[Tensor, Tensor]) -> None:
        """Add gradients that were computed elsewhere to those of a stage's parameters.

        Those of a replayed step become the parameters' own, and the next replay overwrites them:
        whoever wants to keep them beyond ``zero_grad`` must copy them.
        """
        for parameter, gradient in gradients.items():
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


@dataclass(kw_only=True, eq=False)
class _Piece:
    """Parameters of one stage whose gradients go out in one message."""

    parameters: list[Tensor]
    group: dist.ProcessGroup | None
    missing: set[Tensor] = field(default_factory=set)
    """Whose gradients are not complete yet."""
    flat: Tensor | None = None
    """The gradients, once they are on their way."""
    work: Any = None


class FlatExchange(NoExchange):
    """The mean over all ranks.

    Where a rank's samples are another share of the batch than its neighbour's, the weight of its
    loss must say so (see :attr:`unet3d.patches.patches.Batch.weight`). The loss that an executor
    returns is that of its own samples, unless it is one of the batch as one.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        group: Group | None,
        process_groups: Sequence[dist.ProcessGroup | None],
        *,
        num_shards: int = 1,
        shards: Callable[[bool], bool] | None = None,
        overlaps: bool = False,
        watching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Copy the first rank's parameters.

        Args:
            stages: The blocks, on their devices, divided in the same way in every rank.
            group: The ranks; None: memory is predicted, and there is nobody.
            process_groups: What moves the tensors of each stage.
            num_shards: How many ranks a replica has, one after the other.
            shards: Tells the other shards of a replica a wish, and returns whether all have it;
                None: there are none.
            overlaps: Whether gradients are sent while backward goes on.
            watching: Returns a context in which the messages of a step are watched.
        """
        self._num_ranks = 1 if group is None else group.size
        self._num_shards = num_shards
        self.num_replicas = self._num_ranks // num_shards if group else 1
        self._errors = nullcontext if group is None else group.translate_dist_errors
        self._watching = watching
        self._shards = shards
        self._overlaps = overlaps
        self._group_of_loss = process_groups[-1]
        self._hooks: list[RemovableHandle] = []
        # The last stage first, which ends first; the same order in all ranks.
        self._stages = list(zip(stages, process_groups, strict=True))[::-1]
        self._pieces: dict[int, list[_Piece]] = {}
        """Of each stage, in a step."""
        for stage, own in self._stages if group is not None else ():
            with self._errors(), torch.no_grad():
                for tensor in _tensors_of(stage):
                    # A kernel may be stored channels-last, and a message wants it contiguous.
                    value = tensor.contiguous()
                    dist.broadcast(value, 0, group=own)
                    tensor.copy_(value)

    @classmethod
    def of_replicas(
        cls, module: BlockNetwork, stages: Sequence[Stage], group: Group | None
    ) -> "FlatExchange":
        """Return the exchange of replicas, each of which is in one rank; all of them call it."""
        if group is None:
            return cls(stages, None, [None] * len(stages))
        if not module.samples_are_independent:
            raise ConfigError(
                f"batch normalisation with {group.size} replicas would take its statistics from "
                "portions of the batch; use model.norm=instance"
            )
        check_kinds(stages, group)
        with group.translate_dist_errors():
            groups = []
            for stage in stages:
                if stage.slot.device.type == "cuda":
                    torch.cuda.set_device(stage.slot.device)
                groups.append(group.new_group(stage.slot.device))
        if stages[0].slot.device.type == "cuda":
            torch.cuda.set_device(stages[0].slot.device)
        devices = dict.fromkeys(stage.slot.device for stage in stages)
        return cls(
            stages,
            group,
            groups,
            overlaps=group.ranks.local_world_size < group.size
            or (len(stages) == 1 and stages[0].slot.device.type == "cuda"),
            watching=partial(group.watching, *devices),
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Name a rank that is lost in a step, and watch over its messages."""
        with self._errors(), self._watching():
            yield

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Average the gradients at the end; see :class:`NoExchange`."""
        self._pieces = {stage.slot.index: self._divide(stage, own) for stage, own in self._stages}
        pieces = [piece for of_stage in self._pieces.values() for piece in of_stage]
        try:
            yield
            for piece in pieces:
                if piece.flat is None:
                    self._send(piece)
            for piece in pieces:
                if piece.work is not None:
                    piece.work.wait()
                if piece.flat is not None and piece.flat.device.type != "cuda":
                    piece.flat /= self._num_ranks  # gloo knows no mean
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._pieces.clear()

    def total(self, sums: Tensor) -> Tensor:
        """Add up over the replicas; see :class:`NoExchange`.

        Of shards, the sums are those of the replica's volumes, the same in all of them.
        """
        if self._group_of_loss is None:
            return sums
        total = sums.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group_of_loss)
        return total / self._num_shards

    def before_last_backward(self, stage: Stage) -> None:
        """Have pieces sent as they are complete, if they are; see :class:`NoExchange`."""
        if not self._overlaps:
            return
        pieces = self._pieces[stage.slot.index]
        for piece in pieces:
            piece.missing = set(piece.parameters)
            for parameter in piece.parameters:
                noted = partial(self._note, pieces, piece)
                hook = parameter.register_post_accumulate_grad_hook(noted)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def all_agree(self, wish: bool) -> bool:
        """Return whether all shards of the replica wish it: their messages are part of the step.

        Other replicas may have other numbers of samples, and so capture other steps; the same
        messages go out, whether a step is captured or not.
        """
        if self._shards is None:
            return wish
        with self._errors():
            return self._shards(wish)

    def _divide(self, stage: Stage, group: dist.ProcessGroup | None) -> list[_Piece]:
        trained = [tensor for tensor in _tensors_of(stage) if tensor.requires_grad][::-1]
        parts = _divided(trained, PIECE_BYTES) if self._overlaps else [trained]
        return [_Piece(parameters=part, group=group) for part in parts if part]

    def _note(self, pieces: Sequence[_Piece], piece: _Piece, parameter: Tensor) -> None:
        """Send the pieces that are complete, in their order, which is that of all ranks."""
        piece.missing.discard(parameter)
        for one in pieces:
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
        if piece.group is not None:
            # What gradients held before is the same in all ranks, and so is the mean of it.
            mean = dist.ReduceOp.AVG if flat.device.type == "cuda" else dist.ReduceOp.SUM
            piece.work = self._reduce(flat, mean, piece.group)

    def _reduce(self, flat: Tensor, kind: Any, group: dist.ProcessGroup) -> Any:
        return dist.all_reduce(flat, kind, group=group, async_op=self._overlaps)


def check_kinds(stages: Sequence[Stage], group: Group) -> None:
    """Refuse ranks that could not exchange gradients; all of them call it."""
    kinds = group.exchange([stage.slot.device.type for stage in stages])
    if any(kind != kinds[0] for kind in kinds):
        described = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise DeviceError(
            f"the ranks' stages are on different kinds of devices ({described}); give every "
            "machine the same kinds"
        )


def _tensors_of(stage: Stage) -> list[Tensor]:
    """Return parameters and buffers of a stage, each once."""
    modules = [block.module for block in stage.blocks]
    return list(dict.fromkeys(t for one in modules for t in (*one.parameters(), *one.buffers())))


def _divided(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Return tensors in groups of about so many bytes, in their order."""
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
    """View a tensor with another's strides where these mean the same.

    Along an axis of length one a stride means nothing. But PyTorch compares it, and copies all
    tensors one by one if one differs.
    """
    strides = zip(x.shape, x.stride(), other.stride(), strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in strides):
        return x.as_strided(x.shape, other.stride())
    return x
