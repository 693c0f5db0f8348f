"""The names of files in a model of nnU-Net."""

PLANS = "plans.json"
DATASET = "dataset.json"

SUFFIX = ".pth"
"""Ends the names that nnU-Net gives to checkpoints, and we do not."""

FINAL = f"checkpoint_final{SUFFIX}"
"""What a training of nnU-Net ends with, and what it predicts with."""

ALL = "all"
"""The fold that is trained on every case."""


def fold_folder(fold: int | str) -> str:
    """Return the name of the folder of a fold.

    Args:
        fold: Its number, or :data:`ALL`.
    """
    return f"fold_{fold}"
