"""Computing windows: a network on devices, with replicas, mirror images and CUDA graphs.

Each layer wraps a :data:`Predict` function in another one::

    replica 0   executor ── replayed ── mirrored ─┬ replicated ── windows
    replica 1   executor ── replayed ── mirrored ─┘
"""

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from unet3d.config import Shape
from unet3d.errors import DoesNotFitError
from unet3d.memory.host import is_out_of_memory, shortage_reason
from unet3d.parallel import Executor
from unet3d.parallel.graph import Graph, pool_of_kind
from unet3d.parallel.mail import Transfer

logger = logging.getLogger(__name__)

Predict = Callable[[Tensor], Tensor]
"""Returns logits (N, K, X, Y, Z) of windows (N, C, X, Y, Z)."""


@dataclass(frozen=True, kw_only=True)
class WindowNetwork:
    """A placed network that computes batches of windows."""

    predict: Predict
    input_device: torch.device
    """The device for windows."""
    output_device: torch.device
    """The device of logits."""
    devices: tuple[torch.device, ...]
    """Devices of all stages and replicas."""

    @classmethod
    def of(cls, executor: Executor, predict: Predict | None = None) -> "WindowNetwork":
        """Return the window network of an executor; ``predict`` replaces the executor's own."""
        return cls(
            predict=predict or (lambda image: executor.predict(image)),
            input_device=executor.input_device,
            output_device=executor.output_device,
            devices=tuple(slot.device for slot in executor.slots),
        )


@contextmanager
def naming_devices(devices: Sequence[torch.device], window: Shape) -> Iterator[None]:
    """Raise DoesNotFitError, which names devices and window, if memory runs out in the context."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        x, y, z = window
        raise DoesNotFitError(
            f"windows of {x}x{y}x{z} voxels do not fit on "
            f"{', '.join(dict.fromkeys(map(str, devices)))} "
            f"({shortage_reason(error)}); use a smaller inference.window or more devices"
        ) from error


def mirrored_mean(predict: Predict, image: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the mean of the logits of windows and of their mirror images along the axes X, Y, Z.

    As in nnU-Net (arXiv 1904.08128), logits are averaged over all combinations of ``axes``, 0 to 2.
    With mirror images, the mean is at least in float32.
    """
    logits = predict(image)
    if not axes:
        return logits
    # A sum of eight in bfloat16 would lose digits. A copy, because the next call may overwrite it.
    total = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    del logits  # frees memory for the next logits
    for number in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, number):
            flip = tuple(2 + axis for axis in some)
            total.add_(predict(image.flip(flip)).flip(flip))
    return total.div_(2 ** len(axes))


def replicated(replicas: Sequence[WindowNetwork]) -> WindowNetwork:
    """Return a network of replicas on several devices, each computing a part of a batch.

    One thread queues the work of all GPUs, a batch ahead of them, so it must not be slower than all
    of them together: hence :class:`Replayed`. All parts are sent before any network begins, and
    logits return as soon as they are computed::

        GPU 0   cut ┬ windows 0..3 ────────┬ join, add up
                    └ send ┐       ┌ send ─┘
        GPU 1              └ windows 4..7

    A replica may overwrite its logits in the next call; its next windows leave the first device
    only after its logits have arrived there.
    """
    if len(replicas) == 1:
        return replicas[0]
    first = replicas[0]
    joined: deque[torch.cuda.Event] = deque()

    def predict(image: Tensor) -> Tensor:
        parts = image.tensor_split(min(len(image), len(replicas)))
        shared = list(zip(replicas, parts, strict=False))
        sent = [Transfer(part, replica.input_device) for replica, part in shared]
        logits = []
        for (replica, part), image_there in zip(shared, sent, strict=True):
            x, y, z = part.shape[2:]
            with naming_devices(replica.devices, (x, y, z)):
                found = replica.predict(image_there.wait())
                logits.append(Transfer(found, first.output_device))
        if len(logits) == 1:
            return logits[0].wait()
        together = torch.cat([one.wait() for one in logits])
        if first.output_device.type == "cuda":
            # Wait for the previous call, because parts take memory as soon as they are queued.
            joined.append(torch.cuda.current_stream(first.output_device).record_event())
            if len(joined) > 1:
                joined.popleft().synchronize()
        return together

    return WindowNetwork(
        predict=predict,
        input_device=first.input_device,
        output_device=first.output_device,
        devices=tuple(device for replica in replicas for device in replica.devices),
    )


class Replayed:
    """Predicts with a network on one GPU by a CUDA graph; the next call overwrites the logits.

    A GPU computes four windows of 128^3 in 13 ms, and Python needs as long to queue them. The first
    windows of a shape are computed as usual, which compiles kernels; if the next windows have the
    same shape, their forward pass is captured. Fewer windows, as at the end of a scan, replay it
    too: launching them for the first time takes 70 ms, and what is computed in vain 9.
    """

    def __init__(self, executor: Executor) -> None:
        """Take a network whose weights keep their addresses in memory."""
        self._executor = executor
        self._pool = pool_of_kind(executor.input_device)
        self._last: torch.Size | None = None
        """Shape of the previous windows."""
        self._captured: tuple[Graph, Tensor, Tensor] | None = None
        self._has_failed = False

    def __call__(self, image: Tensor) -> Tensor:
        """Return the logits of windows."""
        is_repeated, self._last = image.shape == self._last, image.shape
        if is_repeated and not self._has_failed and not self._is_captured(image):
            self._capture(image)
        if self._captured is None or not self._is_captured(image):
            return self._executor.predict(image)
        graph, read, logits = self._captured
        read[: len(image)] = image
        graph.replay()
        return logits[: len(image)]

    def _is_captured(self, image: Tensor) -> bool:
        """Return whether a graph computes windows of this size, and so many."""
        if self._captured is None:
            return False
        most, *size = self._captured[1].shape
        return size == list(image.shape[1:]) and len(image) <= most

    def _capture(self, image: Tensor) -> None:
        """Capture the forward pass of windows of this shape, if there is memory for it."""
        self._captured = None  # frees the memory of another shape
        try:
            with self._pool.current():
                read = image.clone()
                # The graph has its own memory pool, and cannot use memory that is cached now.
                torch.cuda.synchronize(image.device)
                torch.cuda.empty_cache()
                with self._pool.capture() as graph:
                    logits = self._executor.predict(read)
            self._captured = graph, read, logits
        except torch.OutOfMemoryError:
            self._has_failed = True
            logger.debug("no memory to capture windows of %s", tuple(image.shape))
        except RuntimeError as error:
            self._has_failed = True
            logger.warning(
                "windows cannot be captured as CUDA graphs, so they run without graphs: %s",
                " ".join(str(error).split())[:200],
            )
