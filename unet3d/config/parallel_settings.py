"""The section of a configuration that says on which devices the network runs, and how."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from unet3d.config.values import NUMBER, Balance, CudaGraphs, Few, Name, Section
from unet3d.inputs.plain_data import at_most


class ParallelSettings(Section):
    """How the network is spread over devices."""

    mode: Literal["auto", "none", "data", "spatial", "model"] = "auto"
    """none: one device; data: a replica on each device; spatial: each volume in slabs over them;
    model: the layers of one network over them; auto: none on one device, else the fastest that
    fits."""
    devices: Annotated[tuple[Name, ...], Field(min_length=1), at_most(1024)] | None = None
    """Devices, such as 0,1 or cpu,0 or cuda:0; null: the first GPUs that the mode needs, or cpu.
    Under torchrun: those of each machine, divided over its ranks."""
    replicas: Annotated[int, Field(gt=0, le=1024, strict=True)] = 1
    """Modes model and spatial: groups of devices with a network each, into which the devices are
    divided in their order."""
    engine: Literal["ddp", "dataparallel"] = "ddp"
    """Mode data: DistributedDataParallel, a process for each device; or nn.DataParallel, a thread
    for each, which is slower."""
    output_device: Name | None = None
    """Engine dataparallel: where logits are gathered and targets sent; null: the first device."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7), NUMBER] = 600.0
    """Seconds of silence after which a rank counts as hanging, and training ends."""
    max_restarts: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 0
    """How often the ranks are started again, from the latest checkpoint, when one of them dies.
    Under torchrun its own --max-restarts counts."""
    schedule: Literal["1f1b", "all-forward"] = "1f1b"
    """When each micro-batch runs where. 1f1b: one forward, one backward in turn; all-forward: all
    forward, then all backward, which keeps the activations of all."""
    cuda_graphs: CudaGraphs = "auto"
    """auto: steps of small volumes on GPUs are captured as CUDA graphs and replayed, where there is
    memory for it; off: every step is launched."""
    balance: Balance | Literal["auto"] = "auto"
    """Where the network is cut in training. time, memory: so that the stages take equal time, or
    memory; encoder-decoder: between the two for two devices, about equal work for more; auto: the
    cut that ``plan --measure`` found best, else encoder-decoder."""
    cuts: Annotated[tuple[Few, ...], at_most(1024)] | None = None
    """Index of the block that each further stage begins with, such as 4,12; it overrules balance.
    null: as balance says."""

    @property
    def wanted_balance(self) -> Balance:
        """The balance that is set, or encoder-decoder if none is set."""
        return "encoder-decoder" if self.balance == "auto" else self.balance

    @field_validator("devices", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Accept ``0,1`` and 0 as names of devices, because YAML reads them as numbers."""
        if isinstance(value, str):
            value = value.split(",")
        elif isinstance(value, int):
            value = [value]
        if isinstance(value, list | tuple):
            return tuple(str(name).strip() for name in value)
        return value

    @field_validator("output_device", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """Accept ``off`` as a word, because YAML reads it as False."""
        return "off" if value is False else value

    @field_validator("cuts", mode="before")
    @classmethod
    def _one_cut(cls, value: Any) -> Any:
        """Accept a single number as the one cut between two devices."""
        return (value,) if isinstance(value, int) and not isinstance(value, bool) else value
