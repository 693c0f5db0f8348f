"""``unet3d report``."""

import os
from pathlib import Path

import click

from unet3d.cli.checkpoints import named_checkpoints
from unet3d.cli.command import command, grouped
from unet3d.cli.options import FILE, checkpoint_option, output_option, overwrite_option
from unet3d.cli.output import check_result, working, writing_result
from unet3d.errors import ConfigError

REPORT = "report.html"
"""Name of a run's page, unless another one is asked for."""


@command("unet3d report runs/mine", "unet3d report scan_seg.nii.gz --image scan.nii.gz")
@click.argument("path", metavar="RUN|SEGMENTATION", type=FILE)
@grouped(
    "Of a segmentation",
    click.option("--image", type=FILE, help="The scan that it was made of; a run needs none."),
    checkpoint_option(
        "Checkpoint that names the labels; default: the names in the segmentation's header."
    ),
)
@grouped(
    "Output",
    output_option("HTML file; default: report.html in the run, or one beside the segmentation."),
    overwrite_option,
)
def report(
    *, path: Path, image: Path | None, checkpoint: Path | None, output: Path | None, overwrite: bool
) -> None:
    """Make a page of a RUN, or a viewer of a SEGMENTATION.

    Of a run, also one that has not ended: curves, Dice of each label and case, the worst and the
    best case, memory, versions and configuration; made again, it replaces its page. Of a run over
    folds, each fold has its page as well. Of a segmentation: a viewer with its labels, and their
    volumes. The page needs no network and no other file.
    """
    is_run = image is None
    if is_run and (checkpoint or not path.is_dir()):
        raise ConfigError(
            f"{path} is no folder of a run; to show a segmentation, name its scan with --image SCAN"
        )
    output = output or _place(path, is_run)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output} is no place for a page; name a file that ends in .html")

    with working(f"reading {path}"):
        from unet3d.reports.pages.page import is_page

        # The page of a run that goes on is made again and again.
        overwrite |= is_run and output.parent.resolve() == path.resolve() and is_page(output)
        check_result(output, overwrite=overwrite)
        page = _page_of_run(path, output) if image is None else _page(path, image, checkpoint)
        _write(path, page, output, overwrite)


def _write(shown: Path, page: str, place: Path, overwrite: bool) -> None:
    content = page.encode(errors="replace")
    with writing_result(place, overwrite) as unfinished:
        unfinished.write_bytes(content)
    click.echo(f"{shown} -> {place} ({len(content) / 1e6:.1f} MB)")


def _place(path: Path, is_run: bool) -> Path:
    if is_run:
        return path / REPORT
    from unet3d.images.files import volume_stem

    return path.with_name(f"{volume_stem(path)}.html")


def _page_of_run(path: Path, output: Path) -> str:
    """Return the page of a run; of one over folds, after each fold's page is written."""
    from unet3d.reports.pages.run_page import has_page, run_page
    from unet3d.runs.run_folder import RunFolder, folds_in

    folds = folds_in(path)
    if not folds or has_page(RunFolder(path), is_over_folds=True):
        return run_page(path)
    from unet3d.reports.pages.folds_page import folds_page
    from unet3d.reports.pages.page import is_page

    pages = {}
    for number, fold in folds.items():
        place = fold.path / REPORT
        if has_page(fold) and (is_page(place) or not os.path.lexists(place)):
            _write(fold.path, run_page(fold.path), place, overwrite=True)
            pages[number] = place
    return folds_page(path, folds, pages, output)


def _page(segmentation: Path, image: Path, checkpoint: Path | None) -> str:
    from unet3d.reports.pages.segmentation_page import segmentation_page

    names = None
    if checkpoint:
        from unet3d.nnunet.loading import load_network

        first = named_checkpoints([checkpoint])[0]
        prepared = load_network(first, "description").preprocessing
        pairs = zip(prepared.label_values, prepared.label_names, strict=True)
        names = {value: name for value, name in pairs if value}
    return segmentation_page(segmentation, image, names)
