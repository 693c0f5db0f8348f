"""Archives of nnU-Net's models: the files of a network are found and unpacked.

Under the name that :func:`~unet3d.nnunet.layout.known_as` gives a checkpoint in an archive, it can
be asked for, too.
"""

import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from unet3d.errors import CheckpointError, reason_of
from unet3d.inputs.plain_data import is_printable
from unet3d.inputs.reading import MAX_JSON_BYTES
from unet3d.inputs.zip_files import open_zip
from unet3d.memory.host import readable
from unet3d.nnunet.layout import FILES, LINK, SUFFIX, UNPACKED

MAX_CHECKPOINT_BYTES = 8 * 2**30
"""A weight and its momentum take 8 bytes: that is a network of a billion, where nnU-Net's own have
some hundred million."""

MAX_GROWTH = 20
"""How many times the size of the archive its checkpoints may have. Weights hardly shrink when they
are packed; zeros shrink a thousandfold, and a small archive of them would fill a disk."""

MAX_NAME = 500
"""Letters of the name of a file, which messages show."""

KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways of packing of which only as much is unpacked at once as is asked for."""


def archive_of(path: Path) -> tuple[Path, PurePosixPath] | None:
    """Return the archive that a path is, or leads into, and the place within; None: neither.

    Args:
        path: Such as ``Task.zip``, or ``Task.zip/nnUNetTrainer__nnUNetPlans__3d_fullres``.
    """
    for place in (path, *path.parents):
        if place.suffix.lower() == ".zip" and place.is_file():
            return place, PurePosixPath(path.relative_to(place))
    return None


class Archive:
    """The files of an archive, of which those that are needed can be unpacked."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        """See what it has; see :func:`open_archive`."""
        self.path = path
        self._archive = archive
        self._members = {
            PurePosixPath(member.filename): member
            for member in archive.infolist()
            if _is_file_within(member)
        }
        self.names = sorted(self._members)
        """Of its files; none leads out of the folder that it is unpacked to."""

    def unpack(self, names: Sequence[PurePosixPath], stack: ExitStack) -> Path:
        """Unpack some of its files, and return the temporary folder that they then are in.

        Args:
            names: The files.
            stack: Removes the folder when it is closed.

        Raises:
            CheckpointError: They are larger than a model's, or than the space that there is.
            OSError: They cannot be written.
            ValueError: They are damaged.
        """
        self._refuse_large(names)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=UNPACKED)))
        needed = sum(self._members[name].file_size for name in names)
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
            # What is packed ends for zipfile with the size that was looked at above.
            with self._archive.open(self._members[name]) as packed, target.open("xb") as file:
                shutil.copyfileobj(packed, file, 2**20)
        return folder / FILES

    def _refuse_large(self, names: Sequence[PurePosixPath]) -> None:
        """Refuse what no model has, before anything is written."""
        of_checkpoints = 0
        for name in names:
            member = self._members[name]
            most = MAX_CHECKPOINT_BYTES if name.suffix == SUFFIX else MAX_JSON_BYTES
            if member.file_size > most:
                raise CheckpointError(
                    f"{self.path / name} has {readable(member.file_size)} unpacked, and may have "
                    f"{readable(most)}; if that is right, unpack it yourself and name its folder"
                )
            if member.compress_type not in KINDS:
                raise CheckpointError(
                    f"{self.path / name} is packed in a way that is not known here; unpack it "
                    "yourself, and name its folder"
                )
            of_checkpoints += member.file_size if name.suffix == SUFFIX else 0
        size = self.path.stat().st_size
        if of_checkpoints > MAX_GROWTH * size:
            raise CheckpointError(
                f"{self.path} has {readable(size)}, and its checkpoints {readable(of_checkpoints)} "
                "unpacked, as no weights have; if that is right, unpack it yourself and name its "
                "folder"
            )


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive.

    Args:
        path: Its file.

    Raises:
        CheckpointError: It cannot be read, or what is needed of it not be unpacked.
    """
    try:
        with open_zip(path) as archive:
            yield Archive(path, archive)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; copy it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot unpack {path}: {reason_of(error)}") from error


def _is_file_within(member: zipfile.ZipInfo) -> bool:
    """Return whether an entry is a file whose name can be shown, and made within a folder."""
    name = member.filename
    is_within = ".." not in PurePosixPath(name).parts and not name.startswith("/")
    return is_within and not member.is_dir() and len(name) <= MAX_NAME and is_printable(name)
