"""Kernels as PyTorch operations.

Modules of kernels are imported at their first call, so memory can be predicted without Triton.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch


def operation(
    name: str,
    signature: str,
    run: str | Callable[..., Any],
    fake: Callable[..., Any],
    devices: str | Sequence[str] = "cuda",
) -> Any:
    """Define the operation ``unet3d::name``, without a gradient, and return it.

    On ``devices`` it calls ``run``. A function that launches kernels is given by its name, relative
    to this folder, so that its module is imported at the first call. ``fake`` takes the same
    arguments and returns the memory of the results. PyTorch's ``custom_op`` adds checks to
    every call that take longer than a small kernel.
    """

    @functools.cache
    def launching() -> Callable[..., Any]:
        module, _, function = f"unet3d.kernels.{run}".rpartition(".")
        launch: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return launch

    def launched(*tensors: Any, **options: Any) -> Any:
        return launching()(*tensors, **options)

    torch.library.define(f"unet3d::{name}", signature)
    torch.library.impl(f"unet3d::{name}", devices)(run if callable(run) else launched)
    torch.library.register_fake(f"unet3d::{name}")(fake)
    return getattr(torch.ops.unet3d, name).default
