"""Copies of a network on several devices, each of which computes a part of every batch of windows.

One thread queues the work of all GPUs, a batch ahead of them, so it must not be slower than they
are together: that is what :mod:`unet3d.inference.replaying` is for. A part is sent before any
network begins, and logits come back as soon as they are there::

    GPU 0   cut ┬ windows 0..3 ────────┬ join, add up
                └ send ┐       ┌ send ─┘
    GPU 1              └ windows 4..7
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.inference.sliding_window import Predicting, explaining_memory
from unet3d.parallel import Slot
from unet3d.parallel.transfer import Transfer


class ReplicatedNetwork:
    """Predicts as each of its replicas does; images come from the first one's device."""

    def __init__(self, replicas: Sequence[Predicting]) -> None:
        """Set it up.

        Args:
            replicas: The same network on several devices, at least one.
        """
        self._replicas = tuple(replicas)
        self._joined: deque[torch.cuda.Event] = deque()

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected."""
        return self._replicas[0].input_device

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        return self._replicas[0].output_device

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of all replicas."""
        return [slot for replica in self._replicas for slot in replica.slots]

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z), in the order of the windows.

        A replica may fill the memory of its logits again in the next call: what it is sent then
        leaves the first device after these have come there.

        Args:
            image: The windows (N, C, X, Y, Z), on the input device.

        Raises:
            DoesNotFitError: A replica's device has too little memory.
        """
        parts = image.tensor_split(min(len(image), len(self._replicas)))
        shared = list(zip(self._replicas, parts, strict=False))
        sent = [Transfer(part, replica.input_device) for replica, part in shared]
        logits = []
        for (replica, part), image_there in zip(shared, sent, strict=True):
            x, y, z = part.shape[2:]
            with explaining_memory(replica, (x, y, z)):
                found = replica.predict(image_there.wait())
                logits.append(Transfer(found, self.output_device))
        if len(logits) == 1:
            return logits[0].wait()
        joined = torch.cat([one.wait() for one in logits])
        self._hold_back()
        return joined

    def _hold_back(self) -> None:
        """Wait for the call before: what is sent takes memory from when it is queued."""
        if self.output_device.type == "cuda":
            self._joined.append(torch.cuda.current_stream(self.output_device).record_event())
            if len(self._joined) > 1:
                self._joined.popleft().synchronize()
