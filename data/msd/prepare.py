"""Unpack an archive of the Medical Segmentation Decathlon, check it, and say how to train on it.

Run it as ``python data/msd/prepare.py Task04_Hippocampus.tar --output ~/volumes``.
"""

import shutil
import sys
import tarfile
from pathlib import Path, PurePosixPath

import click

from unet3d.atomic import publish_folder, unfinished_folder
from unet3d.errors import DatasetError, Unet3dError, reason_of
from unet3d.volumes.check import check_headers
from unet3d.volumes.dataset import load_dataset


@click.command(help=__doc__)
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to unpack into; default: the archive's own.",
)
def main(archive: Path, output: Path | None) -> None:
    """Unpack, check, and print the command that trains."""
    try:
        folder = unpack(archive, output or archive.parent)
        dataset = load_dataset(folder)
        findings = check_headers(dataset)
    except Unet3dError as error:
        raise click.ClickException(str(error)) from error
    for finding in findings:
        print(f"{finding.severity}: {finding.case}: {finding.message}")
    num_errors = sum(finding.severity == "error" for finding in findings)
    print(f"{dataset.name}: {len(dataset.cases)} labelled cases in {folder}")
    print(f"  channels: {', '.join(dataset.channel_names)}")
    print(f"  labels: {', '.join(dataset.label_names)}")
    if num_errors:
        print(f"{num_errors} errors; training would stop at them")
        sys.exit(1)
    print(f"Train with:\n  unet3d train {folder}")


def unpack(archive: Path, output: Path) -> Path:
    """Unpack an archive that holds one folder with a ``dataset.json``.

    The folder appears whole or not at all. Nothing is written outside it: an archive with links,
    devices or paths that lead elsewhere is refused. Hidden files, which archives made on a Mac are
    full of, are left out.

    Args:
        archive: A tar file, compressed or not.
        output: Where its folder is put.

    Returns:
        The folder.

    Raises:
        DatasetError: The archive is damaged, unsafe or something else, or the folder exists.
    """
    try:
        with unfinished_folder(output / archive.name) as unfinished:
            with tarfile.open(archive) as tar:
                for member in tar:
                    _unpack_member(archive, tar, member, unfinished)
            folders = [path.parent for path in unfinished.glob("*/dataset.json")]
            if len(folders) != 1:
                raise DatasetError(
                    f"{archive} holds {len(folders)} folders with a dataset.json; an archive of "
                    "the Medical Segmentation Decathlon holds one"
                )
            final = output / folders[0].name
            if final.exists():
                raise DatasetError(f"{final} exists already; remove it or choose another --output")
            publish_folder(folders[0], final)
        return final
    except (tarfile.TarError, EOFError) as error:
        raise DatasetError(
            f"{archive} is damaged or no tar archive ({error}); download it again"
        ) from error
    except OSError as error:
        raise DatasetError(
            f"cannot unpack {archive} into {output}: {reason_of(error)}; choose a folder with "
            "space that you can write to with --output"
        ) from error


def _unpack_member(
    archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path
) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise DatasetError(
            f"{archive} is unsafe: {member.name} lies outside it; nothing was kept, download the "
            "archive from its owner"
        )
    if member.isdir() or any(piece.startswith(".") for piece in name.parts):
        return
    stream = tar.extractfile(member) if member.isreg() else None
    if stream is None:
        raise DatasetError(
            f"{archive} is unsafe: {member.name} is a link or a device; nothing was kept, download "
            "the archive from its owner"
        )
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened as new: a name that comes twice in the archive does not replace the first.
    with stream, path.open("xb") as file:
        shutil.copyfileobj(stream, file)


if __name__ == "__main__":
    main()
