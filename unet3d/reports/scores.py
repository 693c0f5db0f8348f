"""The scores of an evaluation as a table."""

from collections.abc import Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from unet3d.inference.evaluation import Evaluation, LabelScore
from unet3d.reports.format import NOTHING


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return the scores of each case, and their means, as a table for the terminal.

    Args:
        evaluation: What :func:`unet3d.inference.evaluation.evaluate` returns.
    """
    table = Table(
        title="Predictions compared with labels",
        caption=f"Mean Dice over the labels: {evaluation.mean_dice:.4f}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("case")
    for name in ("label", "Dice", "HD95\n(mm)", "predicted\n(mL)", "labelled\n(mL)"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in evaluation.cases:
        _add_scores(table, case.name, case.scores)
    if len(evaluation.cases) > 1:
        means = {value: evaluation.mean(value) for value in evaluation.label_values}
        _add_scores(table, f"mean of {len(evaluation.cases)} cases", means)
    return table


def _add_scores(table: Table, name: str, scores: Mapping[int, LabelScore]) -> None:
    for index, (value, score) in enumerate(scores.items()):
        table.add_row(
            Text(name if index == 0 else ""),  # no markup
            str(value),
            NOTHING if score.dice is None else f"{score.dice:.4f}",
            NOTHING if score.hd95_mm is None else f"{score.hd95_mm:.2f}",
            f"{score.prediction_ml:.3f}",
            f"{score.label_ml:.3f}",
            end_section=index == len(scores) - 1,
        )
