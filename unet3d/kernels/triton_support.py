"""Whether Triton's kernels can be used for a tensor."""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_fake_device

logger = logging.getLogger(__name__)

_other_ranks_can = True


def triton_available(x: Tensor) -> bool:
    """Return whether Triton can compile for the device of a tensor, in all ranks that have agreed.

    A fake device is taken to have what its GPU needs.
    """
    return is_fake_device(x.device) or (x.is_cuda and _other_ranks_can and works())


@functools.cache
def works() -> bool:
    """Return whether Triton can compile here; if not, warn once that training is slower."""
    try:
        from unet3d.kernels.triton_probe import probe

        probe(torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # a missing compiler, driver or package: Triton raises anything
        logger.warning(
            "Triton cannot compile here, so training is several times slower: %s",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True


def agree(devices: Sequence[torch.device], exchange: Callable[[bool], Sequence[bool]]) -> None:
    """Let all ranks use the kernels, or none; all of them call it, each with its own devices.

    A kernel sends other sums than the plain operations that stand for it, so ranks which differ
    would gather unequal shapes. ``exchange`` maps this rank's answer to those of all ranks.
    """
    global _other_ranks_can
    own = True
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        with torch.cuda.device(gpus[0]):
            own = works()
    answers = exchange(own)
    _other_ranks_can = all(answers)
    if own and not _other_ranks_can:
        logger.warning(
            "Triton cannot compile in rank %d, so training is several times slower in all ranks",
            list(answers).index(False),
        )
