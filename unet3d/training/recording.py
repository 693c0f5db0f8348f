"""What a run's folder tells of a training beside its checkpoints; the first rank writes it."""

import time
from collections.abc import Mapping
from typing import Any

from unet3d.distributed.group import Group
from unet3d.parallel import Executor, ParallelDims
from unet3d.planning.experiment import Experiment
from unet3d.reports.curves import write_progress_picture
from unet3d.runs.run_folder import RunFolder, writing
from unet3d.training.data_record import data_record, dataset_name
from unet3d.training.final_result import FinalResult
from unet3d.training.metrics import ScalarFile, device_name, run_summary
from unet3d.training.state import TrainingState

DRAWING_SECONDS = 60.0
"""Age at which a picture of the progress is old; to draw one takes about a second."""


class RunRecorder:
    """Writes the files of one run; in all ranks but the first it writes nothing."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        executor: Executor,
        folder: RunFolder,
        precision: str,
        dims: ParallelDims,
        group: Group,
    ) -> None:
        """Write nothing yet.

        Args:
            experiment: Cases, preparation and settings.
            executor: The placed network.
            folder: Where the files go.
            precision: What the network computes in.
            dims: Replicas and shards.
            group: The ranks; all of them call this.
        """
        self.resumed_epoch: int | None = None
        """Complete epochs of the run that is continued; None: it is a new one."""
        self._experiment = experiment
        self._folder = folder
        self._precision = precision
        self._dims = dims
        self._group = group
        own_devices = [device_name(slot.device) for slot in executor.slots]
        self._devices = [name for names in group.exchange(own_devices) for name in names]
        self._scalars: ScalarFile | None = None
        self._next_drawing = 0.0

    def begin(self) -> None:
        """Make the folder ready, once.

        A run that is continued is left as it was until there is something to save: a change of
        its settings that fails in the first step must not stay in its ``config.yaml``.
        """
        if self._scalars is not None or not self._group.is_first:
            return
        if self.resumed_epoch is not None:
            self._folder.reopen(self.resumed_epoch)
        self._folder.write_data(data_record(self._experiment))
        self._folder.write_config(self._experiment.config)
        with writing(self._folder.tensorboard):
            self._scalars = ScalarFile(self._folder.tensorboard)

    def write_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Add the numbers of an epoch.

        Args:
            metrics: Its line of ``metrics.jsonl``.
        """
        if self._scalars is not None:
            self._folder.append_metrics(metrics)
            with writing(self._folder.tensorboard):
                self._scalars.write(metrics)

    def draw_progress(self, is_due: bool) -> None:
        """Draw the numbers of all epochs.

        Args:
            is_due: Whether to draw in any case. If not, the first epoch is drawn all the same, and
                any other at the end of which the picture is old.
        """
        now = time.monotonic()
        if not self._group.is_first or not (is_due or now >= self._next_drawing):
            return
        self._next_drawing = now + DRAWING_SECONDS
        path = self._folder.progress_picture
        with writing(path):
            write_progress_picture(self._folder.read_metrics(), self._title(), path)

    def _title(self) -> str:
        config, path = self._experiment.config, self._folder.path.absolute()
        fold = "every case" if config.data.fold == "none" else f"fold {config.data.fold}"
        is_one_of_several = path.name == fold.replace(" ", "")
        run = f"{path.parent.name}/{path.name}" if is_one_of_several else path.name
        return f"{run}: {fold} of {dataset_name(config)}"

    def write_summary(self, state: TrainingState, final: FinalResult) -> None:
        """Write what the training has come to.

        Args:
            state: At its end.
            final: What the final network makes of the validation cases.
        """
        if not self._group.is_first:
            return
        summary = run_summary(
            state,
            dims=self._dims,
            devices=self._devices,
            precision=self._precision,
            final=final,
        )
        self._folder.write_json(self._folder.summary, summary)
