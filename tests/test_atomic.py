import os
from pathlib import Path

import pytest

from unet3d.atomic import PREFIX, remove_leftovers, write_atomically


def test_a_file_is_replaced_and_nothing_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    seen = []

    def write(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        file.flush()  # type: ignore[attr-defined]
        seen.append(path.read_text())
        assert [p.name.startswith(PREFIX) for p in tmp_path.iterdir()].count(True) == 1

    write_atomically(path, write)
    assert seen == ["old"]
    assert path.read_text() == "half"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failing_writer_changes_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def write(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise error

    with pytest.raises(error):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_file_may_be_read_by_whom_the_user_allows(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    finally:
        assert os.umask(before) == umask  # it was left as it was
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}abcfile.txt").write_text("half")
    (tmp_path / "file.txt").write_text("whole")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "file", lambda file: None)
