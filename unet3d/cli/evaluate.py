"""``unet3d evaluate`` and ``unet3d check``."""

from pathlib import Path

import click

from unet3d.cli.command import GivenSettings, command, grouped
from unet3d.cli.options import (
    FILE,
    FiniteRange,
    checkpoint_option,
    common_options,
    json_option,
    overwrite_option,
)
from unet3d.cli.output import check_result, files_of, working, write_json
from unet3d.errors import DatasetError


@command(
    "unet3d evaluate segmentations/ DATASET/labelsTr",
    "unet3d evaluate scan_seg.nii.gz truth.nii.gz --json scores.json",
)
@click.argument("predictions", metavar="SEGMENTATIONS", type=FILE)
@click.argument("labels", type=FILE)
@grouped(
    "Scores",
    click.option(
        "--dataset",
        type=FILE,
        help="Data set that names labels, regions and what to ignore; default: the one that "
        "LABELS lies in, as labelsTr does.",
    ),
    checkpoint_option(
        "Checkpoint or run that names labels instead, as its data.labels chose them."
    ),
    click.option(
        "--ignore",
        type=click.IntRange(min=1),
        metavar="VALUE",
        help="Value in LABELS whose voxels count nowhere; default: 'ignore' of dataset.json.",
    ),
    click.option(
        "--tolerance-mm",
        type=FiniteRange(min=0, max=1000),
        metavar="MM",
        help="How far a surface may lie from the other and count as right in NSD; default: 1, "
        "and twice the spacing of microscopes.",
    ),
    click.option(
        "--leave-out",
        is_flag=True,
        help="Leave out segmentations without label map instead of refusing them.",
    ),
)
@grouped("Output", json_option("the scores"), overwrite_option)
def evaluate(
    *,
    predictions: Path,
    labels: Path,
    dataset: Path | None,
    checkpoint: Path | None,
    ignore: int | None,
    tolerance_mm: float | None,
    leave_out: bool,
    json_path: Path | None,
    overwrite: bool,
) -> None:
    """Score SEGMENTATIONS against LABELS: Dice, HD95, NSD.

    Both are files, or folders; a segmentation belongs to the label map of its name.

    HD95, the 95th percentile of the distances between surfaces, and NSD, the share of the surfaces
    within --tolerance-mm of the other, are MONAI's. Where only one side has a label, Dice and NSD
    are 0, and HD95 has no value; where neither has it, it does not count.
    """
    if dataset is not None and checkpoint is not None:
        raise click.UsageError("--dataset and --checkpoint both name labels; leave one out")
    check_result(json_path, predictions, labels, *files_of(dataset), overwrite=overwrite)
    from unet3d.inference.pairing import refuse_missing

    refuse_missing(predictions, labels)  # before PyTorch is imported

    from rich.console import Console

    from unet3d.inference.evaluation import evaluate as run_evaluation
    from unet3d.inference.evaluation import scored_labels
    from unet3d.reports.scores import evaluation_lines, evaluation_table

    result = run_evaluation(
        predictions,
        labels,
        scored=scored_labels(labels, dataset, checkpoint, ignore),
        tolerance_mm=tolerance_mm,
        leave_out=leave_out,
    )
    Console().print(evaluation_table(result))
    for line in evaluation_lines(result, tolerance_mm is None):
        click.echo(line)
    write_json(json_path, result.to_dict(), overwrite)


@command("unet3d check DATASET", "unet3d check DATASET --json contents.json")
@click.argument("dataset", type=FILE)
@grouped("Output", json_option("contents and findings"), overwrite_option)
@common_options
def check(
    *, dataset: Path, settings: GivenSettings, json_path: Path | None, overwrite: bool
) -> None:
    """Say what DATASET holds, and what would break training.

    Of the settings, data.labels, data.spacing_mm, data.fold and data.num_folds count.
    """
    check_result(json_path, *files_of(dataset), settings.path, overwrite=overwrite)

    from dataclasses import asdict

    from unet3d.datasets.dataset import load_dataset

    data = settings.config.data
    opened = load_dataset(dataset)  # before PyTorch is imported
    with working("starting") as show:
        from unet3d.datasets.contents import lines, summary
        from unet3d.datasets.dataset import Finding, fold_cases
        from unet3d.datasets.naming import with_labels
        from unet3d.preparation.check import examine

        if data.labels is not None:
            opened = with_labels(opened, data.labels)
        findings, _, cases = examine(opened, data.spacing_mm, show)
        contents = summary(opened, cases)
        if not opened.faults:  # which make no folds, and are findings already
            try:
                fold_cases(opened, data.fold, data.num_folds, settings.config.training.seed)
            except DatasetError as error:
                findings.append(
                    Finding(case=opened.root.name, severity="error", message=str(error))
                )
    for line in lines(contents):
        click.echo(line)
    for finding in findings:
        click.echo(f"{finding.severity:7}  {finding.case}: {finding.message}")
    tree = {"contents": contents, "findings": [asdict(finding) for finding in findings]}
    write_json(json_path, tree, overwrite)
    num_errors = sum(finding.severity == "error" for finding in findings)
    num_warnings = len(findings) - num_errors
    counts = f"{len(opened.cases)} cases, {num_errors} error(s), {num_warnings} warning(s)"
    if num_errors:
        raise DatasetError(f"{dataset}: {counts}; fix the errors before training")
    click.echo(counts)
