import gzip
import importlib.util
import io
import os
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from tests.volumes.samples import write_msd

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "msd" / "prepare.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("msd_prepare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def archive_of(folder: Path, archive: Path, *extra: tarfile.TarInfo, mode: str = "w") -> Path:
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, folder.name)
        for member in extra:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return archive


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = 4 if kind == tarfile.REGTYPE else 0
    return info


def run(script: ModuleType, *arguments: Path | str) -> Result:
    return CliRunner().invoke(script.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_unpacks_checks_and_says_how_to_train(script, tmp_path, mode):
    source = write_msd(tmp_path / "source" / "Task00_Sample")
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


def test_unpacks_beside_the_archive_by_default(script, tmp_path):
    source = write_msd(tmp_path / "source" / "Task00_Sample")
    archive = archive_of(source, tmp_path / "Task00_Sample.tar")
    assert run(script, archive).exit_code == 0
    assert (tmp_path / "Task00_Sample" / "dataset.json").is_file()


@pytest.mark.parametrize(
    ("evil", "reason"),
    [
        (member("../escaped.txt"), "lies outside"),
        (member("Task00_Sample/../../escaped.txt"), "lies outside"),
        (member("/tmp/unet3d-escaped.txt"), "lies outside"),
        (member("Task00_Sample/link", tarfile.SYMTYPE, "/etc/passwd"), "link or a device"),
        (member("Task00_Sample/link", tarfile.LNKTYPE, "../../escaped.txt"), "link or a device"),
        (member("Task00_Sample/pipe", tarfile.FIFOTYPE), "link or a device"),
        (member("Task00_Sample/device", tarfile.CHRTYPE), "link or a device"),
        (member("../escaped.txt\n\x1b[2J"), r"escaped.txt\n\x1b[2J lies outside"),
        (member("Task00_Sample/dataset.json"), "File exists"),
    ],
    ids=lambda value: value.name if isinstance(value, tarfile.TarInfo) else None,
)
def test_refuses_unsafe_archives_and_keeps_nothing(script, tmp_path, evil, reason):
    source = write_msd(tmp_path / "source" / "Task00_Sample")
    archive = archive_of(source, tmp_path / "evil.tar", evil)
    output = tmp_path / "deep" / "out"
    result = run(script, archive, "--output", output)
    assert result.exit_code == 1
    assert reason in result.output and result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert not [path for path in output.glob("*")]
    assert not list(tmp_path.rglob("escaped.txt"))
    assert not Path("/tmp/unet3d-escaped.txt").exists()


def test_refuses_what_is_no_such_archive(script, tmp_path):
    (tmp_path / "page.tar").write_text("<html>sign in first</html>")
    result = run(script, tmp_path / "page.tar")
    assert result.exit_code == 1 and "no tar archive" in result.output
    (tmp_path / "source" / "other").mkdir(parents=True)
    (tmp_path / "source" / "other" / "a.txt").write_text("a")
    archive = archive_of(tmp_path / "source" / "other", tmp_path / "other.tar")
    result = run(script, archive)
    assert result.exit_code == 1 and "0 folders with a dataset.json" in result.output
    source = write_msd(tmp_path / "source" / "Task00_Sample")
    whole = archive_of(source, tmp_path / "Task00_Sample.tar")
    (tmp_path / "cut.tar").write_bytes(whole.read_bytes()[:20_000])
    result = run(script, tmp_path / "cut.tar", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "damaged" in result.output
    assert not (tmp_path / "out").exists()


def test_an_archive_that_ends_anywhere_leaves_nothing(script, tmp_path):
    whole = archive_of(write_msd(tmp_path / "Task00_Sample"), tmp_path / "whole.tar").read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        ends = [info.offset_data + -(-info.size // 512) * 512 for info in tar]
    for end in (*ends[:-1], ends[3] + 100, ends[-1]):  # between members, in a header, at the end
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        result = run(script, tmp_path / "cut.tar", "--output", tmp_path / "out")
        assert result.exit_code == 1 and "damaged" in result.output, end
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_damaged_compressed_archive_leaves_nothing(script, tmp_path, mode):
    source = write_msd(tmp_path / "Task00_Sample")
    whole = archive_of(source, tmp_path / "whole.tar", mode=mode).read_bytes()
    for place in (len(whole) // 2, len(whole) - 6):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        (tmp_path / "damaged.tar").write_bytes(damaged)
        result = run(script, tmp_path / "damaged.tar", "--output", tmp_path / "out")
        assert result.exit_code == 1 and "damaged.tar is damaged" in result.output
        assert not (tmp_path / "out").exists()


def test_sizes_are_compared_with_the_free_space_first(script, tmp_path, monkeypatch):
    source = write_msd(tmp_path / "Task00_Sample")
    archive = archive_of(source, tmp_path / "whole.tar")
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    result = run(script, archive, "--output", tmp_path / "deep" / "out")
    assert result.exit_code == 1
    assert f"{tmp_path} has 19.53 KiB free" in result.output and "--output" in result.output
    assert not (tmp_path / "deep").exists()


def test_a_size_that_no_disk_holds_is_refused(script, tmp_path):
    claim = member("Task00_Sample/huge.bin")
    claim.size = 2**60
    with gzip.open(tmp_path / "claim.tar", "wb") as file:
        file.write(claim.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))
    result = run(script, tmp_path / "claim.tar", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "unpacks to at least 1 EiB" in result.output


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_a_name_as_large_as_the_memory_is_not_read(script, tmp_path, kind):
    note = member("note", kind)
    note.size = 2**36
    (tmp_path / "note.tar").write_bytes(note.tobuf(tarfile.GNU_FORMAT) + bytes(100_000))
    result = run(script, tmp_path / "note.tar", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "a name or note of 68719476736 bytes" in result.output


def test_more_files_than_memory_can_list_are_refused(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "MAX_MEMBERS", 5)
    archive = archive_of(write_msd(tmp_path / "Task00_Sample"), tmp_path / "many.tar")
    result = run(script, archive, "--output", tmp_path / "out")
    assert result.exit_code == 1 and "more than 5 files" in result.output


def test_a_pipe_is_no_archive(script, tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    result = run(script, tmp_path / "pipe.tar")
    assert result.exit_code == 1 and "is a pipe" in result.output


def test_says_what_is_wrong_with_the_data(script, tmp_path):
    source = write_msd(tmp_path / "source" / "Task00_Sample")
    (source / "labelsTr" / "case_1.nii.gz").unlink()
    archive = archive_of(source, tmp_path / "Task00_Sample.tar")
    result = run(script, archive)
    assert result.exit_code == 1
    assert "error: case_1: " in result.output and "is missing" in result.output
    assert "unet3d train" not in result.output


def test_runs_as_a_script(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 0
