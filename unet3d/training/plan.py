"""What is trained and on which devices, decided once.

:meth:`Plan.of` reads the settings, fills in what they leave open to devices and to weights to begin
with, and :meth:`Plan.placed` replaces mode ``auto``. The command line, the folds, ``unet3d plan``
and the Python interface take the result as it is; only what the data decide is still open in it,
and :attr:`Plan.network` tells that from headers alone.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from unet3d.config import Config
from unet3d.distributed.ranks import Ranks
from unet3d.errors import DeviceError
from unet3d.inputs.plain_data import validated
from unet3d.model import Topology
from unet3d.parallel import ParallelDims
from unet3d.planning.auto_settings import suited_to
from unet3d.planning.network_plan import NetworkPlan, plan_notes, plan_without_data
from unet3d.planning.placements import choose_mode
from unet3d.planning.step_size import within_gpus
from unet3d.planning.step_time import long_on_cpu
from unet3d.planning.ways import dims_of, memory_of
from unet3d.runs.run_folder import RunFolder
from unet3d.training.initialising import network_to_begin_with
from unet3d.training.request import Request, settings_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training that is decided, but for what its data decide."""

    config: Config
    """Every setting."""
    dims: ParallelDims
    """Devices, replicas, stages and slabs, as this process sees them."""
    architecture: Topology | None = None
    """The network that it begins with; None: one is planned for the data."""
    notes: tuple[str, ...] = ()
    """What was decided, in lines for the user."""

    @classmethod
    def of(
        cls,
        request: Request,
        ranks: Ranks | None = None,
        *,
        old_run: RunFolder | None = None,
        is_described: bool = False,
        gpu_bytes: int | None = None,
    ) -> "Plan":
        """Decide what a request leaves open, but mode ``auto``.

        ``old_run`` is the run that goes on. The devices of a described machine need not exist, with
        ``gpu_bytes`` of memory in each GPU.
        """
        config = settings_of(request, old_run)
        if is_described:
            dims = dims_of(config.parallel, gpu_bytes)
        else:
            dims = ParallelDims.resolve(config.parallel, ranks=ranks)
        config, note = suited_to(config, dims.all_devices)
        config, architecture = network_to_begin_with(config, old_run)
        gpus = [device for device in dims.all_devices if device.type == "cuda"]
        config = within_gpus(config, memory_of(gpus, gpu_bytes).values())
        notes = () if note is None else (note,)
        return cls(config=config, dims=dims, architecture=architecture, notes=notes)

    def placed(self, ranks: Ranks | None = None) -> "Plan":
        """Return the plan with a parallel mode in place of ``auto``, the fastest that fits.

        Several ranks that torchrun has started take mode ``none`` for ``auto``: it is that of a run
        which one process has trained.
        """
        config, has_ranks = self.config, ranks is not None and ranks.world_size > 1
        mode = config.parallel.mode
        if mode != "auto" and not (has_ranks and mode == "none"):
            return self
        if not has_ranks and len(self.dims.all_devices) == 1:
            return replace(self, config=config.with_values({"parallel.mode": "none"}))
        network = plan_without_data(config, config.parallel.replicas, self.architecture)
        chosen, line = choose_mode(config, network, ranks if has_ranks else None)
        return replace(
            self.on(chosen.mode, chosen.devices, chosen.replicas, ranks),
            notes=(*self.notes, line),
        )

    def on(
        self,
        mode: str,
        devices: Sequence[str] | None,
        replicas: int = 1,
        ranks: Ranks | None = None,
    ) -> "Plan":
        """Return the plan with another mode and other devices."""
        values = {"mode": mode, "devices": devices, "replicas": replicas}
        config = self.config.with_values({f"parallel.{k}": v for k, v in values.items()})
        return replace(self, config=config, dims=ParallelDims.resolve(config.parallel, ranks=ranks))

    @cached_property
    def network(self) -> NetworkPlan:
        """Patch, batch and network, planned from the headers of the data set."""
        return plan_without_data(self.config, self.dims.num_replicas, self.architecture)

    def network_notes(self) -> list[str]:
        """Return what was made of patch and batch, in lines for the user."""
        settled = self.network.settled(self.config)
        notes = plan_notes(self.config, self.network)
        with suppress(DeviceError):  # of mode auto: so many slabs may not be what it will take
            long = long_on_cpu(self.network.step(settled, self.dims, "float32"))
            notes += [long] if long else []
        return notes

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as a rank sends it to the others."""
        return {
            "config": self.config.model_dump(mode="json"),
            "architecture": self.architecture and self.architecture.to_dict(),
            "notes": self.notes,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], ranks: Ranks) -> "Plan":
        """Return the plan of another rank, with the devices of this one."""
        config = Config.from_plain(values["config"])
        dims = ParallelDims.resolve(config.parallel, ranks=ranks)
        architecture = values["architecture"] and validated(Topology, values["architecture"])
        notes = tuple(values["notes"])
        return cls(config=config, dims=dims, architecture=architecture, notes=notes)
