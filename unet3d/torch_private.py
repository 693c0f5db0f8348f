"""Private names of PyTorch that this package uses, and what each replaces.

A new version of PyTorch may change any of it, so it is used here only.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.distributed_c10d import PrefixStore as PrefixStore
from torch.distributed.distributed_c10d import Store as Store
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.modules.dropout import _DropoutNd

# `FakeTensorMode` replaces meta tensors, which have no device; `suggest_memory_format` replaces a
# comparison of strides. `Store` and `PrefixStore` are public, but mypy finds them only here.


def storage_key(tensor: Tensor) -> int:
    """Return a key that tensors with the same memory share while one of them lives.

    The public alternative is the address, but fake tensors have none.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


_OWN_HOLDERS = 1 if torch.torch_version.TorchVersion(torch.__version__) >= "2.13" else 2
"""Use count of a gradient that only its own backward function has; before PyTorch 2.13 the Python
object counts, too."""


def is_held_elsewhere(gradient: Tensor) -> bool:
    """Return whether a gradient has other holders, to which autograd has passed it, too.

    Without this check, every gradient would have to be copied.
    """
    return gradient._use_count() > _OWN_HOLDERS  # type: ignore[attr-defined, no-any-return]


def version(tensor: Tensor) -> int | None:
    """Return a counter of in-place changes, without copying a tensor; None: an inference tensor."""
    return None if tensor.is_inference() else tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view; publicly, only its errors show this."""
    return tensor._is_view()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors in one launch; public functions need one launch for each tensor."""
    torch._foreach_copy_(list(targets), list(sources))


def without_functions() -> AbstractContextManager[None]:
    """Return a context in which TorchFunctionMode intercepts nothing; there is no public one."""
    return torch._C.DisableTorchFunction()


def without_dispatch() -> AbstractContextManager[None]:
    """Return a context in which TorchDispatchMode intercepts nothing; there is no public one."""
    return torch._C._DisableTorchDispatch()


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation's arguments and results, without parsing its name."""
    return operation._schema


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks or pre-hooks; there is no public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_dropout(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules is a dropout, without listing the classes of dropouts."""
    return any(isinstance(module, _DropoutNd) for module in modules)


def x86_has_bfloat16() -> bool:
    """Return whether an x86 processor has AVX512-BF16 or AMX, without parsing ``/proc/cpuinfo``."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def mkldnn_has_bfloat16() -> bool:
    """Return whether oneDNN can use bfloat16 on this machine, without parsing ``/proc/cpuinfo``."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream, without starting a new process."""
    torch._C._cuda_clearCublasWorkspaces()


def set_timeout(timeout: timedelta) -> None:
    """Change the timeout of the default process group, without creating a second group."""
    _set_pg_timeout(timeout)
