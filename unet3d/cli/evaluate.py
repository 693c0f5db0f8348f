"""``unet3d evaluate`` and ``unet3d check``."""

from functools import partial
from pathlib import Path

import click

from unet3d.cli.options import FILE
from unet3d.cli.output import check_writable, files_of, refuse_input, working, write_json
from unet3d.errors import DatasetError, some


@click.command()
@click.argument("predictions", type=FILE)
@click.argument("labels", type=FILE)
@click.option("--json", "json_path", type=FILE, help="Also write the scores here.")
def evaluate(predictions: Path, labels: Path, json_path: Path | None) -> None:
    """Compare PREDICTIONS with LABELS: Dice, HD95 and volume. Files or folders."""
    refuse_input(json_path, predictions, labels)
    check_writable(json_path)

    from rich.console import Console
    from rich.progress import track

    from unet3d.inference.evaluation import evaluate as run_evaluation
    from unet3d.reports.scores import evaluation_table

    terminal = Console(stderr=True)
    watch = partial(
        track,
        description="evaluating",
        console=terminal,
        transient=True,
        disable=not terminal.is_terminal,
    )
    result = run_evaluation(predictions, labels, watch)
    Console().print(evaluation_table(result))
    without = result.without_prediction
    if without:
        num_labels = len(result.cases) + len(without)
        click.echo(
            f"{len(without)} of the {num_labels} label maps in {labels} have no segmentation and "
            f"do not count: {some(without)}"
        )
    if json_path is not None:
        write_json(json_path, result.to_dict())


@click.command()
@click.argument("dataset", type=FILE)
@click.option("--json", "json_path", type=FILE, help="Also write the findings here.")
def check(dataset: Path, json_path: Path | None) -> None:
    """Find what would break training on DATASET, before it starts."""
    refuse_input(json_path, *files_of(dataset))
    check_writable(json_path)

    from dataclasses import asdict

    with working("starting") as show:
        from unet3d.volumes.check import check_dataset
        from unet3d.volumes.dataset import load_dataset

        opened = load_dataset(dataset)
        findings = check_dataset(opened, show)
    for finding in findings:
        click.echo(f"{finding.severity:7}  {finding.case}: {finding.message}")
    if json_path is not None:
        write_json(json_path, {"findings": [asdict(finding) for finding in findings]})
    num_errors = sum(finding.severity == "error" for finding in findings)
    num_warnings = len(findings) - num_errors
    summary = f"{len(opened.cases)} cases, {num_errors} errors, {num_warnings} warnings"
    if num_errors:
        raise DatasetError(f"{dataset}: {summary}; fix the errors before training")
    click.echo(summary)
