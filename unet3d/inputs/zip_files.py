"""ZIP archives that anyone may have made: their list of entries is short, their faults one line."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unet3d.inputs.plain_data import printable
from unet3d.inputs.reading import open_regular

MAX_LIST_BYTES = 4 * 2**20
"""Of the list of entries; one takes about a hundred bytes."""


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an archive; no more is read before its list of entries is known to be short.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is no archive, or is damaged, which may be found as long as it is open; one
            line that says how.
    """
    with _BoundedFile(open_regular(path).detach()) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                file.limit = None
                yield archive
        except (
            zipfile.BadZipFile,
            zlib.error,
            NotImplementedError,
            RuntimeError,
            EOFError,
        ) as error:
            raise ValueError(printable(str(error), 200) or "it ends too early") from error
        except (struct.error, LookupError, OverflowError, TypeError) as error:
            raise ValueError(f"its parts do not agree: {printable(str(error), 200)}") from error


class _BoundedFile(io.BufferedReader):
    """A file of which no more than a limit is read at once, while the archive is opened."""

    limit: int | None = MAX_LIST_BYTES

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET and offset < 0:
            raise ValueError("an entry begins before the file does")
        return super().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        if self.limit is None:
            return super().read(size)
        is_bounded = size is not None and 0 <= size <= self.limit
        content = super().read(size if is_bounded else self.limit + 1)
        if len(content) > self.limit:
            raise ValueError(f"its list of entries is larger than {self.limit:,} bytes")
        return content
