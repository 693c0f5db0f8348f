"""What ranks were started for, which decides what a user can do when one of them is lost."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What several ranks do together."""

    name: str
    """The same in a message: ``the other ranks of this training``."""
    after_loss: str
    """What to do when a rank was killed."""
    after_silence: str
    """What to do when a rank hangs."""
    stop_seconds: float
    """Time for ranks that are asked to stop, before they are killed."""


TRAINING = Purpose(
    name="training",
    after_loss="--resume continues the run",
    after_silence="--resume continues the run, parallel.timeout_seconds waits longer",
    stop_seconds=120.0,  # in which they end their step and save
)

PREDICTION = Purpose(
    name="prediction",
    after_loss="give the same command again",
    after_silence="give the same command again",
    stop_seconds=10.0,  # nothing needs to be saved
)
