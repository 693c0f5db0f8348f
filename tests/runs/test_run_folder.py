import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from unet3d.atomic import PREFIX, unfinished_folder
from unet3d.errors import CheckpointError, ConfigError
from unet3d.runs.finding import checkpoint_in
from unet3d.runs.run_folder import CASES, WORST, RunFolder, make_run

LEFTOVER = f"{PREFIX}{'0123' * 8}-kpoint-latest.pt"
"""The name of a file that a killed process has left."""


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.create()
    return folder


def test_a_run_is_not_begun_over_another(run):
    run.write_data({})
    run.best.write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"holds checkpoint-best.pt of a run already; .*--output"):
        run.create()
    run.latest.write_bytes(b"checkpoint")
    with pytest.raises(
        ConfigError, match=r"first holds checkpoint-latest.pt .*; .*--resume.*--output"
    ):
        run.create()
    assert (run.best.read_bytes(), run.latest.read_bytes()) == (b"precious", b"checkpoint")


def test_what_a_run_left_that_was_killed_before_its_first_checkpoint_is_cleared(run):
    (run.path / LEFTOVER).write_bytes(b"half")
    run.create()  # leftovers of our own do not count
    assert not list(run.path.iterdir())
    run.write_data({})
    run.append_metrics({"epoch": 1})
    (run.path / LEFTOVER).write_bytes(b"half")
    run.create()
    run.append_metrics({"epoch": 1})
    assert run.read_metrics() == [{"epoch": 1}]
    assert {path.name for path in run.path.iterdir()} == {"data.json", "metrics.jsonl"}


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_results_of_a_run_whose_checkpoints_are_gone_are_left_alone(run, name):
    run.write_data({})
    if name == "summary.json":
        run.write_json(run.summary, {"epochs": 1})
    else:
        for epoch in (1, 2):
            run.append_metrics({"epoch": epoch})
    before = (run.path / name).read_bytes()
    with pytest.raises(ConfigError, match="first holds the results of a run whose checkpoints"):
        run.create()
    assert (run.path / name).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("notes.txt", None),
        (".hidden", b"{}"),
        ("config.yaml", b"[]"),
        ("summary.json", b"\0\0\0"),
        ("imagesTr/a", b'{"dataset": "mine"}'),
    ],
)
def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path, name, own):
    run = RunFolder(tmp_path / "mine")
    (run.path / name).parent.mkdir(parents=True)
    (run.path / name).write_text("precious")
    (run.path / LEFTOVER).write_bytes(b"half")
    (run.path / f"{PREFIX}draft").write_bytes(b"half")
    if own is not None:
        run.data.write_bytes(own)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with (
        run.locked(),
        pytest.raises(
            ConfigError, match="mine is not empty and is not a run: .*; move it away, or choose"
        ),
    ):
        run.create()
    run.discard_if_empty()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_two_runs_of_one_name_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make_run("a-fold0").path, range(8)))
    assert sorted(path.name for path in made) == sorted(
        ["a-fold0", *(f"a-fold0-{number}" for number in range(2, 9))]
    )
    (tmp_path / "runs" / "file").write_text("in the way")
    assert make_run("file").path.name == "file-2"
    with pytest.raises(ConfigError, match="cannot write to runs/xxx.*: File name too long"):
        make_run("x" * 300)


def test_the_checkpoint_of_a_folder_is_its_final_one(run):
    several = run.path.parent / "several"
    for fold in (1, 2):
        (several / f"fold{fold}").mkdir(parents=True)
        (several / f"fold{fold}" / "checkpoint-latest.pt").touch()
    with pytest.raises(CheckpointError, match="several checkpoints: .*several/fold1/.*name one"):
        checkpoint_in(several)
    with pytest.raises(CheckpointError, match="first holds no checkpoint: neither .*best"):
        checkpoint_in(run.path)
    run.best.touch()
    assert checkpoint_in(run.path) == run.best
    run.latest.touch()
    assert checkpoint_in(run.path) == run.latest
    assert checkpoint_in(run.latest) == run.latest
    assert checkpoint_in(run.path / "absent.pt") == run.path / "absent.pt"


def test_reopening_clears_leftovers(run):
    with pytest.raises(CheckpointError, match=r"has no checkpoint-latest.pt to resume from"):
        run.check_resumable()
    run.latest.write_bytes(b"checkpoint")
    run.append_metrics({"epoch": 1})
    run.write_json(run.summary, {})
    (run.path / LEFTOVER).write_bytes(b"half")
    run.check_resumable()
    assert len(list(run.path.iterdir())) == 4
    run.reopen(1)
    assert {path.name for path in run.path.iterdir()} == {"checkpoint-latest.pt", "metrics.jsonl"}


def test_a_damaged_summary_is_none(run):
    assert not run.has_summary()
    for content in (b"", b"\0\0", b"[]", b'{"a": NaN}', b"\xff"):
        run.summary.write_bytes(content)
        assert not run.has_summary(), content
    run.write_json(run.summary, {"epochs": 3})
    assert run.has_summary()


