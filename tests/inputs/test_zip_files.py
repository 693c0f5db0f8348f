"""Archives that are damaged, or made to take much: refused in one line."""

import io
import struct
import zipfile

import pytest

from unet3d.inputs.plain_data import is_printable
from unet3d.inputs.zip_files import open_zip


def small_archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"0123456789" * 100)
        archive.writestr("b/\u00e9", b"stored", zipfile.ZIP_STORED)
    return file.getvalue()


def read(path):
    with open_zip(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def refusal(path):
    with pytest.raises(ValueError) as caught:
        read(path)
    message = str(caught.value)
    assert is_printable(message), repr(message)
    return message


def test_an_archive_is_read(tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(small_archive())
    assert read(path) == {"a": b"0123456789" * 100, "b/\u00e9": b"stored"}


def test_what_is_damaged_is_said(tmp_path):
    path, content = tmp_path / "a.zip", small_archive()
    path.write_bytes(content[:-30])
    assert refusal(path) == "File is not a zip file"
    packed = bytearray(content)
    packed[31:41] = b"\xff" * 10  # within what is packed
    path.write_bytes(packed)
    assert "Error -3 while decompressing data" in refusal(path)
    named = bytearray(content)
    named[named.rindex(b"\xc3\xa9")] = 0xFF
    path.write_bytes(named)
    assert "'utf-8' codec can't decode" in refusal(path)


def test_a_list_of_a_million_entries_is_not_read(tmp_path):
    path = tmp_path / "many.pt"
    numbers = [20, 20, *[0] * 7, len(b"a"), *[0] * 6]
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *numbers) + b"a"
    directory = entry * 10**6
    with path.open("wb") as file:
        file.write(directory)
        end = (b"PK\6\6", 44, 45, 45, 0, 0, 10**6, 10**6, len(directory), 0)
        file.write(struct.pack("<4sQ2H2L4Q", *end))
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, len(directory), 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0))
    assert "its list of entries is larger than" in refusal(path)
