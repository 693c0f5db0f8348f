import errno
import fcntl
import itertools
import os
import shutil
import signal
import stat
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from tests import warm
from unet3d.atomic import (
    HOST,
    PREFIX,
    append,
    make_folder,
    new_folder,
    remove_leftovers,
    replacing,
    temporary_folder,
    write_atomically,
)


def write_one(path):
    write_atomically(path, lambda file: file.write(b"new"))


def write_many(path):
    with new_folder(path) as unfinished:
        (unfinished / "inner").mkdir()
        (unfinished / "inner" / "file").write_text("new")


def create(path, text="new"):
    with replacing(path, may_exist=False) as unfinished:
        unfinished.write_text(text)


def fail(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def calls(monkeypatch):
    """A list of flushes and renames in order: the operation and the name; folders end in a /."""
    seen = []
    fsync = os.fsync

    def flushed(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(("fsync", f"{path.name}/" if path.is_dir() else path.name))
        fsync(descriptor)

    def noted(rename):
        return lambda source, target: (seen.append(("rename", target.name)), rename(source, target))

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", noted(os.replace))
    monkeypatch.setattr(os, "rename", noted(os.rename))
    return seen


def test_the_file_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, calls):
    write_one(tmp_path / "file.nii.gz")
    (_, temporary), *rest = calls
    assert temporary.startswith(PREFIX) and temporary.endswith(".nii.gz")
    assert rest == [("rename", "file.nii.gz"), ("fsync", f"{tmp_path.name}/")]


def test_a_folder_is_flushed_with_all_that_is_in_it_before_its_rename(tmp_path, calls):
    write_many(tmp_path / "folder")
    *content, renamed, last = calls
    assert last == ("fsync", f"{tmp_path.name}/")
    assert renamed == ("rename", "folder")
    assert ("fsync", "file") in content and ("fsync", "inner/") in content
    assert any(name.startswith(PREFIX) for _, name in content)
    assert {operation for operation, _ in content} == {"fsync"}


def test_what_is_made_or_appended_is_flushed_and_a_new_name_into_its_folder(tmp_path, calls):
    make_folder(tmp_path / "a" / "b")
    assert {name for _, name in calls} == {"a/", f"{tmp_path.name}/"}
    calls.clear()
    make_folder(tmp_path / "a" / "b")
    assert not calls
    for content in (b"1\n", b"2\n"):
        append(tmp_path / "lines", content)
    assert calls == [("fsync", "lines"), ("fsync", f"{tmp_path.name}/"), ("fsync", "lines")]
    assert (tmp_path / "lines").read_bytes() == b"1\n2\n"


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
        assert unfinished.name.startswith(PREFIX) and unfinished.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_writer_changes_nothing(tmp_path, error):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as unfinished:
        unfinished.write_text("half")
        raise error
    with pytest.raises(error), new_folder(tmp_path / "folder") as unfinished:
        (unfinished / "file").write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace", "rename"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, broken, monkeypatch):
    path = tmp_path / "file.txt"
    path.write_text("old")
    for write, goal in ((write_one, path), (write_many, tmp_path / "folder")):
        if broken != ("rename" if write is write_one else "replace"):
            with monkeypatch.context() as patched:
                patched.setattr(os, broken, fail)
                with pytest.raises(OSError, match="Input/output error"):
                    write(goal)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_only_a_file_system_that_cannot_flush_folders_is_excused(tmp_path, number, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    is_told = pytest.raises(OSError, match="Input/output error")
    with is_told if number == errno.EIO else nullcontext():
        write_one(tmp_path / "file")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


@pytest.fixture(params=["links", "no links"])
def links(request, monkeypatch):
    if request.param == "no links":
        monkeypatch.setattr(os, "link", fail)


MAKERS = {
    "file": Path.touch,
    "folder": Path.mkdir,
    "FIFO": os.mkfifo,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("kind", MAKERS)
def test_what_has_the_name_is_never_replaced(tmp_path, kind):
    path = tmp_path / "a.nii.gz"
    with pytest.raises(FileExistsError), replacing(path, may_exist=False) as unfinished:
        assert unfinished.name.endswith(".nii.gz")
        unfinished.write_text("new")
        MAKERS[kind](path)  # It appears while we write, so a check beforehand would miss it.
        before = path.lstat()
    with pytest.raises(FileExistsError):
        create(path)
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("links")
def test_of_many_writers_of_a_new_file_one_wins(tmp_path):
    path, start, outcomes = tmp_path / "file", threading.Barrier(8), []

    def write(index):
        with suppress(FileExistsError):
            with replacing(path, may_exist=False) as unfinished:
                unfinished.write_text(str(index))
                start.wait()
            outcomes.append(str(index))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_text()] == outcomes
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_of_that_name_is_kept(tmp_path):
    (tmp_path / "folder").mkdir()
    write_many(tmp_path / "folder")  # an empty folder may be replaced
    with pytest.raises(OSError, match="not empty"), new_folder(tmp_path / "folder"):
        pass
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_is_replaced_with_all_that_is_in_it(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    with new_folder(path, replace=True) as unfinished:
        (unfinished / "new").touch()
        assert [file.name for file in path.iterdir()] == ["old"]
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    path = tmp_path / "folder"
    path.write_text("precious")
    with pytest.raises(OSError, match="Not a directory"), new_folder(path, replace=True):
        pass
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "writer", 1, 2])
def test_a_folder_that_cannot_be_replaced_is_kept(tmp_path, broken, monkeypatch):
    """A number means: the rename with this number fails."""
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    numbers, rename = itertools.count(1), os.rename
    monkeypatch.setattr(
        os, "rename", lambda *names: fail() if next(numbers) == broken else rename(*names)
    )
    if broken == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(OSError, match="Input/output error"),
        new_folder(path, replace=True) as unfinished,
    ):
        (unfinished / "new").touch()
        if broken == "writer":
            fail()
    assert [file.name for file in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_the_file_may_be_read_by_whom_the_user_allows(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_one(tmp_path / "file")
    finally:
        assert os.umask(before) == umask  # the umask is restored
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o644, 0o400])
def test_a_file_that_replaces_another_has_its_permissions(tmp_path, mode, monkeypatch):
    path = tmp_path / "shared"
    path.write_text("an old one")
    path.chmod(mode)
    given = []
    monkeypatch.setattr(os, "chown", lambda *given_: given.append(given_))
    write_atomically(path, lambda file: file.write(b"a new one"))
    assert path.read_text() == "a new one" and path.stat().st_mode & 0o777 == mode
    assert not given, "the owner is the same"


