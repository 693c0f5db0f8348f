"""How many faults to try: by day one of each kind, at night as many as the environment says."""

import os

import pytest

NUM_FAULTS = int(os.environ.get("UNET3D_FAULTS", "7"))
"""Number of kills at random moments; the numbers of other faults follow from it."""

FIRST_SEED = int(os.environ.get("UNET3D_FAULTS_SEED", "0"))
"""First seed of the random choices.

Each seed is a test, so a failure names the seed that repeats it.
"""


def seeds(share=1.0):
    """Return a seed for each of ``share`` times as many tries as kills; by day only the first."""
    first, *others = range(FIRST_SEED, FIRST_SEED + max(1, round(NUM_FAULTS * share)))
    return [first, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in others)]
