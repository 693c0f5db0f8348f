"""Archives that are damaged, or expand to a huge size: refused in one line, at little cost."""

import io
import struct
import zipfile
import zlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given

from tests.mutations import damaged, property_test
from unet3d.errors import CheckpointError
from unet3d.inputs.plain_data import is_printable
from unet3d.nnunet.model_files import known_as, networks_in

CHECKPOINT = "model/fold_0/checkpoint_final.pth"
NOISE = bytes(range(256)) * 40  # compressible, but less than zeros


def archive_with(path, kind=zipfile.ZIP_DEFLATED, **more):
    """Write an archive with a model, and further entries."""
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("model/plans.json", b"{}")
        archive.writestr(CHECKPOINT, more.pop("checkpoint", NOISE[:3000]))
        for name, content in more.items():
            archive.writestr(name, content)
    return path


def unpacked(path):
    with ExitStack() as stack:
        (found,) = networks_in(path, None, stack)
        return found.read_bytes()


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        unpacked(path)
    message = str(caught.value)
    assert is_printable(message), repr(message)
    return message


def test_what_a_user_knows_a_checkpoint_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    for path in (Path("weights/../weights/Task.zip"), tmp_path / "other.zip"):
        archive_with(path)
        with ExitStack() as stack:
            (found,) = networks_in(path, None, stack)
            assert found.is_absolute() and not found.is_relative_to(path)
            assert known_as(found) == path / CHECKPOINT
    assert known_as(Path("models/a.pt")) == Path("models/a.pt")


def test_a_download_that_is_damaged(tmp_path):
    path = archive_with(tmp_path / "a.zip", checkpoint=NOISE)
    content = path.read_bytes()
    at = content.index(CHECKPOINT.encode()) + len(CHECKPOINT)
    path.write_bytes(content[:at] + b"\xff" * 20 + content[at + 20 :])
    assert "is damaged: Error -3 while decompressing" in refusal(path)
    path.write_bytes(content[: at + 10] + content[at + 30 :])
    assert "cannot unpack" in refusal(path) and "Invalid argument" in refusal(path)
    path = archive_with(tmp_path / "b.zip", **{"\u00e9": b""})
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xff\xfe"))
    assert "is damaged: 'utf-8' codec can't decode" in refusal(path)


def test_what_no_model_has_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    path = archive_with(tmp_path / "a.zip", checkpoint=bytes(10**6))
    assert "a.zip has 1.2" in refusal(path) and "implausible for weights; if that is" in refusal(
        path
    )
    path = archive_with(tmp_path / "b.zip", **{"model/dataset.json": bytes(10**6)})
    assert "implausible for weights; if that is" in refusal(path)
    assert "cannot unpack" in refusal(archive_with(tmp_path / "c.zip"))


def test_a_link_is_unpacked_as_a_file(tmp_path):
    path, link = tmp_path / "a.zip", zipfile.ZipInfo(CHECKPOINT)
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/plans.json", b"{}")
        archive.writestr(link, b"/etc/passwd")
    assert unpacked(path) == b"/etc/passwd"


def test_no_more_is_written_than_an_entry_declares(tmp_path):
    path = archive_with(tmp_path / "a.zip", checkpoint=bytes(10**6))
    content = bytearray(path.read_bytes())
    starts = [content.index(mark, content.index(mark) + 1) for mark in (b"PK\3\4", b"PK\1\2")]
    for start, at in zip(starts, (22, 24), strict=True):  # headers of the second entry
        assert struct.unpack_from("<L", content, start + at) == (10**6,)
        struct.pack_into("<L", content, start + at, 10)
    path.write_bytes(content)
    assert "is damaged: Bad CRC-32" in refusal(path)
    for start, at in zip(starts, (14, 16), strict=True):
        struct.pack_into("<L", content, start + at, zlib.crc32(bytes(10)))
    path.write_bytes(content)
    assert unpacked(path) == bytes(10)


def test_names_that_lead_elsewhere_or_cannot_be_shown(tmp_path, monkeypatch):
    names = ["../outside/plans.json", "/outside/plans.json", "\x1b[2J/plans.json", "plans.json/"]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    for name in names:
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr(name, b"")
        with ExitStack() as stack, pytest.raises(CheckpointError, match="no .*plans.json|final"):
            networks_in(tmp_path / "a.zip", None, stack)
        assert {path.name for path in tmp_path.iterdir()} == {"a.zip", "temporary"}
    assert not Path("/outside").exists()


def small_archive():
    file = io.BytesIO()
    archive_with(file, checkpoint=NOISE[:300])
    return file.getvalue()


@partial(property_test, share=0.5)
@given(damaged(small_archive()))
def test_mutations_of_the_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "mutated.zip"
    path.write_bytes(content)
    try:
        assert len(unpacked(path)) <= len(NOISE)
    except CheckpointError as error:
        assert is_printable(str(error)) and len(str(error)) < 900, repr(str(error))
