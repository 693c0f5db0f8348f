"""Archives of nnU-Net's models: the files of a network are found and unpacked.

Under the name that :func:`~unet3d.nnunet.layout.known_as` gives a checkpoint in an archive, it can
be asked for, too.
"""

import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from unet3d.atomic import temporary_folder
from unet3d.errors import CheckpointError, reason_of
from unet3d.inputs.plain_data import is_printable, printable
from unet3d.inputs.reading import open_regular
from unet3d.memory.host import readable
from unet3d.nnunet.layout import FILES, LINK, UNPACKED

MAX_GROWTH = 20
"""How many times the size of the archive its files may have. Weights hardly shrink when they are
packed; zeros shrink a thousandfold, and a small archive of them would fill a disk."""


def archive_of(path: Path) -> tuple[Path, Path] | None:
    """Return the archive that a path is, or leads into, and the place within; None: neither.

    Such as ``Task.zip``, or ``Task.zip/nnUNetTrainer__nnUNetPlans__3d_fullres``.
    """
    for place in (path, *path.parents):
        if place.suffix.lower() == ".zip" and place.is_file():
            return place, Path(path.relative_to(place))
    return None


class Archive:
    """The files of an archive, of which the needed ones can be unpacked."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path = path
        self._archive = archive
        self._members = {
            Path(member.filename): member
            for member in archive.infolist()
            if _is_file_within(member)
        }
        self.names = sorted(self._members)
        """Of its files; none leads out of the folder that it is unpacked to."""

    def unpack(self, names: Sequence[Path], stack: ExitStack) -> Path:
        """Unpack some of its files to a temporary folder, which the stack removes; return it."""
        size = self.path.stat().st_size
        needed = sum(self._members[name].file_size for name in names)
        if needed > MAX_GROWTH * size:
            raise CheckpointError(
                f"{self.path} has {readable(size)}, and {readable(needed)} unpacked, as no weights "
                "have; if that is right, unpack it yourself and name its folder"
            )
        folder = stack.enter_context(temporary_folder(UNPACKED))
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(
                f"{self.path} needs {readable(needed)} unpacked, and {folder.parent} has "
                f"{readable(free)}; set TMPDIR to a folder with space"
            )
        (folder / LINK).symlink_to(self.path)
        for name in names:
            target = folder / FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # The packed bytes end for zipfile with the size that was looked at above.
            with self._archive.open(self._members[name]) as packed, target.open("xb") as file:
                shutil.copyfileobj(packed, file, 2**20)
        return folder / FILES


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive, and say in one line why it, or a file of it, cannot be read or unpacked."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            yield Archive(path, archive)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot unpack {path}: {reason_of(error)}") from error
    except Exception as error:  # of the many that a damaged file leads to, few are documented
        reason = printable(str(error), 200) or type(error).__name__
        raise CheckpointError(f"{path} is damaged: {reason}; copy it again") from error


def _is_file_within(member: zipfile.ZipInfo) -> bool:
    """Return whether an entry is a file whose name can be shown, and made within a folder."""
    name = member.filename
    is_within = ".." not in Path(name).parts and not name.startswith("/")
    return is_within and not member.is_dir() and is_printable(name)
