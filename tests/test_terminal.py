"""Live lines: where they are shown, the lines above them, and that they disappear."""

import io
import logging
import re
import sys
from contextlib import contextmanager

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.images.samples import write_msd
from unet3d.cli.output import working
from unet3d.config import DataSettings
from unet3d.datasets.dataset import load_dataset
from unet3d.preparation.preprocess import plan_preprocessing, prepare_cases
from unet3d.reports.progress import ProgressLine
from unet3d.terminal import TerminalHandler, counting


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


@contextmanager
def on_terminal(monkeypatch, made=None, kind=TerminalHandler):
    """Replace stderr by a terminal, to which our command line's log goes.

    Not a fixture, because pytest sets its own stderr when the test begins.
    """
    made = made or Terminal()
    for name in ("TERM", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", made)
    handler = kind(made)
    logging.getLogger().addHandler(handler)
    try:
        yield made
    finally:
        logging.getLogger().removeHandler(handler)
    assert sys.stderr is made


def left_of(written):
    """Return the lines that a terminal shows in the end, without empty ones."""
    rows, row = [""], 0
    for piece in re.split(r"(\n|\x1b\[[0-9;?]*[A-Za-z])", written):
        if piece == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif piece.endswith("A") and piece.startswith("\x1b["):
            row -= int(piece[2:-1])
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif not piece.startswith("\x1b["):
            rows[row] += piece.replace("\r", "")
    return [line for line in rows if line]


@pytest.fixture(autouse=True)
def informed(caplog):
    caplog.set_level("INFO", "unet3d")


def test_a_bar_counts_and_leaves_what_was_logged_even_if_interrupted(monkeypatch):
    with on_terminal(monkeypatch) as terminal:
        with pytest.raises(KeyboardInterrupt), counting("preparing", 40) as show:
            show(3)
            logging.getLogger("unet3d").warning("a case is odd")
            raise KeyboardInterrupt
        logging.getLogger("unet3d").warning("the end")
    written = terminal.getvalue()
    assert re.search(r"preparing 40 cases .* 3/40", written)
    assert left_of(written) == ["a case is odd", "the end"]


def test_a_log_in_a_file_stays_there(monkeypatch):
    """Such as ``unet3d train 2> log``, whose live line is on stdout."""
    screen = Terminal()
    with on_terminal(monkeypatch, io.StringIO()) as file:
        with Progress(console=Console(file=screen)):
            logging.getLogger("unet3d").warning("a case is odd")
    assert file.getvalue() == "a case is odd\n"
    assert "odd" not in screen.getvalue()


def test_the_log_of_a_training_stands_above_its_line(monkeypatch):
    sizes = {"num_epochs": 2, "num_steps": 4, "validate_every": 1}
    with on_terminal(monkeypatch) as terminal:
        line = ProgressLine(Console(file=terminal), **sizes, quiet=False)
        with line.shown():
            line.predicting(0, 2, 0, 4)
            logging.getLogger("unet3d").warning("a case is odd")
            line.predicting(2, 2, 0, 1)
    first, *rest = left_of(terminal.getvalue())
    assert first == "a case is odd" and len(rest) == 1 and "predicting" in rest[0]


def test_there_is_no_bar_in_a_file_beside_another_live_line_or_for_another_program(monkeypatch):
    with on_terminal(monkeypatch) as terminal, working("planning"):
        with counting("preparing", 40) as show:
            show(3)
    assert "preparing" not in terminal.getvalue()
    with on_terminal(monkeypatch, io.StringIO()) as file, counting("preparing", 40) as show:
        show(3)
    with on_terminal(monkeypatch, kind=logging.StreamHandler) as terminal:
        with counting("preparing", 40) as show:
            show(3)
    assert file.getvalue() == terminal.getvalue() == ""


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_cases_are_prepared_under_a_bar_unless_all_is_quiet(tmp_path, monkeypatch, caplog, level):
    caplog.set_level(level, "unet3d")
    settings = DataSettings(cache=tmp_path / "cache")
    dataset = load_dataset(write_msd(tmp_path / "data"))
    with on_terminal(monkeypatch) as terminal:
        plan, _ = plan_preprocessing(dataset, settings)
        prepare_cases(dataset.cases, plan, settings.cache, 0)
    written = terminal.getvalue()
    assert ("preparing 3 cases" in written) == ("3/3" in written) == (level == "INFO")
    assert not any("3/3" in line for line in left_of(written))