def test_a_file_that_replaces_another_has_its_owner_if_that_is_allowed(tmp_path, monkeypatch):
    path = tmp_path / "shared"
    path.write_text("an old one")
    path.chmod(0o640)
    asked = []

    def refuse(name, uid, gid):
        asked.append((uid, gid))
        raise PermissionError

    real = Path.lstat
    of_another = [*real(path)]
    of_another[4:6] = 12345, 23456
    monkeypatch.setattr(
        Path, "lstat", lambda self: os.stat_result(of_another) if self == path else real(self)
    )
    monkeypatch.setattr(os, "chown", refuse)
    write_atomically(path, lambda file: file.write(b"a new one"))
    assert asked == [(12345, 23456)]
    assert path.read_text() == "a new one" and path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("letter", ["a", "ä", "脳"])
def test_the_longest_names_can_be_written(tmp_path, letter):
    name = letter * ((255 - len(".nii.gz")) // len(letter.encode())) + ".nii.gz"
    write_one(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_leftovers_have_names_of_ours_and_nobody_who_writes_to_them(tmp_path):
    left, folder = (tmp_path / f"{PREFIX}{HOST}{letter * 24}-name" for letter in "ab")
    left.write_text("half")
    folder.mkdir()
    (folder / "file").write_text("half")
    names = {f"{PREFIX}draft", f"{PREFIX}{'a' * 31}-file", f"{PREFIX}{'g' * 32}-file", PREFIX}
    for name in names:
        (tmp_path / name).write_text("precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    link = tmp_path / f"{PREFIX}{HOST}{'c' * 24}-link"
    link.symlink_to("elsewhere")
    with replacing(tmp_path / "one") as one, new_folder(tmp_path / "other") as other:
        for path in (one, other / "file"):
            path.write_text("new")
        remove_leftovers(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            *names, "elsewhere", link.name, one.name, other.name
        }  # fmt: skip
    for path in ("elsewhere/file", "one", "other/file"):
        assert (tmp_path / path).read_text() in ("precious", "new")


def test_what_another_machine_has_made_stays_for_a_day(tmp_path):
    """Its lock may be invisible here."""
    other, old = (tmp_path / f"{PREFIX}{'0' * 8}{letter * 24}-name" for letter in "ab")
    for path in (other, old):
        path.touch()
    day_ago = time.time() - 24 * 3600
    os.utime(old, (day_ago, day_ago))
    write_one(tmp_path / "file")
    assert {path.name for path in tmp_path.iterdir()} == {"file", other.name}
    remove_leftovers(tmp_path, elsewhere_s=0)
    assert not other.exists()


def left_by_a_killed_process(work, *arguments):
    """Run work that must kill its process."""
    ended = warm.run_call(work, *arguments)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def write_until_killed(path):
    with suppress(FileNotFoundError), replacing(path) as unfinished:
        unfinished.write_text("half")
        with new_folder(path.parent / "folder") as other, temporary_folder("test") as third:
            for folder in (other, third):
                (folder / "file").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_left_goes_when_the_next_one_writes_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    left_by_a_killed_process(write_until_killed, tmp_path / "file")
    (left,) = (tmp_path / "temporary").glob(f"{PREFIX}*")
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    write_one(tmp_path / "another")
    assert {path.name for path in tmp_path.iterdir()} == {"another", "temporary"}
    with temporary_folder("test") as folder:
        assert not left.exists() and folder.exists()
    assert not list((tmp_path / "temporary").glob(f"{PREFIX}*"))


def replace_until_killed(path, number):
    """Replace a folder, with a kill in place of the rename with this number."""
    numbers, rename = itertools.count(1), os.rename

    def rename_or_die(source, target):
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = rename_or_die
    shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    with new_folder(path, replace=True) as unfinished:
        (unfinished / "new").touch()


@pytest.mark.parametrize(("number", "kept"), [(1, "old"), (2, "old"), (3, "new")])
def test_a_folder_is_not_lost_when_its_replacement_is_killed(tmp_path, number, kept):
    """There is no third rename: the old folder is already being deleted."""
    path = tmp_path / ("n" * 250)
    path.mkdir()
    (path / "old").touch()
    left_by_a_killed_process(replace_until_killed, path, number)
    assert path.exists() == (number != 2)
    remove_leftovers(tmp_path)
    assert [file.name for file in path.iterdir()] == [kept]
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_takes_another_name_if_its_first_was_taken_for_a_leftover(tmp_path, monkeypatch):
    lock, locked = fcntl.flock, []

    def clean_before(descriptor, how):
        if not locked:
            locked.append(descriptor)
            remove_leftovers(tmp_path)
        lock(descriptor, how)

    with new_folder(tmp_path / "first"):
        pass
    monkeypatch.setattr(fcntl, "flock", clean_before)
    write_many(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "folder"]


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_many(tmp_path / "folder")
    left = tmp_path / f"{PREFIX}{HOST}{'a' * 24}-name"
    left.touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "folder"]


def test_a_folder_that_is_not_there_is_told_and_a_pipe_is_not_replaced(tmp_path):
    """/dev/null is not replaced either, which only root could do."""
    with pytest.raises(FileNotFoundError):
        write_one(tmp_path / "missing" / "file")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_one(pipe)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
