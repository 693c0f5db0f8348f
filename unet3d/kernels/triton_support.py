"""Whether Triton's kernels can be used for a tensor."""

import functools
import logging

from torch import Tensor

from unet3d.kernels.norm import op as norm_op
from unet3d.memory.fake_devices import is_fake_device

logger = logging.getLogger(__name__)


def triton_available(x: Tensor) -> bool:
    """Return whether Triton can compile for the device of a tensor.

    Args:
        x: What stands for a GPU that is elsewhere is taken to have what it needs.
    """
    return is_fake_device(x.device) or (x.is_cuda and works())


@functools.cache
def works() -> bool:
    """Return whether Triton can compile here; if not, say once why training is slower."""
    try:
        norm_op.probe()
    except Exception as error:  # a missing compiler, driver or package: Triton raises anything
        logger.warning(
            "Triton cannot compile here, so training is several times slower: %s",
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return False
    return True
