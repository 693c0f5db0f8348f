"""``unet3d evaluate``."""

from pathlib import Path

import click

from unet3d.cli.command import GivenSettings, command, grouped
from unet3d.cli.options import (
    FILE,
    FiniteRange,
    checkpoint_option,
    json_option,
    overwrite_option,
    reading_options,
)
from unet3d.cli.output import check_result, files_of, load_torch, show_result, write_json


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
        help="Data set that names labels, regions and the ignore label; default: the one that "
        "contains LABELS.",
    ),
    checkpoint_option(
        "Checkpoint or run, such as one trained with data.labels, that names the labels instead of "
        "a data set."
    ),
    click.option(
        "--ignore",
        type=click.IntRange(min=1),
        metavar="VALUE",
        help="Value in LABELS whose voxels are not scored; default: the label 'ignore' of "
        "dataset.json.",
    ),
    click.option(
        "--tolerance-mm",
        type=FiniteRange(min=0, max=1000),
        metavar="MM",
        help="Distance up to which surfaces agree in NSD; default: 1, or twice the spacing in "
        "microscopy.",
    ),
    click.option(
        "--leave-out",
        is_flag=True,
        help="Leave out segmentations that have no label map, instead of stopping with an error.",
    ),
)
@reading_options
@grouped("Output", json_option("the scores"), overwrite_option)
def evaluate(
    *,
    settings: GivenSettings,
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

    Both are files, or both are folders, whose files are paired by name.

    HD95 is the 95th percentile of the distances between the two surfaces of a label. NSD is the
    share of both surfaces that is within --tolerance-mm of the other surface. Both are defined as
    in MONAI. A label that only one of the two files has gets Dice and NSD 0, and no HD95. A label
    that neither has is not scored.
    """
    if dataset is not None and checkpoint is not None:
        raise click.UsageError("--dataset and --checkpoint both name labels; leave one out")
    check_result(json_path, predictions, labels, *files_of(dataset), overwrite=overwrite)
    from unet3d.inference.pairing import find_pairs

    reading = settings.config.data.reading
    find_pairs(predictions, labels, leave_out, reading)  # before PyTorch is imported

    load_torch()
    from unet3d.inference.evaluation import evaluate as run_evaluation
    from unet3d.inference.evaluation import scored_labels
    from unet3d.reports.tables import evaluation_lines, evaluation_table

    result = run_evaluation(
        predictions,
        labels,
        scored=scored_labels(labels, dataset, checkpoint, ignore),
        tolerance_mm=tolerance_mm,
        leave_out=leave_out,
        reading=reading,
    )
    show_result(evaluation_table(result))
    for line in evaluation_lines(result, tolerance_mm is None):
        show_result(line)
    write_json(json_path, result.to_dict(), overwrite)