def test_a_folder_is_one_trainings_at_a_time(run):
    with run.locked():
        run.append_metrics({"epoch": 1})
        with (
            pytest.raises(ConfigError, match=r"first is in use by another.*--output"),
            RunFolder(run.path).locked(),
        ):
            pass
        assert [path.name for path in run.path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(MemoryError), run.locked():
        raise MemoryError
    with RunFolder(run.path).locked():
        pass


def test_a_folder_is_made_before_it_is_locked(tmp_path):
    run = RunFolder(tmp_path / "new" / "run")
    with run.locked():
        assert run.path.is_dir()
    (tmp_path / "file").write_text("in the way")
    for name, reason in (("file", "Not a directory"), ("file/run", "Not a directory")):
        with pytest.raises(ConfigError, match=f"cannot write to .*{name}: {reason}"):
            RunFolder(tmp_path / name).create()
        with (
            pytest.raises(ConfigError, match="cannot write to "),
            RunFolder(tmp_path / name).locked(),
        ):
            pass


def test_a_file_system_without_locks_is_used_with_a_warning(run, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with run.locked():
        assert "do not start a second run in it" in caplog.text


def test_only_an_empty_folder_that_was_made_is_discarded(tmp_path):
    run = RunFolder(tmp_path / "run")
    with run.locked():
        run.append_metrics({"epoch": 1})
    run.discard_if_empty()
    assert run.metrics.exists()
    run.metrics.unlink()
    run.discard_if_empty()
    assert not run.path.exists()
    run.discard_if_empty()
    run.path.mkdir()
    (tmp_path / "link").symlink_to("run")
    for other in (RunFolder(run.path), RunFolder(tmp_path / "link")):
        with other.locked():
            other.create()
        other.discard_if_empty()
        assert run.path.is_dir()  # it existed before


def lines(*numbers):
    return [{"epoch": number, "loss": 1 / 3 / number, "dice": {"a": None}} for number in numbers]


@pytest.mark.parametrize(("num_epochs", "kept"), [(0, 0), (2, 2), (9, 3)])
def test_only_the_epochs_of_the_checkpoint_are_kept(run, num_epochs, kept, caplog):
    assert run.read_metrics() == []
    for line in lines(1, 2, 3):
        run.append_metrics(line)
    with run.metrics.open("ab") as file:
        file.write(b'{"epoch": 4}')  # an unfinished line is no damage
    assert run.read_metrics() == lines(1, 2, 3) and not caplog.records
    run.reopen(num_epochs)
    expected = lines(*range(1, kept + 1))
    assert run.read_metrics() == expected
    for line in lines(kept + 1):  # further lines are not joined to it
        run.append_metrics(line)
    assert run.read_metrics() == expected + lines(kept + 1)


DAMAGED = (
    b"\0" * 100,
    b'{"epoch": 2, "lo',
    b'{"epoch": 2, "a": "\xff\xfe"}',
    b"[1, 2]",
    b'{"loss": 1.0}',
    *(b'{"epoch": "2"}', b'{"epoch": true}', b'{"epoch": 0}', b'{"epoch": 1.5}'),
    b"[" * 100_000,
)


def test_damaged_lines_are_left_out_and_counted(run, caplog):
    for damage in DAMAGED:
        run.append_metrics(lines(1)[0])
        with run.metrics.open("ab") as file:
            file.write(damage + b"\n")
    with run.metrics.open("ab") as file:
        file.write(b"\0" * 100)  # like an unfinished line
    assert run.read_metrics() == lines(1) * len(DAMAGED)
    (told,) = caplog.messages
    assert f"metrics.jsonl: left out {len(DAMAGED)} damaged line" in told
    run.reopen(9)
    assert len(caplog.records) == 2
    assert run.read_metrics() == lines(1) * len(DAMAGED)
    assert len(caplog.records) == 2  # the damaged lines are removed


def test_a_full_disk_is_explained_and_changes_nothing(run, monkeypatch):
    for line in lines(1, 2, 3):
        run.append_metrics(line)
    before = run.metrics.read_bytes()

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    for write in (lambda: run.reopen(1), lambda: run.write_json(run.summary, {})):
        with pytest.raises(
            ConfigError, match=r"cannot write to .*runs/first/.*: No space left on device; .*--out"
        ):
            write()
    assert run.metrics.read_bytes() == before
    assert list(run.path.iterdir()) == [run.metrics]


def test_a_validation_is_replaced_as_a_whole(run):
    for number in (1, 2):
        with unfinished_folder(run.validation) as unfinished:
            (unfinished / f"{number}.nii.gz").touch()
            (unfinished / WORST).touch()
            run.publish_validation(unfinished, {"number": number})
        assert run.has_validation() and (run.validation / WORST).is_file()
        assert json.loads((run.validation / CASES).read_text()) == {"number": number}
        assert sorted(run.validation.glob("*.nii.gz")) == [run.validation / f"{number}.nii.gz"]
    run.reopen(1)
    assert not run.has_validation() and not run.validation.exists()
