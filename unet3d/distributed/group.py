"""The ranks of one training or prediction, and what they tell one another beside gradients.

There are two channels. A *store* holds small values and outlives the ranks; it can be asked without
waiting, so it never times out (`store_exchange`, `rank_watch`). A *gloo* group carries a message
for every step, which is read one step after it was sent, so that no rank waits (`step_messages`),
and the bytes of files. Gradients go through groups of their own; see
:mod:`unet3d.parallel.exchange`. Where GPUs wait for their messages, nobody reads anything; so a
thread watches them (`device_watch`). Nothing that one rank sends another is ever unpickled: values
are JSON, everything else is tensors of numbers.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unet3d.distributed.device_watch import DeviceWatch
from unet3d.distributed.launched import MEETING_FOLDER
from unet3d.distributed.purpose import TRAINING, Purpose
from unet3d.distributed.rank_watch import RankWatch
from unet3d.distributed.ranks import Ranks
from unet3d.distributed.step_messages import StepMessages
from unet3d.distributed.store_exchange import StoreExchange
from unet3d.torch_private import Store, set_timeout

Result = TypeVar("Result")

JOIN_SECONDS = 600
ENDLESS = timedelta(days=365)

PIECE_BYTES = 16 * 1024**2
"""What is sent of a file at a time; it must get through before a rank counts as hanging."""


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where the ranks meet."""

    values: Store
    """What they and PyTorch's process groups tell one another; empty when they start."""
    lasting: Store
    """What outlives a restart."""


@dataclass(frozen=True, kw_only=True)
class _Channels:
    """What connects a rank with the others."""

    stores: Stores
    watch: RankWatch
    values: StoreExchange
    steps: StepMessages
    devices: DeviceWatch


