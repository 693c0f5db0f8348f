"""What devices a machine has, and their names."""

import re
from dataclasses import dataclass

import torch

from unet3d.errors import DeviceError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What devices there are."""

    num_gpus: int
    """CUDA GPUs, numbered from 0."""
    is_real: bool = True
    """Whether missing devices are refused; a plan may be for another machine."""
    description: str = "the described machine"
    """Its devices as a phrase, for errors."""

    @classmethod
    def here(cls) -> "Machine":
        """Return this machine."""
        count = torch.cuda.device_count()
        gpus = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        description = f"cpu and {gpus}" if gpus else "cpu and no CUDA GPU"
        return cls(num_gpus=count, description=description)

    def device(self, name: str) -> torch.device:
        """Return a device by its name, such as ``0``, ``cuda:1`` or ``cpu``.

        Raises:
            DeviceError: The device is unknown or does not exist.
        """
        match = re.fullmatch(r"(?:cuda:)?(\d+)|(cpu)|(cuda)", name.strip())
        if match is None:
            raise DeviceError(f"device {name!r} is unknown; write 0, cuda:0 or cpu")
        if match[2]:
            return torch.device("cpu")
        index = int(match[1] or 0)
        if self.is_real and index >= self.num_gpus:
            raise DeviceError(
                f"device {name!r} does not exist; this machine has {self.description}"
            )
        return torch.device("cuda", index)
