"""A network whose windows several ranks compute together, each of them a slab of every window.

The first rank decides: it reads scans, asks for one window after another, keeps the logits and
writes. The others only take part, and keep nothing. So a scan that cannot be read, a smaller window
or the end of all scans is a matter of the first rank alone, and so is the next of several
networks::

    rank 0   shape, image ┬ forward pass ┬ outcome   blends, reads, writes; shape ..., or the end
    rank 1   shape, image ┴ forward pass ┴ outcome   waits for the next shape

Ranks agree on the outcome of each window: where it does not fit into the memory of one of them, all
of them leave it, and the first gets the error. But the others wait in the next exchange of the pass
then. So the rank breaks the groups that move tensors, which gives the others an error, and all
agree in the default group, which stays. New groups are made for what comes next.

How a group breaks depends on its backend::

    gloo    its connections close once nobody refers to the group, which the others notice
    NCCL    each rank aborts its own communicators; the kernels of another would wait on
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unet3d.distributed.group import Group
from unet3d.errors import DoesNotFitError, RankError, Unet3dError
from unet3d.interruption import Interrupted, InterruptionRequest, deferred_interruption
from unet3d.memory.host import is_out_of_memory, shortage_reason
from unet3d.model import BlockNetwork
from unet3d.parallel import Executor, Slot, image_dtype
from unet3d.torch_private import Store, abort_group, groups_besides_default

POLL_SECONDS = 0.2

NO_SHAPE = (0,) * 5
"""In place of the shape of a batch of windows: there is none, but perhaps another network."""

NO_NETWORK = -1
"""In place of a network's number, with ``NO_SHAPE``: there is nothing more to compute."""

