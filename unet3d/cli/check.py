"""``unet3d check``."""

from dataclasses import asdict
from pathlib import Path

import click

from unet3d.cli.command import GivenSettings, command, grouped
from unet3d.cli.options import (
    FILE,
    common_options,
    json_option,
    overwrite_option,
    reading_options,
)
from unet3d.cli.output import check_result, files_of, working, write_json
from unet3d.errors import DatasetError, counted, some


@command("unet3d check DATASET", "unet3d check DATASET --json contents.json")
@click.argument("dataset", type=FILE)
@reading_options
@grouped("Output", json_option("contents and findings"), overwrite_option)
@common_options
def check(
    *, dataset: Path, settings: GivenSettings, json_path: Path | None, overwrite: bool
) -> None:
    """List contents and problems of DATASET before training.

    Only these settings have an effect: data.labels, data.spacing_mm, data.fold, data.num_folds,
    data.reading.
    """
    check_result(json_path, *files_of(dataset), settings.path, overwrite=overwrite)

    from unet3d.datasets.dataset import load_dataset

    data = settings.config.data
    opened = load_dataset(dataset, data.reading)  # before PyTorch is imported
    with working("starting") as show:
        from unet3d.datasets.contents import lines, summary
        from unet3d.datasets.dataset import Finding, fold_cases
        from unet3d.datasets.naming import with_labels
        from unet3d.preparation.check import examine

        if data.labels is not None:
            opened = with_labels(opened, data.labels)
        findings, geometries, cases = examine(opened, data.spacing_mm, show)
        contents = summary(opened, cases)
        if not opened.faults:  # faults are findings already, and prevent folds
            try:
                fold_cases(opened, data.fold, data.num_folds, settings.config.training.seed)
            except DatasetError as error:
                findings.append(
                    Finding(case=opened.root.name, severity="error", message=str(error))
                )
        unplaced = [one.path.name for one in geometries if not one.has_spacing]
        if unplaced:
            message = f"no spacing is stated by {some(unplaced)}; give it with --spacing Z,Y,X"
            findings.append(Finding(case=opened.root.name, severity="warning", message=message))
    for line in lines(contents):
        click.echo(line)
    for finding in findings:
        click.echo(f"{finding.severity:7}  {finding.case}: {finding.message}")
    tree = {"contents": contents, "findings": [asdict(finding) for finding in findings]}
    write_json(json_path, tree, overwrite)
    num_errors = sum(finding.severity == "error" for finding in findings)
    num_warnings = len(findings) - num_errors
    counts = ", ".join(
        counted(number, noun)
        for number, noun in (
            (len(opened.cases), "case"),
            (num_errors, "error"),
            (num_warnings, "warning"),
        )
    )
    if num_errors:
        raise DatasetError(f"{dataset}: {counts}; fix the errors before training")
    click.echo(counts)
