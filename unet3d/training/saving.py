"""The checkpoints of a run: when one is due, what it holds of a training, and reading it back."""

import logging
import time
from dataclasses import asdict, replace

import torch
from torch import is_tensor

from unet3d.errors import CheckpointError
from unet3d.inference.postprocessing import Rule
from unet3d.model.optimizer import Optimization
from unet3d.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from unet3d.training.context import RunContext
from unet3d.training.divergence import all_finite
from unet3d.training.state import TrainingState

logger = logging.getLogger(__name__)


class CheckpointSaver:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, context: RunContext, optimization: Optimization) -> None:
        """Start the time until the first checkpoint."""
        self._context = context
        self._folder, self._group = context.folder, context.group
        self._module = context.executor.module
        self._optimization = optimization
        self._saved_at = time.monotonic()
        self.postprocessing: tuple[Rule, ...] = ()
        """What the latest checkpoint says of components; of a network that is trained on, nothing
        is known."""

    def is_due(self) -> bool:
        """Return whether the latest checkpoint is as old as it may be; the first rank knows."""
        if not self._group.is_first:
            return False
        age = time.monotonic() - self._saved_at
        return age >= self._context.experiment.config.training.save_every_seconds

    def save(
        self,
        state: TrainingState,
        improved: bool = False,
        postprocessing: tuple[Rule, ...] = (),
    ) -> None:
        """Write the latest checkpoint in the first rank; the best so far is written as such first.

        ``postprocessing`` are the components that its predictions keep.
        """
        self.postprocessing = postprocessing
        if not self._group.is_first:
            return
        checkpoint = replace(self.checkpoint(state), postprocessing=postprocessing)
        if improved:
            save_checkpoint(checkpoint, self._folder.best)
        save_checkpoint(checkpoint, self._folder.latest)
        self._saved_at = time.monotonic()  # writing takes time, too

    def checkpoint(self, state: TrainingState) -> Checkpoint:
        """Return what a checkpoint holds now; its tensors are the network's own."""
        experiment = self._context.experiment
        return Checkpoint(
            topology=experiment.topology,
            preprocessing=experiment.preprocessing,
            patch_size=experiment.patch_size,
            config=experiment.config,
            split=experiment.split,
            model=self._module.state_dict(),
            training={
                "state": asdict(state),
                "random": torch.get_rng_state(),
                **self._optimization.state_dict(),
            },
        )

    def is_finite(self) -> bool:
        """Return whether all that would be saved is a number; this waits for the devices."""
        states = self._optimization.optimizer.state.values()
        tensors = [value for of_one in states for value in of_one.values() if is_tensor(value)]
        return all_finite([*self._module.state_dict().values(), *tensors])

    def load(self, num_steps: int) -> TrainingState:
        """Take up the latest checkpoint in all ranks, and return where it stands.

        An epoch has ``num_steps``, which may be fewer than before. Raises CheckpointError where
        the optimizer is another one, or weights are not finite.
        """
        path = self._folder.latest
        checkpoint = self._group.file_from_first(path, load_checkpoint)
        self._module.load_state_dict(checkpoint.model)
        self.postprocessing = checkpoint.postprocessing
        try:
            self._optimization.load_state_dict(checkpoint.training)
            torch.set_rng_state(checkpoint.training["random"])
            state = TrainingState.from_plain(checkpoint.training["state"])
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
        if not self.is_finite():
            raise CheckpointError(
                f"{path} holds weights that are not finite: its training has diverged; start a "
                "new run in another --output"
            )
        state.step = min(state.step, num_steps)
        logger.info("resumed after epoch %d, step %d", state.epoch, state.step)
        return state
