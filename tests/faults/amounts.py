"""How many faults are tried: few with all other tests, many with ``make faults``."""

import os
import random

NUM_FAULTS = int(os.environ.get("UNET3D_FAULTS", "1"))
"""Kills at random moments; the other numbers follow from it."""

FIRST_SEED = int(os.environ.get("UNET3D_FAULTS_SEED", "0"))
"""Of the random choices. Each seed is a test, so a failure names the seed that repeats it."""


def seeds(share: float = 1.0) -> range:
    """Return a seed for each try.

    Args:
        share: How many tries there are, as a share of the kills.
    """
    return range(FIRST_SEED, FIRST_SEED + max(1, round(NUM_FAULTS * share)))


def chance(seed: int) -> random.Random:
    """Return where the random choices of one try come from."""
    return random.Random(seed)
