"""What is trained and on which devices, decided once.

:meth:`Plan.of` reads the settings, fills in what they leave open to devices and to weights to begin
with, and :meth:`Plan.placed` replaces mode ``auto``. The command line, the folds, ``unet3d plan``
and the Python interface take the result as it is; only what the data decide is still open in it,
and :attr:`Plan.network` tells that from headers alone.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.config import Config, ParallelSettings, load_config
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.inputs.plain_data import validated
from unet3d.model import Topology
from unet3d.parallel import ParallelDims
from unet3d.planning.auto_settings import suited_to
from unet3d.planning.network_plan import NetworkPlan, plan_notes, plan_without_data
from unet3d.planning.placements import choose_mode
from unet3d.planning.step_size import within_gpus
from unet3d.planning.step_time import long_on_cpu
from unet3d.planning.ways import dims_of, memory_of
from unet3d.runs.finding import dataset_of, described_in, newest_run, recorded_folds
from unet3d.runs.run_folder import RUNS, RunFolder
from unet3d.training.initialising import network_to_begin_with

logger = logging.getLogger(__name__)

PLACEMENT = ("parallel.mode", "parallel.devices")
"""Settings with which a run that goes on is placed anew."""

KEPT = {"devices", "timeout_seconds", "max_restarts"}
"""Settings of the section ``parallel`` that it then keeps."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user says of a run."""

    config_path: Path | None = None
    """A configuration file; None: the defaults, or where a run is continued, its own."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from it: dotted key to value."""
    output: Path | None = None
    """The run's folder; None: a new one below ``runs/``, or the newest to continue."""
    resume: bool = False
    """Whether to continue a run."""


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
        config = _settings(request, old_run)
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


def run_to_resume(request: Request, over_folds: bool = False) -> RunFolder:
    """Return the run to continue: that of a folder, or else the newest of the data set.

    It may be one over several folds, and must be with ``over_folds``. One that was killed before
    its first checkpoint counts, as its settings are there.
    """
    if "training.init" in request.changes:
        raise ConfigError(
            "training.init begins a new run, and --resume continues one; leave one out"
        )
    named = {key: value for key, value in request.changes.items() if key == "data.dataset"}
    dataset = load_config(request.config_path, named).data.dataset

    def suits(run: RunFolder) -> bool:
        if over_folds and recorded_folds(run.path) is None:
            return False
        made_with = dataset_of(run)
        if dataset is None:
            return True
        return bool(made_with) and described_in(Path(made_with)) == described_in(dataset)

    run = newest_run(finished=False, suits=suits) if request.output is None else None
    if request.output is not None and RunFolder(request.output).config.is_file():
        run = RunFolder(request.output)
    if run is None and request.output is not None and RunFolder(request.output).checkpoint():
        raise ConfigError(
            f"{request.output} has a checkpoint, but no config.yaml to resume with; bring that "
            f"back, or begin a new run with its network: --init {request.output}"
        )
    if run is None:
        made_with = "" if request.output or dataset is None else f" that was made with {dataset}"
        raise ConfigError(
            f"there is no run to resume in {request.output or RUNS}{made_with}; name one with "
            "--output, or start one without --resume"
        )
    return run


def _settings(request: Request, old_run: RunFolder | None) -> Config:
    """Return the settings of a request, over those of the run that goes on."""
    if old_run is None:
        return load_config(request.config_path, request.changes)
    changes = dict(request.changes)
    if request.config_path is not None:
        changes = {**load_config(request.config_path).flat(only_set=True), **changes}
    if _is_moved(load_config(old_run.config).parallel, changes):
        # Replicas or cuts that were recorded might be refused with the new placement.
        default = ParallelSettings().model_dump(mode="json", exclude=KEPT)
        changes = {**{f"parallel.{key}": value for key, value in default.items()}, **changes}
    return load_config(old_run.config, changes)


def _is_moved(recorded: ParallelSettings, changes: Mapping[str, Any]) -> bool:
    """Return whether changes place a training otherwise than it is recorded."""
    named = {key: changes[key] for key in PLACEMENT if key in changes}
    wanted = load_config(None, named).parallel
    return any(
        getattr(wanted, key) != getattr(recorded, key)
        for key in ("mode", "devices")
        if f"parallel.{key}" in named
    )
