"""Shards of a volume as threads of one process, which exchange tensors."""

import threading

import torch
from torch import Tensor

NOTHING = torch.empty(0)

_LONGEST_SECONDS = 60


class _Room:
    def __init__(self, count):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=_LONGEST_SECONDS)
        self.values: list[list[Tensor]] = [[]] * count


class ThreadMessages:
    """The messages of a thread; see :class:`unet3d.parallel.spatial.shard.Messages`."""

    def __init__(self, room, index):
        self._room = room
        self._index = index
        self.log: list[tuple[str, int]] = []
        """Kind and bytes of each message."""

    def swap(self, neighbours):
        self.log.append(("swap", sum(swap.sent.nbytes for swap in neighbours.values())))
        sent = [neighbours[r].sent if r in neighbours else NOTHING for r in range(self._room.count)]
        told = self._tell(sent)
        for rank, swap in neighbours.items():
            swap.received.copy_(told[rank][self._index])

    def gather(self, received, sent):
        self.log.append(("gather", sent.numel()))
        received.copy_(torch.cat([part[0] for part in self._tell([sent])]))

    def sum(self, values):
        self.log.append(("sum", values.numel()))
        values.copy_(torch.stack([part[0] for part in self._tell([values])]).sum(0))

    def _tell(self, values):
        room = self._room
        room.values[self._index] = [value.detach().clone() for value in values]
        room.barrier.wait()
        told = list(room.values)
        room.barrier.wait()
        return told


def run_shards(count, work):
    """Run work(number, messages) in a thread for each shard, and return the results."""
    room = _Room(count)
    results = [None] * count
    errors: list[BaseException] = []

    def run(index):
        try:
            results[index] = work(index, ThreadMessages(room, index))
        except threading.BrokenBarrierError:
            pass  # another shard has failed
        except BaseException as error:
            errors.append(error)
            room.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
