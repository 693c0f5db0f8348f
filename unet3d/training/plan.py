"""The plan of a training run: network, devices and folder, decided once.

:meth:`Plan.of` reads the settings and fills in values that depend on devices or initial weights,
and :meth:`Plan.placed` replaces mode ``auto``. The command line, the folds, ``unet3d plan`` and the
Python interface use the result unchanged. Only values that depend on the data are still open;
:attr:`Plan.network` plans them from headers alone.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unet3d.config import Config
from unet3d.distributed.group import Group
from unet3d.distributed.ranks import Ranks
from unet3d.errors import ConfigError, DeviceError
from unet3d.inputs.plain_data import validated
from unet3d.model import Topology
from unet3d.parallel import ParallelDims
from unet3d.planning.auto_settings import suited_to
from unet3d.planning.network_plan import NetworkPlan, plan_notes, plan_without_data
from unet3d.planning.placements import choose_mode, dims_of, memory_of
from unet3d.planning.step_size import within_gpus
from unet3d.planning.step_time import long_on_cpu
from unet3d.runs.run_folder import RunFolder, make_run
from unet3d.training.initialising import network_to_begin_with
from unet3d.training.request import Request, dataset_name, run_to_resume, settings_of

logger = logging.getLogger(__name__)


MAX_NAME_LETTERS = 50
"""Most letters of the data set's name in a run's name; file systems allow 255 bytes in all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a training run, except for what depends on its data."""

    config: Config
    """Every setting."""
    dims: ParallelDims
    """Devices, replicas, stages and slabs, as this process sees them."""
    architecture: Topology | None = None
    """The network of ``training.init``; None: one is planned for the data."""
    notes: tuple[str, ...] = ()
    """Lines for the user that explain decisions."""

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
        """Return the plan for a request, with mode ``auto`` still undecided.

        ``old_run`` is the run to continue. With ``is_described`` the devices need not exist; then
        each GPU has ``gpu_bytes`` of memory.
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

        Under torchrun with several ranks, mode ``none`` is treated like ``auto``: the setting comes
        from a run in a single process.
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
        """Return lines for the user on the choice of patch and batch."""
        settled = self.network.settled(self.config)
        notes = plan_notes(self.config, self.network)
        with suppress(DeviceError):  # mode auto may choose fewer slabs
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A plan and the folder of its files."""

    plan: Plan
    folder: RunFolder
    """The run's files."""
    resume: bool
    """Whether to continue from the folder's latest checkpoint."""


def choose_run(request: Request, group: Group) -> Run:
    """Return the run that all ranks train; only the first rank needs the files of an old run."""

    def to_plain(run: Run) -> dict[str, Any]:
        path, is_made = str(run.folder.path), run.folder.is_made
        return {"plan": run.plan.to_plain(), "path": path, "made": is_made, "resume": run.resume}

    def from_plain(values: Mapping[str, Any]) -> Run:
        return Run(
            plan=Plan.from_plain(values["plan"], group.ranks),
            folder=RunFolder(Path(values["path"]), is_made=values["made"]),
            resume=values["resume"],
        )

    run = group.from_first(
        lambda: _choose_run(request, group), to_plain=to_plain, from_plain=from_plain
    )
    for note in run.plan.notes:
        logger.info("%s", note)
    return run


def _choose_run(request: Request, group: Group) -> Run:
    old_run = None
    if request.resume:
        old_run = run_to_resume(request)
    plan = Plan.of(request, group.ranks, old_run=old_run).placed(group.ranks)
    if old_run is not None:
        is_saved = old_run.latest.exists()
        if not is_saved:
            logger.warning(
                "%s was stopped before its first checkpoint; it starts over", old_run.path
            )
        return Run(plan=plan, folder=old_run, resume=is_saved)
    may_be_restarted = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") > "0"
    if group.size > 1 and request.output is None and may_be_restarted:
        raise ConfigError(
            "torchrun may restart the ranks, which then must find the run again; name its "
            "folder with --output, or use torchrun --max-restarts 0"
        )
    if request.output is None:
        return Run(plan=plan, folder=make_run(run_name(plan.config)), resume=False)
    folder = RunFolder(request.output)
    has_begun = group.has_begun(str(folder.path))
    return Run(plan=plan, folder=folder, resume=has_begun and folder.latest.exists())


def run_name(config: Config, folds: str | None = None) -> str:
    """Return the name of a new run: data set, fold and time; ``folds`` names several."""
    name = dataset_name(config)[:MAX_NAME_LETTERS]
    fold = config.data.fold
    folds = folds or ("every-case" if fold == "none" else f"fold{fold}")
    return f"{name}-{folds}-{time.strftime('%Y%m%d-%H%M%S')}"
