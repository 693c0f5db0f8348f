"""Forward passes of windows, captured as a CUDA graph and replayed.

A GPU computes four windows of 128^3 in 13 ms, and Python needs as long to queue them: so the GPU
waits now and then, and always where windows are smaller.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from unet3d.inference.sliding_window import Predicting
from unet3d.parallel import Slot
from unet3d.parallel.graph import Graph, pool_of_kind

logger = logging.getLogger(__name__)


class ReplayedNetwork:
    """Predicts as a network on one GPU does; the logits are those of the last call only.

    The first windows of a shape are computed as usual, which compiles kernels; if the next are of
    the same, they are captured.
    """

    def __init__(self, predicting: Predicting) -> None:
        """Set it up.

        Args:
            predicting: The network, on one GPU; its weights stay where they are in memory.
        """
        self._predicting = predicting
        self._pool = pool_of_kind(predicting.input_device)
        self._last: torch.Size | None = None
        """Shape of the windows before."""
        self._captured: tuple[Graph, Tensor, Tensor] | None = None
        self._has_failed = False

    @property
    def input_device(self) -> torch.device:
        """The device where images are expected."""
        return self._predicting.input_device

    @property
    def output_device(self) -> torch.device:
        """The device where logits are returned."""
        return self._predicting.output_device

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots of this process."""
        return self._predicting.slots

    def predict(self, image: Tensor) -> Tensor:
        """Return logits (N, K, X, Y, Z), in memory that the next call fills again.

        Args:
            image: The windows (N, C, X, Y, Z), on the input device.
        """
        is_repeated, self._last = image.shape == self._last, image.shape
        if is_repeated and not self._has_failed and not self._is_captured(image):
            self._capture(image)
        if self._captured is None or not self._is_captured(image):
            return self._predicting.predict(image)
        graph, read, logits = self._captured
        read.copy_(image)
        graph.replay()
        return logits

    def _is_captured(self, image: Tensor) -> bool:
        return self._captured is not None and self._captured[1].shape == image.shape

    def _capture(self, image: Tensor) -> None:
        """Capture the forward pass of windows of this shape, if there is memory for it."""
        self._captured = None  # frees the memory of another shape
        try:
            with self._pool.current():
                read = image.clone()
                # What is cached now cannot be used by the graph, which has memory of its own.
                torch.cuda.synchronize(image.device)
                torch.cuda.empty_cache()
                with self._pool.capture() as graph:
                    logits = self._predicting.predict(read)
            self._captured = graph, read, logits
        except torch.OutOfMemoryError:
            self._has_failed = True
            logger.debug("no memory to capture windows of %s", tuple(image.shape))
        except RuntimeError as error:
            self._has_failed = True
            logger.warning(
                "windows cannot be captured as CUDA graphs, so they are launched: %s",
                " ".join(str(error).split())[:200],
            )
