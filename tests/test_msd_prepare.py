import gzip
import importlib.util
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.images.samples import write_msd

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "msd" / "prepare.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("msd_prepare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path):
    return write_msd(tmp_path / "source" / "Task00_Sample")


def archive_of(folder, archive, *extra, mode="w"):
    with tarfile.open(archive, mode) as tar:
        tar.add(folder, folder.name)
        for member in extra:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return archive


def member(name, kind=tarfile.REGTYPE, size=4, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = size if kind not in (tarfile.SYMTYPE, tarfile.FIFOTYPE) else 0
    return info


def run(script, *arguments):
    return CliRunner().invoke(script.main, [str(argument) for argument in arguments])


def refusal(script, archive):
    """Return the error for an archive, one line, after checking that nothing of it is left."""
    output = archive.parent / "deep" / "out"
    result = run(script, archive, "--output", output)
    assert result.exit_code == 1 and not list(output.glob("*"))
    assert result.output.startswith("Error: ") and result.output.count("\n") == 1
    return result.output


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_unpacks_checks_and_says_how_to_train(script, source, tmp_path, mode):
    hidden = member("Task00_Sample/imagesTr/._case_0.nii.gz")
    archive = archive_of(source, tmp_path / "Task00_Sample.tar", hidden, mode=mode)
    result = run(script, archive, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "out" / "Task00_Sample"
    assert f"unet3d train {folder}" in result.output
    assert "3 labelled cases" in result.output
    assert "background, left, right" in result.output
    unpacked = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")}
    packed = {path.relative_to(source): path.read_bytes() for path in source.rglob("*.*")}
    assert unpacked == packed
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["Task00_Sample"]
    again = run(script, archive, "--output", tmp_path / "out")
    assert again.exit_code == 1 and "exists already" in again.output


@pytest.mark.parametrize(
    ("evil", "reason"),
    [
        (member("Task00_Sample/../../escaped.txt\n\x1b[2J"), r"escaped.txt\n\x1b[2J lies outside"),
        (member("/tmp/unet3d-escaped.txt"), "lies outside"),
        (member("Task00_Sample/link", tarfile.SYMTYPE, target="/etc/passwd"), "link or a device"),
        (member("Task00_Sample/pipe", tarfile.FIFOTYPE), "link or a device"),
        (member("Task00_Sample/dataset.json"), "File exists"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else None,
)
def test_refuses_unsafe_archives_and_keeps_nothing(script, source, tmp_path, evil, reason):
    assert reason in refusal(script, archive_of(source, tmp_path / "evil.tar", evil))
    assert not list(tmp_path.rglob("escaped.txt*"))
    assert not Path("/tmp/unet3d-escaped.txt").exists()


def test_refuses_what_is_no_such_archive(script, tmp_path):
    (tmp_path / "page.tar").write_text("<html>sign in first</html>")
    assert "no tar archive" in refusal(script, tmp_path / "page.tar")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("a")
    archive = archive_of(tmp_path / "other", tmp_path / "other.tar")
    assert "0 folders with a dataset.json" in refusal(script, archive)
    os.mkfifo(tmp_path / "pipe.tar")
    assert "not a regular file" in refusal(script, tmp_path / "pipe.tar")


def test_an_archive_that_ends_anywhere_leaves_nothing(script, source, tmp_path):
    whole = archive_of(source, tmp_path / "whole.tar").read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        ends = [info.offset_data + -(-info.size // 512) * 512 for info in tar]
    for end in (*ends[:-1], ends[3] + 100, ends[-1]):  # between members, in a header, at the end
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        assert "cut.tar is damaged" in refusal(script, tmp_path / "cut.tar"), end


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_damaged_compressed_archive_leaves_nothing(script, source, tmp_path, mode):
    whole = archive_of(source, tmp_path / "whole.tar", mode=mode).read_bytes()
    for place in (len(whole) // 2, len(whole) - 6):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        (tmp_path / "damaged.tar").write_bytes(damaged)
        assert "damaged.tar is damaged" in refusal(script, tmp_path / "damaged.tar")


def test_sizes_that_no_memory_or_disk_holds_are_refused(script, source, tmp_path, monkeypatch):
    claim = member("Task00_Sample/huge.bin", size=2**60)
    with gzip.open(tmp_path / "claim.tar", "wb") as file:
        file.write(claim.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))
    assert "unpacks to at least 1 EiB" in refusal(script, tmp_path / "claim.tar")
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
        note = member("note", kind, size=2**36).tobuf(tarfile.GNU_FORMAT)
        (tmp_path / "note.tar").write_bytes(note + bytes(100_000))
        assert "a name or note of 68719476736 bytes" in refusal(script, tmp_path / "note.tar")
    archive = archive_of(source, tmp_path / "whole.tar")
    with monkeypatch.context() as patched:
        patched.setattr(script, "MAX_MEMBERS", 5)
        assert "more than 5 files" in refusal(script, archive)
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    said = refusal(script, archive)
    assert f"{tmp_path} has 19.53 KiB free" in said and "--output" in said
    assert not (tmp_path / "deep").exists()  # nothing was unpacked either


def test_says_what_is_wrong_with_the_data_beside_the_archive(script, source, tmp_path):
    (source / "labelsTr" / "case_1.nii.gz").unlink()
    result = run(script, archive_of(source, tmp_path / "Task00_Sample.tar"))
    assert result.exit_code == 1
    assert "error: case_1: " in result.output and "is missing" in result.output
    assert "unet3d train" not in result.output
    assert (tmp_path / "Task00_Sample" / "dataset.json").is_file()
