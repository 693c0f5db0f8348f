"""The checkpoints of a run: when one is due, what it holds of a training, and reading it back."""

import logging
import time
from dataclasses import asdict

import torch

from unet3d.distributed.group import Group
from unet3d.errors import CheckpointError
from unet3d.model import BlockNetwork
from unet3d.model.optimizer import Optimization
from unet3d.planning.experiment import Experiment
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unet3d.runs.run_folder import RunFolder
from unet3d.training.state import TrainingState

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Writes and reads the checkpoints of one run."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        module: BlockNetwork,
        optimization: Optimization,
        folder: RunFolder,
        group: Group,
    ) -> None:
        """Start the time until the first checkpoint.

        Args:
            experiment: Network, preparation and settings, which a checkpoint holds too.
            module: The network; its parameters may be on any devices.
            optimization: Of its parameters.
            folder: Where the files are.
            group: The ranks; the first one writes and reads.
        """
        self._experiment = experiment
        self._module = module
        self._optimization = optimization
        self._folder = folder
        self._group = group
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        """Return whether the latest checkpoint is as old as it may be; the first rank knows."""
        if not self._group.is_first:
            return False
        age = time.monotonic() - self._saved_at
        return age >= self._experiment.config.training.save_every_seconds

    def save(self, state: TrainingState, improved: bool = False) -> None:
        """Write the latest checkpoint in the first rank.

        Args:
            state: Where the training stands.
            improved: Whether the network is the best so far; then it is written as such first.
        """
        if not self._group.is_first:
            return
        checkpoint = Checkpoint(
            topology=self._experiment.topology,
            preprocessing=self._experiment.preprocessing,
            patch_size=self._experiment.patch_size,
            config=self._experiment.config,
            model=self._module.state_dict(),
            training={
                "state": asdict(state),
                "random": torch.get_rng_state(),
                **self._optimization.state_dict(),
            },
        )
        if improved:
            save_checkpoint(checkpoint, self._folder.best)
        save_checkpoint(checkpoint, self._folder.latest)
        self._saved_at = time.monotonic()  # writing takes time, too

    def load(self) -> TrainingState:
        """Take up the latest checkpoint in all ranks, and return where it stands.

        Raises:
            CheckpointError: It is of another network or optimizer.
        """
        path = self._folder.latest
        checkpoint = self._group.file_from_first(path, load_checkpoint)
        if checkpoint.topology != self._experiment.topology:
            raise CheckpointError(
                f"{path} holds another network than the settings now ask for; "
                "resume with the settings of config.yaml, or start a new run in another --output"
            )
        if not checkpoint.training:
            raise CheckpointError(
                f"{path} holds a network but no training to continue; start a new run"
            )
        self._module.load_state_dict(checkpoint.model)
        try:
            self._optimization.load_state_dict(checkpoint.training)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is of another optimizer: {error}") from error
        torch.set_rng_state(checkpoint.training["random"])
        state = TrainingState(**checkpoint.training["state"])
        if self._group.is_first:
            self._folder.keep_metrics(state.epoch)
        logger.info("resumed after epoch %d, step %d", state.epoch, state.step)
        return state
