"""Scans dealt to ranks: each of n has a device and every n-th scan, and the first one sums up."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unet3d.errors import RankError, Unet3dError, some
from unet3d.interruption import Interrupted

if TYPE_CHECKING:
    from unet3d.inference.scan_search import FoundScans
    from unet3d.inference.scans import Scan


def show_left(scans: "Sequence[Scan]", overwrite: bool) -> None:
    """Say which scans a command leaves that ends before its time.

    Args:
        scans: These; perhaps none.
        overwrite: Whether the same command would segment the others again.
    """
    if scans:
        advice = "name these" if overwrite else "give the same command again"
        names = some([scan.images[0] for scan in scans])
        click.echo(f"Not segmented: {names}; to go on, {advice}", err=True)


@contextmanager
def showing_left(scans: "Sequence[Scan]", overwrite: bool) -> Iterator[None]:
    """Return a context in which ranks segment scans, and which says what they leave.

    Args:
        scans: All of them.
        overwrite: As in :func:`show_left`.
    """
    before = [_stamp(scan.output) for scan in scans]
    try:
        yield
    except (Interrupted, RankError):
        show_left(
            [
                scan
                for scan, stamp in zip(scans, before, strict=True)
                if _stamp(scan.output) == stamp
            ],
            overwrite,
        )
        raise


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is replaced; None: there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def to_plain(scans: "FoundScans") -> dict[str, Any]:
    """Return scans as one rank sends them to the others.

    Args:
        scans: What the first rank has found.
    """
    return {
        "to_segment": [_plain(scan) for scan in scans.to_segment],
        "kept": [_plain(scan) for scan in scans.kept],
        "faults": [[_plain(scan), str(error)] for scan, error in scans.faults],
    }


def from_plain(plain: dict[str, Any]) -> "FoundScans":
    """Return what :func:`to_plain` was given.

    Args:
        plain: Its result.
    """
    from unet3d.inference.scan_search import FoundScans

    return FoundScans(
        to_segment=tuple(map(_scan, plain["to_segment"])),
        kept=tuple(map(_scan, plain["kept"])),
        faults=tuple((_scan(scan), Unet3dError(text)) for scan, text in plain["faults"]),
    )


def _plain(scan: "Scan") -> list[Any]:
    return [[str(path) for path in scan.images], str(scan.output)]


def _scan(plain: list[Any]) -> "Scan":
    from unet3d.inference.scans import Scan

    images, output = plain
    return Scan(images=tuple(map(Path, images)), output=Path(output))
