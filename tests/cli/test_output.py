import logging
import os

import pytest

from unet3d.cli.output import OneLineFormatter, check_result, show_error, writing_result
from unet3d.errors import ConfigError, ResultExistsError, VolumeError

HOSTILE = "scan\n\x1b[31m\udcff.nii"


def test_messages_and_errors_are_one_line_without_control_characters(capsys, caplog):
    caplog.set_level(logging.INFO, "unet3d")
    long = "x" * 5000
    for text, shown in ((HOSTILE, r"scan\n\x1b[31m\udcff.nii"), (long, long)):
        record = logging.LogRecord("unet3d", logging.INFO, "", 1, "%s", (text,), None)
        assert OneLineFormatter("%(message)s").format(record) == shown
    show_error(VolumeError(f"{HOSTILE} is odd"))
    assert capsys.readouterr().err == "Error: scan \\x1b[31m\\udcff.nii is odd\n"


def test_a_result_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("other.json")
    (tmp_path / "input.json").touch()
    (tmp_path / "alias.json").symlink_to("input.json")
    check_result(None, overwrite=False)
    check_result(tmp_path / "new.json", overwrite=False)
    for name, reason in (
        ("nowhere/scores.json", "nowhere/scores.json: No such file or directory"),
        ("folder", "folder: Is a directory"),
        *((name, f"{name}: it is not a regular file") for name in ("pipe", "link")),
        *((name, "cannot hold the results") for name in ("input.json", "alias.json", "a.nii")),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_result(tmp_path / name, tmp_path / "input.json", overwrite=True)
    with pytest.raises(ResultExistsError, match="input.json exists; add --overwrite"):
        check_result(tmp_path / "input.json", overwrite=False)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()


def test_a_result_replaces_only_what_it_may_and_keeps_the_permissions(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    path = folder / "scores.json"
    with pytest.raises(ResultExistsError, match="add --overwrite"):
        with writing_result(path, overwrite=False) as unfinished:
            unfinished.write_text("ours")
            path.write_text("of somebody else")  # written while ours was unfinished
    assert path.read_text() == "of somebody else"
    path.chmod(0o640)
    with writing_result(path, overwrite=True) as unfinished:
        unfinished.write_text("ours")
    assert path.read_text() == "ours" and path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ConfigError, match="cannot write .*: encoder error.*; name another"):
        with writing_result(path, overwrite=True):
            raise OSError("encoder error -2")
    assert [file.name for file in folder.iterdir()] == ["scores.json"]
