"""``unet3d report``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from unet3d.cli.checkpoints import named_checkpoints
from unet3d.cli.command import GivenSettings, command, grouped
from unet3d.cli.options import (
    FILE,
    checkpoint_option,
    output_option,
    overwrite_option,
    reading_options,
)
from unet3d.cli.output import check_result, working, writing_result
from unet3d.errors import ConfigError

if TYPE_CHECKING:
    from unet3d.config import Reading


@command("unet3d report runs/mine", "unet3d report scan_seg.nii.gz --image scan.nii.gz")
@click.argument("path", metavar="RUN|SEGMENTATION", type=FILE)
@grouped(
    "For a segmentation",
    click.option("--image", type=FILE, help="Scan that was segmented."),
    checkpoint_option(
        "Checkpoint that names the labels; default: the names in the segmentation's header."
    ),
)
@reading_options
@grouped(
    "Output",
    output_option("HTML file; default: report.html in the run, or a file beside the segmentation."),
    overwrite_option,
)
def report(
    *,
    settings: GivenSettings,
    path: Path,
    image: Path | None,
    checkpoint: Path | None,
    output: Path | None,
    overwrite: bool,
) -> None:
    """Write an HTML page about a RUN, or a viewer for a SEGMENTATION.

    The page of a run shows curves, Dice of each label and case, pictures of the worst and the best
    case, memory, versions and configuration. The run may still be training; the next call replaces
    the page. In a run over several folds, each fold gets a page, too. The page of a segmentation
    shows the scan with the labels, and the volume of each label. A page needs neither the internet
    nor other files.
    """
    is_run = image is None
    if is_run and (checkpoint or not path.is_dir()):
        raise ConfigError(
            f"{path} is not the folder of a run; to show a segmentation, name its scan with "
            "--image SCAN"
        )
    if is_run and settings.changes:
        raise click.UsageError("the options of microscopy are for a segmentation; add --image SCAN")
    from unet3d.images.files import file_of, volume_stem
    from unet3d.reports.pages.page import is_page
    from unet3d.reports.pages.run_page import REPORT, pages_of_run

    if output is None:
        output = path / REPORT if is_run else file_of(path).with_name(f"{volume_stem(path)}.html")
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output} cannot hold a page; name a file that ends in .html")
    # The page of a run that is still training is made repeatedly.
    overwrite |= is_run and output.parent.resolve() == path.resolve() and is_page(output)
    check_result(output, overwrite=overwrite)
    with working(f"reading {path}"):
        if image is None:
            pages = pages_of_run(path, output)
        else:
            reading = settings.config.data.reading
            pages = iter([(path, _viewer(path, image, checkpoint, reading), output)])
        for shown, page, place in pages:
            content = page.encode(errors="replace")
            with writing_result(place, overwrite or place != output) as unfinished:
                unfinished.write_bytes(content)
            click.echo(f"{shown} -> {place} ({len(content) / 1e6:.1f} MB)")


def _viewer(segmentation: Path, image: Path, checkpoint: Path | None, reading: "Reading") -> str:
    from unet3d.reports.pages.segmentation_page import segmentation_page

    names = None
    if checkpoint:
        from unet3d.nnunet.loading import load_network

        first = named_checkpoints([checkpoint])[0]
        prepared = load_network(first, "description").preprocessing
        pairs = zip(prepared.label_values, prepared.label_names, strict=True)
        names = {value: name for value, name in pairs if value}
    return segmentation_page(segmentation, image, names, reading)
