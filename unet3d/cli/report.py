"""``unet3d report``."""

from pathlib import Path

import click

from unet3d.cli.command import Command, examples, grouped
from unet3d.cli.options import FILE, checkpoint_option, output_option, overwrite_option
from unet3d.cli.output import check_writable, working
from unet3d.errors import ConfigError, ResultExistsError


@click.command(
    cls=Command,
    epilog=examples("unet3d report runs/mine", "unet3d report scan_seg.nii.gz --image scan.nii.gz"),
)
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
    *,
    path: Path,
    image: Path | None,
    checkpoints: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
) -> None:
    """Make a page of a RUN, or a viewer of a SEGMENTATION.

    Of a run, also one that has not ended: curves, Dice of each label and case, the worst and the
    best case, memory, versions and configuration. Of a segmentation: a viewer with its labels, and
    their volumes. The page needs no network and no other file.
    """
    if image is None and (checkpoints or not path.is_dir()):
        raise ConfigError(
            f"{path} is no folder of a run; to show a segmentation, name its scan with --image SCAN"
        )
    output = output or _place(path, is_run=image is None)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output} is no place for a page; name a file that ends in .html")
    if not overwrite and (output.is_symlink() or output.is_file()):
        raise ResultExistsError(f"{output} exists; add --overwrite to replace it")
    check_writable(output)

    with working(f"reading {path}"):
        page = _page_of_run(path, output) if image is None else _page(path, image, checkpoints)

    from unet3d.inference.scans import result_file
    from unet3d.reports.pages.page import encoded

    content = encoded(page)
    with result_file(output, overwrite) as unfinished:
        unfinished.write_bytes(content)
    click.echo(f"{path} -> {output} ({len(content) / 1e6:.1f} MB)")


def _place(path: Path, is_run: bool) -> Path:
    from unet3d.images.files import volume_stem
    from unet3d.reports.pages.folds_page import REPORT

    return path / REPORT if is_run else path.with_name(f"{volume_stem(path)}.html")


def _page_of_run(path: Path, output: Path) -> str:
    from unet3d.reports.pages.folds_page import folds_page
    from unet3d.reports.pages.run_page import run_page
    from unet3d.runs.finding import folds_in
    from unet3d.runs.run_folder import RunFolder

    run = RunFolder(path)
    is_one = any(file.is_file() for file in (run.data, run.metrics, run.latest))
    return folds_page(path, output) if folds_in(path) and not is_one else run_page(path)


def _page(segmentation: Path, image: Path, checkpoints: tuple[Path, ...]) -> str:
    from unet3d.reports.pages.segmentation_page import segmentation_page

    names = None
    if checkpoints:
        from unet3d.nnunet.loading import load_network

        prepared = load_network(checkpoints[0], "description").preprocessing
        pairs = zip(prepared.label_values, prepared.label_names, strict=True)
        names = {value: name for value, name in pairs if value}
    return segmentation_page(segmentation, image, names)
