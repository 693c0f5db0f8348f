"""Whether Triton can be used for a tensor; the first question on a GPU imports Triton."""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_fake_device

logger = logging.getLogger(__name__)

FAST_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types for which the kernels compute in float32."""

_other_ranks_can = True


def triton_available(x: Tensor) -> bool:
    """Return whether Triton can compile for a tensor's device, in all ranks that have agreed.

    A fake device is assumed to have Triton.
    """
    return is_fake_device(x.device) or (x.is_cuda and _other_ranks_can and works())


@functools.cache
def works() -> bool:
    """Return whether Triton can compile here; if not, warn once that training is slower."""
    try:
        from unet3d.kernels.norm.launch import merge  # every network needs it

        _, rstd, _ = merge(torch.ones(16, 4, 1, 32, device="cuda"), 16, 0.0)
        if rstd.tolist() != [[1.0] * 32]:
            raise RuntimeError(f"a Triton kernel ran but returned {rstd.tolist()}")
    except Exception as error:  # missing compiler, driver or package: Triton raises any type
        logger.warning(
            "Triton cannot compile here, so training is several times slower: %s",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True


def agree(devices: Sequence[torch.device], exchange: Callable[[bool], Sequence[bool]]) -> None:
    """Let all ranks use the kernels, or none; a collective call with this rank's devices.

    Kernels and plain operations send sums of different shapes, so all ranks must use the same.
    ``exchange`` maps this rank's answer to the answers of all ranks.
    """
    global _other_ranks_can
    own = True
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        with torch.cuda.device(gpus[0]):
            own = works()
    _other_ranks_can = all_ranks_can(
        own,
        exchange,
        "Triton cannot compile in rank %d, so training is several times slower in all ranks",
    )


def all_ranks_can(own: bool, exchange: Callable[[bool], Sequence[bool]], otherwise: str) -> bool:
    """Return whether all ranks can.

    If this rank can but others cannot, log ``otherwise`` with the first that cannot.
    """
    answers = exchange(own)
    if own and not all(answers):
        logger.warning(otherwise, list(answers).index(False))
    return all(answers)
