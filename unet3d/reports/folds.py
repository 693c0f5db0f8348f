"""The Dice of several folds as a table."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unet3d.reports.format import NOTHING

MAX_FOLDS = 6
"""Of more folds only the mean and the spread are shown, so that a line fits 80 columns."""


def folds_table(summary: Mapping[str, Any]) -> Table:
    """Return the Dice of each label as each fold's final network segments its validation cases.

    Where no fold has these scores they are those of the last validation in training.

    Args:
        summary: What ``summary.json`` over folds holds.
    """
    folds: Mapping[str, Mapping[str, Any]] = summary["folds"]
    kind = "final" if summary["final_mean_dice"]["num_folds"] else "last"
    best = summary["best_dice"]["mean"]
    table = Table(
        title=f"Validation Dice of {len(folds)} folds",
        caption=f"in training, mean of the best networks: {_score(best)}",
        box=box.SIMPLE_HEAD,
    )
    shown = list(folds) if len(folds) <= MAX_FOLDS else []
    table.add_column("label")
    for name in (*(f"fold {fold}" for fold in shown), "mean", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    labels: Mapping[str, Mapping[str, Any]] = summary[f"{kind}_dice"]
    for number, (label, spread) in enumerate(labels.items(), start=1):
        dice = [(folds[fold][f"{kind}_dice"] or {}).get(label) for fold in shown]
        _add(table, label, dice, spread, ends=number == len(labels))
    means = [folds[fold][f"{kind}_mean_dice"] for fold in shown]
    _add(table, "mean", means, summary[f"{kind}_mean_dice"], ends=False)
    return table


def _add(
    table: Table, label: str, dice: list[float | None], spread: Mapping[str, Any], ends: bool
) -> None:
    values = (*dice, spread["mean"], spread["standard_deviation"])
    table.add_row(Text(label), *map(_score, values), end_section=ends)  # no markup


def _score(dice: float | None) -> str:
    return NOTHING if dice is None else f"{dice:.3f}"
