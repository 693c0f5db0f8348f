"""Whether Triton's kernels can be used for a tensor."""

import functools
import logging

import torch
from torch import Tensor

from unet3d.memory.fake_devices import is_fake_device

logger = logging.getLogger(__name__)


def triton_available(x: Tensor) -> bool:
    """Return whether Triton can compile for the device of a tensor.

    Args:
        x: Any tensor; a fake device is taken to have what its GPU needs.
    """
    return is_fake_device(x.device) or (x.is_cuda and works())


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
