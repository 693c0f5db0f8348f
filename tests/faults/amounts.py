"""How many faults are tried: one of each kind by day, as many as are asked for at night."""

import os

import pytest

NUM_FAULTS = int(os.environ.get("UNET3D_FAULTS", "7"))
"""Kills at random moments; the other numbers follow from it."""

FIRST_SEED = int(os.environ.get("UNET3D_FAULTS_SEED", "0"))
"""Of the random choices. Each seed is a test, so a failure names the seed that repeats it."""


def seeds(share=1.0):
    """Return a seed for each try, a share of the kills; only the first is tried by day."""
    first, *others = range(FIRST_SEED, FIRST_SEED + max(1, round(NUM_FAULTS * share)))
    return [first, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in others)]
