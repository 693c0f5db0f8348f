"""CUDA graphs: the launches of a step on one device, captured once and replayed in one call.

For small volumes Python takes longer to launch the thousands of kernels of a step than a GPU takes
to run them. All graphs of a step on a GPU share one pool of memory: while a graph is captured, it
reuses memory that earlier graphs no longer need. They are replayed in the order in which they were
captured, so a captured step takes as much memory as a launched step.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unet3d.memory.fake_devices import is_fake_device
from unet3d.memory.meter import Observer
from unet3d.parallel.partition import Stage
from unet3d.parallel.placement import CAPTURE_SWITCH
from unet3d.torch_private import free_cublas_workspaces

logger = logging.getLogger(__name__)

ERROR_MODE = "thread_local"
"""Other threads, such as NCCL's watchdog, may call CUDA during a capture."""

NUM_WARM_UP_STEPS = 3
"""Steps of one shape in a row before a capture; they compile kernels and choose algorithms."""
MAX_ELEMENTS = 2**23
"""Most elements of a micro-batch's image; above this, GPUs are slower than Python."""
MAX_MICRO_BATCHES = 64
"""Most micro-batches: in a pipeline each has its own graphs, which take time to capture."""
MAX_SHARE = 0.45
"""Largest share of the GPU memory available to this process that launched steps may have reserved
before a capture: the captured step takes as much, and launched steps of a smaller last batch take
memory beside it."""

Gradients = dict[Tensor, Tensor]
"""The gradient of each parameter that has one."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the work again on the current stream, on the same memory."""
        ...


class GraphPool:
    """The graphs of one GPU, which share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture the work that is queued in the context."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode=ERROR_MODE)
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # the capture is lost and raises an error
                    graph.capture_end()
                raise
            graph.capture_end()

    def place_of(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor that does not keep its memory from being reused."""
        storage = tensor.untyped_storage()
        view = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        whole = view.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def wait(self, event: torch.cuda.Event) -> None:
        """Make work that is queued from now on wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the GPU is the current one."""
        return torch.cuda.device(self._device)


class FakePool(GraphPool):
    """Fake graphs of an absent GPU, to count the memory that a capture takes."""

    def __init__(self, device: torch.device) -> None:
        one = torch.ones(1, 1, device=device)
        torch.mm(one, one)  # cuBLAS takes its workspaces, as it does in `_capture_stream`

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Run the work once."""
        yield _Nothing()

    def place_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape, in other memory of a single element."""
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def current(self) -> AbstractContextManager[Any]:
        """Return a no-op context."""
        return nullcontext()


class _Nothing:
    """Replays nothing."""

    def replay(self) -> None:
        pass


POOLS: dict[str, Callable[[torch.device], GraphPool]] = {"cuda": GraphPool}
"""Pools by device type; steps that use any other type are launched."""


def has_graphs(device: torch.device) -> bool:
    """Return whether the work of a device can be captured."""
    return device.type in POOLS or is_fake_device(device)


def pool_of_kind(device: torch.device) -> GraphPool:
    """Return a new pool for graphs of a device that has graphs."""
    return FakePool(device) if is_fake_device(device) else POOLS[device.type](device)


