"""The scores of an evaluation as a table."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from unet3d.inference.evaluation import Evaluation
from unet3d.inference.label_scores import LabelScore
from unet3d.reports.format import NOTHING


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the scores of each case, and their means, as a table for the terminal.

    Args:
        evaluation: What :func:`unet3d.inference.evaluation.evaluate` returns.
    """
    mean = evaluation.mean_dice
    table = Table(
        title="Predictions compared with labels",
        caption=f"Mean Dice over the labels: {NOTHING if mean is None else f'{mean:.4f}'}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case")
    table.add_column("label", justify="right")
    nsd = f"NSD\n({evaluation.tolerance_mm:g} mm)"
    for name in ("Dice", "HD95\n(mm)", nsd, "predicted\n(mL)", "labelled\n(mL)"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(case.name, case.scores) for case in evaluation.cases]
    if len(rows) > 1:
        means = {label: evaluation.mean(label) for label in evaluation.labels}
        rows.append((f"mean of {len(rows)} cases", means))
    for name, scores in rows:
        named = [(evaluation.name_of(label), score) for label, score in scores.items()]
        _add_scores(table, name, named)
    return table


def _add_scores(table: Table, name: str, scores: Sequence[tuple[str, LabelScore]]) -> None:
    for index, (label, score) in enumerate(scores):
        table.add_row(
            Text(name if index == 0 else ""),  # no markup
            Text(label),
            NOTHING if score.dice is None else f"{score.dice:.4f}",
            NOTHING if score.hd95_mm is None else f"{score.hd95_mm:.2f}",
            NOTHING if score.nsd is None else f"{score.nsd:.4f}",
            f"{score.prediction_ml:.3f}",
            f"{score.label_ml:.3f}",
            end_section=index == len(scores) - 1,
        )
