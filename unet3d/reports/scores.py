"""Scores as tables for the terminal: of an evaluation, and of several folds."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from unet3d.errors import some
from unet3d.images.units import Units
from unet3d.inference.evaluation import Evaluation
from unet3d.inference.label_scores import LabelScore
from unet3d.reports.format import score

MAX_FOLDS = 6
"""Of more folds only the mean and the spread are shown, so that a line fits 80 columns."""


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the scores of each case, and their means."""
    units = evaluation.units
    table = Table(
        title="Segmentations compared with labels",
        caption=f"Mean Dice over the labels: {score(evaluation.mean_dice, 4)}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case")
    table.add_column("label", justify="right")
    nsd = f"NSD\n({units.length_text(evaluation.tolerance_mm)})"
    volumes = (f"{whose}\n({units.volume})" for whose in ("segmented", "labelled"))
    for name in ("Dice", f"HD95\n({units.length})", nsd, *volumes):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(case.name, case.scores) for case in evaluation.cases]
    if len(rows) > 1:
        means = {label: evaluation.mean(label) for label in evaluation.labels}
        rows.append((f"mean of {len(rows)} cases", means))
    for name, scores in rows:
        named = [(evaluation.name_of(label), score) for label, score in scores.items()]
        _add_scores(table, name, named, units)
    return table


def _add_scores(
    table: Table, name: str, scores: Sequence[tuple[str, LabelScore]], units: Units
) -> None:
    for index, (label, one) in enumerate(scores):
        table.add_row(
            Text(name if index == 0 else ""),  # no markup
            Text(label),
            score(one.dice, 4),
            score(None if one.hd95_mm is None else one.hd95_mm / units.mm, 2),
            score(one.nsd, 4),
            f"{one.prediction_ml / units.ml:,.3f}",
            f"{one.label_ml / units.ml:,.3f}",
            end_section=index == len(scores) - 1,
        )


def evaluation_lines(evaluation: Evaluation, is_default_tolerance: bool) -> list[str]:
    """Return what else there is to say: how near counts, and what had no partner, a line each."""
    lines = []
    if is_default_tolerance and evaluation.units.is_microscopic:
        near = evaluation.units.length_text(evaluation.tolerance_mm)
        lines.append(
            f"NSD counts surfaces within {near}, twice the spacing; --tolerance-mm sets it"
        )
    num_pairs = len(evaluation.cases)
    for without, what, partner in (
        (evaluation.without_prediction, "label maps", "segmentation"),
        (evaluation.without_label, "segmentations", "label map"),
    ):
        if without:
            lines.append(
                f"{len(without)} of the {num_pairs + len(without)} {what} have no {partner} and do "
                f"not count: {some(without)}"
            )
    return lines


def folds_table(summary: Mapping[str, Any]) -> Table:
    """Return the Dice of each label in each fold, of the ``summary.json`` over folds.

    It is that of the validation cases as each fold's final network segments them.
    """
    folds: Mapping[str, Mapping[str, Any]] = summary["folds"]
    table = Table(
        title=f"Validation Dice of {len(folds)} folds",
        caption=f"in training, mean of the best networks: {score(summary['best_dice']['mean'])}",
        box=box.SIMPLE_HEAD,
    )
    shown = list(folds) if len(folds) <= MAX_FOLDS else []
    table.add_column("label")
    for name in (*(f"fold {fold}" for fold in shown), "mean", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [
        (label, [(folds[fold]["final_dice"] or {}).get(label) for fold in shown], spread)
        for label, spread in summary["final_dice"].items()
    ]
    means = [folds[fold]["final_mean_dice"] for fold in shown]
    rows.append(("mean", means, summary["final_mean_dice"]))
    for number, (label, dice, spread) in enumerate(rows, start=1):
        values = (*dice, spread["mean"], spread["standard_deviation"])
        ends = number == len(rows) - 1
        table.add_row(Text(label), *map(score, values), end_section=ends)  # no markup
    return table