KINDS: tuple[type[Unet3dError], ...] = (RankError, Unet3dError, DoesNotFitError)
"""What may have gone wrong with a window; where ranks differ, the last one is the cause."""


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Why a rank could not compute a window."""

    kind: int
    """Number in ``KINDS``, from 1."""
    message: str
    """The same for people, in one line."""

    @classmethod
    def of(cls, error: Unet3dError) -> "_Failure":
        kinds = (kind for kind in (RankError, DoesNotFitError, Unet3dError))
        kind = next(kind for kind in kinds if isinstance(error, kind))
        return cls(kind=KINDS.index(kind) + 1, message=str(error))


class Placing(Protocol):
    """Places the networks in this rank."""

    def make(self, index: int) -> Executor:
        """Return an executor, in groups of its own; all ranks call it.

        Args:
            index: The network's number.
        """
        ...

    def load_into(self, executor: Executor, before: int, index: int) -> bool:
        """Give a placed network the weights of another one, if nothing else is different.

        Args:
            executor: Of the network that is placed.
            before: That network's number.
            index: Number of the other one.

        Returns:
            Whether it has them now; the same in all ranks.
        """
        ...


class SharedExecutor:
    """For the first rank it predicts as any executor does; the others :meth:`follow`."""

    def __init__(self, placing: Placing, group: Group, timeout_seconds: float) -> None:
        """Place the first network; all ranks call it.

        Args:
            placing: Places the networks.
            group: The ranks, connected.
            timeout_seconds: Silence after which a rank is taken to hang.

        Raises:
            RuntimeError: This is the only rank.
        """
        if group.values is None:
            raise RuntimeError("a single rank has no other to share windows with")
        self._placing = placing
        self._network = 0
        self._group = group
        self._store = group.values
        self._timeout = timedelta(seconds=timeout_seconds)
        self._num_windows = 0
        self._num_connections = 0
        self._connect()

    def _connect(self) -> None:
        self._num_connections += 1
        self._executor: Executor | None = self._placing.make(self._network)
        self._images: dist.ProcessGroup | None = self._group.new_group(self.input_device)

    @property
    def placed(self) -> Executor:
        """The executor of this rank's slab."""
        if self._executor is None:
            raise RuntimeError("the network is not placed")
        return self._executor

    @property
    def module(self) -> BlockNetwork:
        """The network."""
        return self.placed.module

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected, and sent from there to the other ranks."""
        return self.placed.input_device

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        return self.placed.output_device

    @property
    def slots(self) -> Sequence[Slot]:
        """The slot of this rank."""
        return self.placed.slots

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z) on the output device; only the first rank calls it.

        Args:
            image: (N, C, X, Y, Z) on the input device.

        Raises:
            DoesNotFitError: A rank's device has too little memory.
            Unet3dError: Another reason why a rank cannot compute it.
            RankError: A rank died or hangs.
            Interrupted: A rank was asked to stop.
        """
        self._send(self._network, tuple(image.shape))
        return self._compute(lambda: image, InterruptionRequest())

    def use(self, index: int) -> None:
        """Go on with another network; only the first rank calls it.

        Args:
            index: Its number.

        Raises:
            RankError: A rank died or hangs.
        """
        self._send(index, NO_SHAPE)
        self._change(index)

    def end(self) -> None:
        """Let the other ranks go; only the first rank calls it.

        Raises:
            RankError: One of them died.
        """
        self._send(NO_NETWORK, NO_SHAPE)

    def follow(self) -> None:
        """Take part in every window until the first rank ends it; all other ranks call it.

        Signals wait until the window is computed: a rank that left it would stop the first one in
        the middle of something else.

        Raises:
            RankError: Another rank died or hangs.
            Interrupted: This rank was asked to stop, or another one.
        """
        with deferred_interruption(is_rank=True) as request:
            while True:
                network, *shape = self._send(NO_NETWORK, NO_SHAPE)
                if network == NO_NETWORK:
                    return
                if tuple(shape) == NO_SHAPE:
                    self._change(network)
                    continue
                dtype = image_dtype(self.module)
                empty = partial(torch.empty, shape, dtype=dtype, device=self.input_device)
                try:
                    self._compute(empty, request)
                except RankError:
                    raise
                except Unet3dError:
                    continue  # the first rank has it, too, and decides

    def _change(self, index: int) -> None:
        """Place another network in all ranks, in groups of its own where it is of another kind."""
        before, self._network = self._network, index
        if self._placing.load_into(self.placed, before, index):
            return
        if self.input_device.type == "cuda":
            torch.cuda.synchronize(self.input_device)
        self._largest(0)  # no rank's GPU waits for a group any more
        self._disconnect()
        self._connect()

    def _send(self, network: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first rank's network and shape in all of them."""
        sent = torch.tensor([network, *shape])
        with self._group.translate_dist_errors():
            work = dist.broadcast(sent, 0, async_op=True)
            if self._group.is_first:  # the others only have to take it
                work.wait(self._timeout)
            else:  # the first rank may read or write a scan for long
                work.wait()
        return tuple(sent.tolist())

    def _compute(self, image: Callable[[], Tensor], request: InterruptionRequest) -> Tensor:
        """Compute one batch of windows, all ranks together.

        Args:
            image: Makes what is sent by the first rank, and received by the others.
            request: Whether this rank was asked to stop.
        """
        self._num_windows += 1
        self._group.note(self._num_windows, f"window {self._num_windows}")
        logits, failure = None, None
        try:
            with self._group.translate_dist_errors(), self._freed():
                logits = self._forward(image)
        except Unet3dError as error:
            failure = _Failure.of(error)
        if failure is not None:
            self._store.set(self._broken, "")
            self._disconnect()
        kind, stop = self._largest(failure.kind if failure else 0, request.signal_number or 0)
        if stop:
            raise Interrupted(stop)
        if logits is not None and not kind:
            return logits
        logits = None
        self._disconnect()
        messages = self._group.exchange([failure.kind, failure.message] if failure else None)
        self._connect()
        causes = [message[1] for message in messages if message and message[0] == kind]
        raise KINDS[kind - 1](causes[0])

    def _forward(self, image: Callable[[], Tensor]) -> Tensor:
        try:
            sent = image().contiguous()
            dist.broadcast(sent, 0, group=self._images)
            return self.placed.predict(sent)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"a slab of the window does not fit on {self.input_device} of rank "
                f"{self._group.ranks.rank} ({shortage_reason(error)}); use a smaller "
                "inference.window or more devices"
            ) from error

    def _largest(self, *numbers: int) -> list[int]:
        """Return the largest of each number that a rank has."""
        tensor = torch.tensor(numbers)
        with self._group.translate_dist_errors():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).wait(self._timeout)
        return tensor.tolist()

    @property
    def _broken(self) -> str:
        """What a rank writes into the store that does not come to this window's collectives."""
        return f"broken/{self._num_connections}"

    def _freed(self) -> AbstractContextManager[None]:
        """Return what frees this rank's GPU from waiting for a rank that has failed."""
        if self.input_device.type != "cuda":
            return nullcontext()
        return aborted_with_others(self._store, self._broken)

    def _disconnect(self) -> None:
        """Leave the groups of the forward pass; ranks that wait there get an error."""
        self._executor = self._images = None
        gc.collect()
        break_groups()
        gc.collect()


def break_groups() -> None:
    """Abort and forget all groups but the default one.

    Of gloo's, which cannot be aborted, no reference may be left elsewhere.
    """
    for group in groups_besides_default():
        if dist.get_backend(group) == "nccl":
            abort_group(group)
        else:
            dist.destroy_process_group(group)


@contextmanager
def aborted_with_others(store: Store, key: str) -> Iterator[None]:
    """Abort the groups of NCCL in this context as soon as another rank says that it will not come.

    The rank may hang in a call of CUDA meanwhile, such as one that frees memory, which waits for
    all kernels. So a thread looks.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if store.check([key]):
                for group in groups_besides_default():
                    group.abort()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