class Group:
    """The ranks of one job, of which this process is one; it may be the only one."""

    def __init__(
        self, ranks: Ranks, stores: Stores | None = None, purpose: Purpose = TRAINING
    ) -> None:
        """Take a place among the ranks."""
        self.ranks = ranks
        self._channels: _Channels | None = None
        if stores is not None:
            watch = RankWatch(stores.values, ranks, timedelta(seconds=JOIN_SECONDS), purpose)
            self._channels = _Channels(
                stores=stores,
                watch=watch,
                values=StoreExchange(stores.values, ranks, watch),
                steps=StepMessages(watch),
                devices=DeviceWatch(watch),
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and shows."""
        return self.ranks.is_first

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.world_size

    @property
    def values(self) -> Store | None:
        """Where ranks can read what others have written, also while those wait; None for one."""
        return None if self._channels is None else self._channels.stores.values

    def open(self, timeout_seconds: float) -> None:
        """Connect the ranks; all of them call it. After such silence a rank is taken to hang."""
        if self._channels is None:
            return
        self._channels.watch.timeout = timedelta(seconds=timeout_seconds)
        self.note(-1, "the start")
        self.exchange(None)
        dist.init_process_group(
            "gloo",
            store=self._channels.stores.values,
            rank=self.ranks.rank,
            world_size=self.size,
            timeout=timedelta(seconds=JOIN_SECONDS),
        )
        # From now on a rank may validate for long; the notes tell which one hangs.
        set_timeout(ENDLESS)

    def begin(self, run: str) -> None:
        """Write down, for these ranks when they are restarted, that the run is theirs."""
        if self._channels is not None:
            self._channels.stores.lasting.set(f"begun/{run}", "")

    def has_begun(self, run: str) -> bool:
        """Return whether these ranks have begun a run before they were restarted."""
        if self._channels is None:
            return self.ranks.restart_count > 0
        return self._channels.stores.lasting.check([f"begun/{run}"])

    def new_group(
        self, device: torch.device, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup:
        """Return a group of ranks that moves tensors of a kind of device; all ranks call it."""
        if self._channels is None:
            raise RuntimeError("a single rank has no other to form a group with")
        timeout = self._channels.watch.timeout
        members = None if ranks is None else list(ranks)
        backend = "gloo"
        if device.type == "cuda":
            # Else NCCL 2.28 registers the memory of captured messages, and replays wait for ever.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
            # A second net: NCCL names no rank, and does not see messages that were captured.
            backend, timeout = "nccl", 2 * timeout + timedelta(minutes=1)
        return dist.new_group(members, backend=backend, timeout=timeout)  # type: ignore[no-any-return]

    def new_subgroup(self, device: torch.device, size: int) -> dist.ProcessGroup:
        """Return the group of ``size`` ranks in a row that this one is in; all ranks call it.

        The size divides the number of ranks.
        """
        groups = [
            self.new_group(device, range(first, first + size))
            for first in range(0, self.size, size)
        ]
        return groups[self.ranks.rank // size]

    def close(self) -> None:
        """Leave the others, after the last message has come."""
        if self._channels is None or not dist.is_initialized():
            return
        self._channels.steps.wait()
        self.exchange(None)  # the rank that keeps the store or listens must leave last
        self._channels.devices.close()
        dist.destroy_process_group()

    def note(self, step: int, text: str) -> None:
        """Say how far this rank is, in steps since the beginning and in words."""
        if self._channels is not None:
            self._channels.watch.note(step, text)

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do work whose result is kept in files: the first rank, then the others, fast."""
        return work() if self._channels is None else self._channels.values.in_turn(work)

    def from_first(
        self,
        make: Callable[[], Result],
        *,
        to_plain: Callable[[Result], Any] | None = None,
        from_plain: Callable[[Any], Result] | None = None,
    ) -> Result:
        """Return what the first rank makes, however long it takes; a single rank's as it is.

        ``to_plain`` turns it into lists, numbers and strings, ``from_plain`` back in every rank.
        """
        if self._channels is None:
            return make()
        to_plain = to_plain or (lambda made: made)
        result: Result = self._channels.values.from_first(lambda: to_plain(make()))
        return result if from_plain is None else from_plain(result)

    def file_from_first(self, path: Path, read: Callable[[Path], Result]) -> Result:
        """Return what a file holds that only the first rank needs to see; others read a copy."""
        if self._channels is None:
            return read(path)
        limit = self._channels.watch.timeout
        if self.is_first:
            found = read(path)
            self._broadcast_file(path, limit)
            return found
        # Where `unet3d train` has started the ranks, it deletes the copy of one that is killed.
        meeting_folder = os.environ.get(MEETING_FOLDER)
        with NamedTemporaryFile(prefix="unet3d-", dir=meeting_folder) as copy:
            self._broadcast_file(Path(copy.name), limit)
            return read(Path(copy.name))

    def _broadcast_file(self, path: Path, limit: timedelta) -> None:
        """Send the bytes of the first rank's file to all others, which write them."""
        num_bytes = self.from_first(lambda: path.stat().st_size)
        content = torch.from_file(
            str(path), shared=not self.is_first, size=num_bytes, dtype=torch.uint8
        )
        self.exchange(None)  # now all of them wait for it
        with self.translate_dist_errors():
            for piece in torch.split(content, PIECE_BYTES):
                dist.broadcast(piece, 0, async_op=True).wait(limit)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; all of them call it."""
        return [value] if self._channels is None else self._channels.values.exchange(value)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, the same in each of them to the bit."""
        return [sum(column) for column in zip(*self.exchange(list(values)), strict=True)]

    def all_reduce_flags(self, stop: int, save: bool) -> tuple[int, bool]:
        """Say what this rank asks for after a step, and return what all of them do now.

        The answer to the flags of a step comes after the next step, so that no rank waits for
        another; a single rank has it at once.
        """
        if self._channels is None:
            return stop, save
        return self._channels.steps.all_reduce_flags(stop, save)

    def watching(self, *devices: torch.device) -> AbstractContextManager[None]:
        """Return a context in which messages are queued; see ``DeviceWatch.queueing``."""
        own = self._channels
        return nullcontext() if own is None else own.devices.queueing(*devices)

    @contextmanager
    def translate_dist_errors(self) -> Iterator[None]:
        """Turn an error of a process group into one that names the lost rank and its last step."""
        if self._channels is None:
            yield
            return
        with self._channels.watch.translate_dist_errors():
            yield
