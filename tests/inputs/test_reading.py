import json
import os
from pathlib import Path

import pytest

from unet3d.inputs.reading import open_regular, read_bytes, read_json
from unet3d.records import recall, remember

CONTENT = {"name": "case ä", "spacing_mm": [1.0, 0.5, 2.0], "labels": {"a": 1, "b": None}}


def test_a_regular_file_is_read(tmp_path):
    path = tmp_path / "content.json"
    path.write_text("\ufeff" + json.dumps(CONTENT), encoding="utf-8")
    assert read_json(path) == CONTENT
    (tmp_path / "link").symlink_to(path)
    assert read_json(tmp_path / "link") == CONTENT
    assert len(read_bytes(path, path.stat().st_size)) == path.stat().st_size
    with pytest.raises(OSError, match="larger than the 10 bytes"):
        read_bytes(path, 10)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no file can have such a name"):
            open_regular(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 10**6, "it is nested too deeply"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is not a number of JSON"),
        (b'{"a": -1e999}', "-1e999 is too large for a floating-point number"),
        (b'{"a": 1, "b": 2, "a": 3}', "it names 'a' twice"),
        (b'{"\\u001b[2J": 1, "\\u001b[2J": 2}', r"it names '\\x1b\[2J' twice"),
        (b"9" * 10_000, "digits"),
        (b"", "Expecting value"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_plain_json_is_refused(tmp_path, text, message):
    path = tmp_path / "content.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_json(path)


@pytest.mark.parametrize("text", ["[" * 10**6, "9" * 10_000, "{}", "[]", "null", "NaN", "\x00"])
def test_a_record_that_means_nothing_is_not_used(tmp_path, text, caplog):
    path = tmp_path / "record.json"
    path.write_text(text)

    def read(content):
        return float(content["seconds"])

    assert recall(path, read) is None
    assert "is damaged and not used" in caplog.text
    assert recall(tmp_path / "none.json", read) is None
    remember(path, {"seconds": 2})
    assert recall(path, read) == 2.0
