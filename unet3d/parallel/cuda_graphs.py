"""CUDA graphs: what one GPU launches for one action, captured and replayed in one call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from unet3d.torch_private import free_cublas_workspaces

ERROR_MODE = "thread_local"
"""Other threads, such as those that watch over NCCL, may call CUDA meanwhile."""


class Graph(Protocol):
    """Captured work that can be replayed."""

    def replay(self) -> None:
        """Replay the work on the current stream."""
        ...


class GraphPool(Protocol):
    """The graphs of one device, which share memory."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Return a context that captures the work queued in it."""
        ...

    def place_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same memory that does not keep it from being reused."""
        ...

    def wait(self, event: torch.cuda.Event) -> None:
        """Make work that is queued from now on wait for an event."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the current one."""
        ...


class CudaGraphPool:
    """CUDA graphs of one GPU."""

    def __init__(self, device: torch.device) -> None:
        """Create an empty pool.

        Args:
            device: A GPU.
        """
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture in the context; see :class:`GraphPool`."""
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
        """Return a view that owns nothing; see :class:`GraphPool`."""
        storage = tensor.untyped_storage()
        view = torch.as_tensor(_Bytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
        whole = view.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def wait(self, event: torch.cuda.Event) -> None:
        """Have the GPU's current stream wait; see :class:`GraphPool`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context with the GPU as the current one; see :class:`GraphPool`."""
        return torch.cuda.device(self._device)


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a GPU captures; forward and backward must share one.

    There is one for each GPU, because cuBLAS keeps a workspace for each stream that it was ever
    used on, in each thread. It takes them here, so that they do not lie in the pool of a graph.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        one = torch.ones(1, 1, device=device, requires_grad=True)
        # The thread that goes backward needs CUDA's context, which cuBLAS alone would not make.
        torch.autograd.backward(((one @ one) * one).sum())
    return stream


def release_streams() -> None:
    """Let go of the streams that steps were captured on, and of cuBLAS's workspaces for them.

    There must be no captured step left. What is measured next then finds the GPUs as a new process
    would.
    """
    _capture_stream.cache_clear()
    free_cublas_workspaces()


class _Bytes:
    """Memory by its address, in the form that libraries for GPUs exchange."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


POOLS: dict[str, Callable[[torch.device], GraphPool]] = {"cuda": CudaGraphPool}
"""Pools by device type; steps that use any other type are launched."""


def pool_of_kind(device: torch.device) -> GraphPool:
    """Return a pool for graphs of a device.

    Args:
        device: A device of a type that has graphs.
    """
    return POOLS[device.type](device)
