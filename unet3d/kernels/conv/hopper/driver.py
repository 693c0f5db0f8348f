"""Launches kernels that :mod:`unet3d.kernels.conv.hopper.build` compiles, with the driver's API.

A kernel is loaded into PyTorch's context on a GPU at its first launch there. Loading is illegal
while a graph is captured; but every kernel has been launched before, in the warm-up steps
(:data:`unet3d.parallel.graph.NUM_WARM_UP_STEPS`) or in the first windows of a prediction.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from unet3d.kernels.conv.hopper.build import building

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_MAP_CHANNELS = 32
_MAP_OPTIONS = (0, 2, 2, 0)
"""No interleaving, 64-byte swizzle, 128-byte promotion in the L2 cache, zeros outside."""
_MAX_DYNAMIC_SHARED = 8
_OUT_OF_MEMORY = 2

_lock = threading.RLock()

TensorMap = ctypes.c_ubyte * _MAP_BYTES
"""Tensor map (TMA descriptor), passed as ``__grid_constant__ const CUtensorMap``."""


class Kernel:
    """One variant of a kernel, for any number of GPUs."""

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        defines: Mapping[str, int],
        threads: int,
        shared_bytes: int,
    ) -> None:
        """Describe the variant; threads and dynamic shared memory are per block."""
        self._name = name.encode()
        self._variant = tuple(sources), tuple(sorted(defines.items()))
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._loaded: dict[int, ctypes.c_void_p] = {}

    def build(self) -> "Future[bytes]":
        """Begin to compile the variant in a thread, once; several variants compile in parallel."""
        return building(*self._variant, _driver_version())

    def load(self, device: torch.device) -> ctypes.c_void_p:
        """Return the compiled function, loaded on a GPU."""
        cubin = self.build().result()
        with _lock:
            if device.index not in self._loaded:
                self._loaded[device.index] = self._newly_loaded(device.index, cubin)
            return self._loaded[device.index]

    def launch(self, device: torch.device, blocks: int, *arguments: Any) -> None:
        """Launch the kernel on a GPU's current stream in PyTorch; ctypes are passed by value."""
        function = self._loaded.get(device.index) or self.load(device)
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        given = (function, *grid, *block, self._shared_bytes, stream, places, None)
        _in_context_of(device.index, cuda().cuLaunchKernel, *given)

    def _newly_loaded(self, index: int, cubin: bytes) -> ctypes.c_void_p:
        module, function, library = ctypes.c_void_p(), ctypes.c_void_p(), cuda()
        _in_context_of(index, library.cuModuleLoadData, ctypes.byref(module), cubin)
        found = (ctypes.byref(function), module, self._name)
        _in_context_of(index, library.cuModuleGetFunction, *found)
        shared = (_MAX_DYNAMIC_SHARED, self._shared_bytes)
        _in_context_of(index, library.cuFuncSetAttribute, function, *shared)
        return function


def tensor_map(x: Tensor, box: tuple[int, int]) -> Any:
    """Return the tensor map for boxes of (Y, Z) of a channels-last map (N, C, X, Y, Z).

    A box has 32 channels of one plane. Tensor maps are cached, because most maps have the same
    address in each step.
    """
    return _tensor_map(x.device.index or 0, x.data_ptr(), x.dtype, x.shape, x.stride(), box)


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    index: int,
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    box: tuple[int, int],
) -> Any:
    memory = (ctypes.c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT)
    n, c, *space = shape
    sizes = (c, *reversed(space), n)
    steps = (*reversed(stride[2:]), stride[0])
    bytes_apart, span = [], c * dtype.itemsize
    for size, step in zip(sizes[1:], steps, strict=True):
        # The stride of an axis with one voxel is arbitrary, but the driver requires multiples of 16
        # bytes.
        bytes_apart.append(step * dtype.itemsize if size > 1 else span)
        span = size * bytes_apart[-1]
    box_y, box_z = box
    _in_context_of(
        index,
        cuda().cuTensorMapEncodeTiled,
        ctypes.byref(made),
        _MAP_TYPES[dtype],
        len(sizes),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 5)(*sizes),
        (ctypes.c_uint64 * 4)(*bytes_apart),
        (ctypes.c_uint32 * 5)(_MAP_CHANNELS, box_z, box_y, 1, 1),
        (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1),
        *_MAP_OPTIONS,
    )
    return made


@functools.cache
def cuda() -> Any:
    """Return the driver as a ctypes library; OSError: there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _driver_version() -> int:
    version = ctypes.c_int()
    _check(cuda().cuDriverGetVersion(ctypes.byref(version)))
    return version.value


@functools.cache
def _context(index: int) -> ctypes.c_void_p:
    """Return PyTorch's context on a GPU."""
    context, device, library = ctypes.c_void_p(), ctypes.c_int(), cuda()
    _check(library.cuInit(0))
    _check(library.cuDeviceGet(ctypes.byref(device), index))
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


def _in_context_of(index: int, function: Callable[..., int], *arguments: Any) -> None:
    """Call a function of the driver with a GPU's context as the thread's current one.

    A thread of autograd may have no context. If one stayed current, PyTorch would take it for its
    own.
    """
    library = cuda()
    _check(library.cuCtxPushCurrent_v2(_context(index)))
    try:
        _check(function(*arguments))
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _check(code: int) -> None:
    """Raise an error for an error code of the driver."""
    if code != 0:
        text = ctypes.c_char_p()
        cuda().cuGetErrorString(code, ctypes.byref(text))
        kind = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA's driver says: {(text.value or b'error').decode()} ({code})")
