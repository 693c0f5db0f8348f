"""What the allocators of GPUs will reserve, found by capturing a step of fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from unet3d.memory.allocations import WORKSPACE_BYTES, AllocationRecorder
from unet3d.memory.fake_devices import is_fake_device
from unet3d.memory.segments import Segments
from unet3d.parallel import Executor, LossFunction
from unet3d.parallel.captured_step import CapturedStep
from unet3d.parallel.cuda_graphs import Graph, MakePool
from unet3d.parallel.pipeline import PipelineExecutor
from unet3d.parallel.spatial.executor import SpatialExecutor


def reserved_bytes(
    executor: Executor,
    recorder: AllocationRecorder,
    image: Tensor,
    target: Tensor,
    *,
    loss: LossFunction,
    planes: int | None = None,
) -> dict[torch.device, int]:
    """Return what the allocator of each GPU reserves, with a captured step where there will be one.

    The steps before it are launched; what they leave in the cache is given back before a capture.

    Args:
        executor: On fake devices; it has taken a step.
        recorder: The recorder that has followed that step.
        image: The image of the step.
        target: The target of the step.
        loss: The loss of the step.
        planes: Planes of the whole volume, where both are a slab.
    """
    gpus = [slot.device for slot in executor.slots if is_fake_device(slot.device)]
    launched = {gpu: recorder.segments[gpu].reserved_bytes for gpu in gpus}
    if len(gpus) < len(executor.slots):
        return launched
    capture: Callable[[Tensor, Tensor, LossFunction, MakePool], CapturedStep | None]
    if isinstance(executor, SpatialExecutor):
        capture = partial(executor.captured_step, planes=planes)
    elif isinstance(executor, PipelineExecutor):
        capture = executor.captured_step
    else:
        return launched
    pools: dict[torch.device, Segments] = {gpu: Segments() for gpu in gpus}
    for gpu in gpus:
        recorder.segments[gpu].trim()
        for _ in range(2):  # cuBLAS's, for the stream of the capture, in two threads
            recorder.segments[gpu].allocate(WORKSPACE_BYTES)
    captured = capture(image, target, loss, lambda gpu: _FakeGraphPool(gpu, recorder, pools[gpu]))
    if captured is None:
        return launched
    if isinstance(executor, SpatialExecutor):  # a replay is followed by their exchange
        (gpu,) = gpus
        recorder.segments[gpu].allocate(executor.exchanged_bytes)
    return {
        gpu: max(launched[gpu], recorder.segments[gpu].reserved_bytes + pools[gpu].reserved_bytes)
        for gpu in gpus
    }


class _FakeGraphPool:
    """The graphs of a GPU that is not here: what is captured lies in a pool of its own."""

    def __init__(
        self, device: torch.device, recorder: AllocationRecorder, segments: Segments
    ) -> None:
        self._device = device
        self._recorder = recorder
        self._segments = segments

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        with self._recorder.allocating_in(self._device, self._segments):
            yield _NoGraph()

    def place_of(self, tensor: Tensor) -> Tensor:
        return torch.empty(0, device="meta")  # only a replay would read it

    def wait(self, event: torch.cuda.Event) -> None:
        """Nothing runs."""

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()


class _NoGraph:
    """A graph captured on fake tensors, which cannot be replayed."""

    def replay(self) -> None:
        raise RuntimeError("a step of fake tensors was only captured to count its memory")
