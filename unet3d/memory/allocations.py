"""Predicting a device's allocations by running the real code on fake tensors.

A fake tensor has a shape, a type and a device but no memory; the code that runs on it computes
nothing and allocates nothing, but creates and frees the same tensors. So the count is always up to
date with the code, and takes seconds for volumes of any size on a machine without a GPU.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.interruption import postponed_interruption
from unet3d.memory.fake_devices import is_fake_device
from unet3d.memory.fake_results import FakeResults
from unet3d.torch_private import (
    FakeTensor,
    FakeTensorMode,
    storage_key,
    suggest_memory_format,
    without_functions,
)

ROUNDING_BYTES = 512
"""CUDA's allocator rounds requests up to a multiple of this."""

UNCOUNTED_BYTES = 1024**3
"""Memory that a GPU needs besides tensors: the CUDA context (0.7 GiB on an H200), cuDNN's work
space where it raises the peak, and gaps between tensors."""

WORKSPACE_BYTES = 32 * 1024**2
"""Size of cuBLAS's workspace on a Hopper GPU, for each thread."""

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class AllocationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of every tensor that is made while it is active."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = FakeResults(mode)
        self.now: dict[torch.device, int] = defaultdict(int)
        """Bytes in use, per device."""
        self.peak: dict[torch.device, int] = defaultdict(int)
        """Peak of the bytes in use, per device."""
        self._alive: dict[int, int] = {}
        self.workspace_bytes: dict[torch.device, int] = defaultdict(int)
        """Workspaces that libraries keep from their first call on, per device."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count the memory of its results, unless they share older memory."""
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].device
        # What the recorder runs is not part of the step, so torch function modes are off for it.
        with without_functions():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        results = self._results.run(func, args, kwargs)
        if func in _CONVOLUTIONS:
            results = _as_cudnn(func, args, results)
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor):
                self._count(result)
        if func in _CONVOLUTIONS:
            self._count_conversions(func, args, results)
        elif func in _PRODUCTS:
            # cuBLAS has a workspace in two threads, because backward has a thread of its own. A GPU
            # before Hopper takes a quarter (``getChosenWorkspaceSize`` of PyTorch).
            device = args[-1].device
            if is_fake_device(device):
                self.workspace_bytes[device] = 2 * WORKSPACE_BYTES
        return results

    def _count_conversions(self, func: Any, args: tuple[Any, ...], results: Any) -> None:
        """Count the copies of input and result that cuDNN makes in float32 convolutions.

        Measured on H200s: without them the predictions are up to a fifth too low there.
        """
        is_forward = func is torch.ops.aten.convolution.default
        source, other = (args[0], results) if is_forward else (args[1], args[0])
        device = source.device
        if is_fake_device(device) and source.dtype == torch.float32:
            moment = self.now[device] + source.nbytes + other.nbytes
            self.peak[device] = max(self.peak[device], moment)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, device = storage_key(tensor), tensor.device
        if key in self._alive:
            return
        self._alive[key] = 0
        self.resized(tensor)
        weakref.finalize(storage, self._drop, key, device)

    def resized(self, tensor: Tensor) -> None:
        """Note that a counted tensor's memory grew or shrank, which no operation reports."""
        storage, device = tensor.untyped_storage(), tensor.device
        rounded = -(-storage.nbytes() // ROUNDING_BYTES) * ROUNDING_BYTES
        self._resize(storage_key(tensor), device, rounded)
        self.peak[device] = max(self.peak[device], self.now[device])

    def _resize(self, key: int, device: torch.device, size: int) -> None:
        self.now[device] += size - self._alive[key]
        self._alive[key] = size

    def _drop(self, key: int, device: torch.device) -> None:
        self._resize(key, device, 0)
        del self._alive[key]


def _as_cudnn(func: Any, args: tuple[Any, ...], results: Any) -> Any:
    """Return results of a convolution in the memory format that cuDNN gives them.

    It is channels-last if the input or the weight is. For fake devices PyTorch instead decides by
    this machine's CPU: without AVX-512, bfloat16 convolutions return channels-first results.
    """
    is_forward = func is torch.ops.aten.convolution.default
    source, weight = args[:2] if is_forward else args[1:3]
    if not is_fake_device(source.device) or source.dtype == torch.float64 or source.dim() != 5:
        return results
    is_last = any(suggest_memory_format(one) is torch.channels_last_3d for one in (source, weight))
    format_ = torch.channels_last_3d if is_last else torch.contiguous_format

    def laid_out(result: Tensor | None) -> Tensor | None:
        if result is None or result.dim() != 5:
            return result
        return result.contiguous(memory_format=format_)

    return laid_out(results) if is_forward else tuple(map(laid_out, results))


class _AutocastOfGpu(TorchFunctionMode):
    """Makes autocast treat fake devices as it treats CUDA tensors.

    Autocast has one list of operations for each kind of device. For the operations of our networks,
    the lists differ twice: ``group_norm`` runs in float32 on CUDA, ``avg_pool3d`` on a CPU.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function as autocast would on a GPU, if its tensors stand for GPU tensors."""
        kwargs = kwargs or {}
        differs = func in (F.group_norm, F.avg_pool3d) and is_fake_device(args[0].device)
        if not differs or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if func is F.group_norm:
            args = (args[0].float(), *args[1:])
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


@contextmanager
def counted_allocations(with_autocast: bool = True) -> Iterator[AllocationRecorder]:
    """Make every tensor in the context fake, and count them.

    Real CPU tensors from outside may be read and moved in the context. Interrupts are deferred to
    its end. Without ``with_autocast`` it is faster, but autocast must be off.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # a second cache would only cost time and memory
    autocast = _AutocastOfGpu() if with_autocast else nullcontext()
    with postponed_interruption(), mode, autocast, AllocationRecorder(mode) as recorder:
        yield recorder


def make_parameters_fake(module: nn.Module) -> None:
    """Replace real parameters and all buffers, within :func:`counted_allocations`.

    PyTorch computes single numbers, such as the counter of a batch norm, on the real CPU. So
    buffers are created on the device of the parameters beside them.
    """
    for part in module.modules():
        device = next((own.device for own in part.parameters(recurse=False)), None)
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, FakeTensor):
                part._parameters[name] = nn.Parameter(torch.empty_like(parameter))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                place = device or buffer.device
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=place)