class _Bytes:
    """Memory by its address, in the form that libraries for GPUs exchange."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU captures; forward and backward must share one.

    There is one for each GPU, because cuBLAS keeps a workspace for each stream that it was ever
    used on, in each thread. The workspaces are allocated here, so that they are not in the pool of
    a graph.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        one = torch.ones(1, 1, device=device, requires_grad=True)
        # Autograd's thread needs a CUDA context, which cuBLAS alone would not create.
        torch.autograd.backward(((one @ one) * one).sum())
    return stream


def release_streams() -> None:
    """Release the capture streams and their cuBLAS workspaces; no captured step may be left.

    The next measurement then finds the GPUs in the state of a new process.
    """
    _capture_stream.cache_clear()
    free_cublas_workspaces()


def give_cached_memory_back(devices: Iterable[torch.device]) -> None:
    """Release memory that launched steps left in the allocator's cache."""
    gpus = [device for device in devices if device.type == "cuda"]
    for device in gpus:
        torch.cuda.synchronize(device)
    if gpus:
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def aliased(stage: Stage) -> Iterator[Gradients]:
    """Replace a stage's parameters by aliases in the context, and collect the aliases' gradients.

    So a capture calls neither hooks of the parameters nor autograd's own hooks in another stream.
    An alias adopts its first gradient, so gradients need neither clearing nor adding. The result is
    complete when the context ends.
    """
    gradients: Gradients = {}
    owned = [
        (module, name, parameter)
        for block in stage.blocks
        for module in block.module.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    aliases: dict[Tensor, nn.Parameter] = {}  # one per parameter, which may have several names
    for module, name, parameter in owned:
        if parameter not in aliases:
            aliases[parameter] = nn.Parameter(
                parameter.detach(), requires_grad=parameter.requires_grad
            )
        setattr(module, name, aliases[parameter])
    try:
        yield gradients
        gradients |= {owner: own.grad for owner, own in aliases.items() if own.grad is not None}
    finally:
        for module, name, parameter in owned:
            setattr(module, name, parameter)


class Captured(Protocol):
    """A captured step of one shape."""

    gradients: list[Gradients]
    """Gradients of the parameters of each stage; replays overwrite them."""
    averages: bool
    """Whether a replay averages the gradients over ranks."""

    def replay(self, batch: Any) -> Any:
        """Run the step, write its gradients to :attr:`gradients`, and return its loss."""
        ...


class StepCapture:
    """Decides when a step is captured, and keeps the last captured step."""

    def __init__(
        self,
        stages: Sequence[Stage],
        capture: Callable[[Any, Observer], Captured],
        all_agree: Callable[[bool], bool],
        max_elements: int | None = None,
    ) -> None:
        """Begin with nothing captured; ``capture`` captures the step of a batch.

        ``all_agree`` returns whether all processes whose messages are part of a step wish to
        capture. ``max_elements`` replaces ``MAX_ELEMENTS``.
        """
        self._max_elements = MAX_ELEMENTS if max_elements is None else max_elements
        self._capture = capture
        self._all_agree = all_agree
        self._devices = dict.fromkeys(stage.slot.device for stage in stages)
        # A prediction of memory runs a single step, which is captured at once.
        self._is_prediction = any(map(is_fake_device, self._devices))
        self._modules = [
            module
            for stage in stages
            for block in stage.blocks
            for module in block.module.modules()
        ]
        self._captured: Captured | None = None
        self._captured_key: Any = None
        self._last_key: Any = None
        self._num_in_a_row = 0
        self._refused_keys: list[Any] = []

    def of(self, batch: Sequence[Any], observer: Observer) -> Captured | None:
        """Return a captured step for a batch, or None if its step is to be launched.

        The batch is a sequence of :class:`~unet3d.parallel.step.MicroBatch`.
        """
        if not self._is_possible(batch):
            return None
        layouts = [(one.shape, one.dtype) for one in (batch[0].image, batch[0].target)]
        objectives = [(one.loss_fn, one.weight, one.scale) for one in batch]
        key = (layouts, objectives, self._network_state())
        if self._captured is not None and key == self._captured_key:
            return self._captured
        self._num_in_a_row = self._num_in_a_row + 1 if key == self._last_key else 1
        self._last_key = key
        num_launched = 0 if self._is_prediction else NUM_WARM_UP_STEPS
        if self._num_in_a_row <= num_launched or key in self._refused_keys:
            return None
        if self._all_agree(self._has_room()):
            self._captured = None  # frees the memory of another shape
            self._captured, self._captured_key = self._captured_now(batch, observer), key
            if self._captured is not None:
                return self._captured
        self._refused_keys.append(key)
        return None

    def _captured_now(self, batch: Sequence[Any], observer: Observer) -> Captured | None:
        captured = None
        shape = "x".join(map(str, batch[0].image.shape))
        try:
            captured = self._capture(batch, observer if self._is_prediction else Observer())
            logger.debug("captured steps of %d micro-batches %s", len(batch), shape)
        except torch.OutOfMemoryError:
            logger.debug("no memory to capture steps of %d micro-batches %s", len(batch), shape)
        except RuntimeError as error:  # such as a loss that reads a value back to the host
            logger.warning(
                "steps of batches %s cannot be captured as CUDA graphs, so they run without "
                "graphs: %s; %s=0 in the environment turns graphs off",
                shape,
                " ".join(str(error).split())[:200],
                CAPTURE_SWITCH,
            )
        return captured if self._all_agree(captured is not None) else None

    def _network_state(self) -> list[tuple[Any, ...]]:
        """Return the state of the network that a capture fixes in a graph."""
        if self._is_prediction:
            return []
        return [
            (module.training, *((p.data_ptr(), p.requires_grad) for p in module.parameters(False)))
            for module in self._modules
        ]

    def _is_possible(self, batch: Sequence[Any]) -> bool:
        first = batch[0].image
        return (
            len(batch) <= MAX_MICRO_BATCHES
            and first.numel() <= self._max_elements
            and all(one.image.shape == first.shape for one in batch)
            and all(map(has_graphs, self._devices))
        )

    def _has_room(self) -> bool:
        for device in self._devices:
            if device.type == "cuda":
                free, total = torch.cuda.mem_get_info(device)
                reserved = torch.cuda.memory_reserved(device)
                allowed = torch.cuda.get_per_process_memory_fraction(device) * total
                if reserved > MAX_SHARE * min(free + reserved, allowed):
                    return False
        return True
