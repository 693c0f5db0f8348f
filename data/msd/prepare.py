"""Unpack an archive of the Medical Segmentation Decathlon, check it, and say how to train on it.

Run it as ``python data/msd/prepare.py Task04_Hippocampus.tar --output ~/volumes``.
"""

import bz2
import gzip
import lzma
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import click

from unet3d.atomic import publish_folder, unfinished_folder
from unet3d.datasets.dataset import load_dataset
from unet3d.errors import DatasetError, Unet3dError, reason_of
from unet3d.images.source import beginning_of
from unet3d.inputs.plain_data import printable
from unet3d.memory.host import readable
from unet3d.preparation.check import examine

COMPRESSED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""How a compressed file begins, and what opens it."""

DAMAGED = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError)

MAX_PIECE_BYTES = 2**24
MAX_MEMBERS = 100_000
DISK_BLOCK_BYTES = 4096
"""Every file takes whole blocks of the disk."""


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
        findings = examine(dataset).findings
    except Unet3dError as error:
        raise click.ClickException(str(error)) from error
    for finding in findings:
        print(f"{finding.severity}: {finding.case}: {finding.message}")
    num_errors = sum(finding.severity == "error" for finding in findings)
    print(f"{dataset.root.name}: {len(dataset.cases)} labelled cases in {folder}")
    print(f"  channels: {', '.join(dataset.channel_names)}")
    print(f"  labels: {', '.join(dataset.label_names)}")
    if num_errors:
        print(f"{num_errors} errors; training would stop at them")
        sys.exit(1)
    print(f"Train with:\n  unet3d train {folder}")


def unpack(archive: Path, output: Path) -> Path:
    """Unpack an archive that holds one folder with a ``dataset.json``.

    The archive is gone through once before anything is written: it must be whole, and fit on the
    disk. The folder appears whole or not at all. Nothing is written outside it: an archive with
    links, devices or paths that lead elsewhere is refused. Hidden files, which archives made on a
    Mac are full of, are left out.

    Args:
        archive: A tar file, compressed or not.
        output: Where its folder is put.

    Returns:
        The folder.

    Raises:
        DatasetError: The archive is damaged, unsafe, too large or something else, or the folder
            exists.
    """
    beginning_of(archive)
    try:
        with _opened(archive) as tar:
            _survey(archive, tar, output)
        with unfinished_folder(output / archive.name) as unfinished:
            with _opened(archive) as tar:
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
    except (*DAMAGED, OSError) as error:
        # Only the system's own errors have a number; those of gzip and bz2 tell of damage.
        if isinstance(error, OSError) and error.errno is not None:
            raise DatasetError(
                f"cannot unpack {archive} into {output}: {reason_of(error)}; choose a folder with "
                "space that you can write to with --output"
            ) from error
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"{archive} is damaged or no tar archive ({reason}); download it again"
        ) from error


class _Bounded:
    """A file of which only small pieces are read, because tarfile reads names of any size whole."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > MAX_PIECE_BYTES:
            raise tarfile.ReadError(f"a name or note of {size} bytes")
        return self.file.read(size)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    with archive.open("rb") as raw:
        start = raw.read(6)
    openers = [open_ for magic, open_ in COMPRESSED.items() if start.startswith(magic)]
    with (openers[0] if openers else open)(archive, "rb") as file:
        with tarfile.open(fileobj=_Bounded(file), mode="r:") as tar:  # type: ignore[call-overload]
            yield tar


def _survey(archive: Path, tar: tarfile.TarFile, output: Path) -> None:
    """Refuse an archive that is unsafe, that ends too early or that the disk has no space for."""
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    needed = num_members = 0
    for member in tar:
        _refuse_unsafe(archive, member)
        needed += -(-member.size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        num_members += 1
        if needed > free:
            raise DatasetError(
                f"{archive} unpacks to at least {readable(needed)}, but {existing} has "
                f"{readable(free)} free; choose another --output"
            )
        if num_members > MAX_MEMBERS:
            raise DatasetError(
                f"{archive} holds more than {MAX_MEMBERS} files; an archive of the Medical "
                "Segmentation Decathlon holds some thousand at most"
            )
    # tarfile takes a file that ends, or is damaged, between two members for a whole one.
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it ends too early")
    # What compressed it checks its checksum only at the end of the file.
    if len(tar.fileobj.read(MAX_PIECE_BYTES)) == MAX_PIECE_BYTES:
        raise tarfile.ReadError("it goes on after its end")


def _refuse_unsafe(archive: Path, member: tarfile.TarInfo) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise DatasetError(
            f"{archive} is unsafe: {printable(member.name)} lies outside it; nothing was kept, "
            "download the archive from its owner"
        )
    if not (member.isdir() or member.isreg() or _is_hidden(member)):
        raise DatasetError(
            f"{archive} is unsafe: {printable(member.name)} is a link or a device; nothing was "
            "kept, download the archive from its owner"
        )


def _is_hidden(member: tarfile.TarInfo) -> bool:
    return any(piece.startswith(".") for piece in PurePosixPath(member.name).parts)


def _unpack_member(
    archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path
) -> None:
    _refuse_unsafe(archive, member)  # the file may have changed since the survey
    stream = None if _is_hidden(member) else tar.extractfile(member)
    if stream is None:  # a folder
        return
    path = folder / PurePosixPath(member.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened as new: a name that comes twice in the archive does not replace the first.
    with stream, path.open("xb") as file:
        shutil.copyfileobj(stream, file)


if __name__ == "__main__":
    main()
