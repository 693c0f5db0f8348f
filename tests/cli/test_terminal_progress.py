"""The live line of a scan, and that a log gets none."""

import io
import re
import time

import pytest
from rich.console import Console

from unet3d.cli import terminal_progress
from unet3d.cli.terminal_progress import TerminalProgress


@pytest.fixture
def clock(monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def made(monkeypatch, **terminal):
    """Return the progress of a prediction, and what shows the last line since it was asked."""
    text = io.StringIO()
    console = Console(file=text, width=100, **terminal)
    monkeypatch.setattr(terminal_progress, "Console", lambda **_: console)

    def last():
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
        text.seek(0)
        text.truncate()
        return "".join([line.rstrip() for line in re.split("[\r\n]", shown) if line.strip()][-1:])

    return TerminalProgress(is_live=True), last


def test_a_scan_has_its_stages_and_windows(monkeypatch, clock):
    progress, last = made(monkeypatch, force_terminal=True)
    with progress.scan(3, 12, "scan [a].nii.gz"):
        progress.stage("reading")
        assert last().startswith("scan [a].nii.gz (3/12): reading")
        progress.windows_done(0, 40)
        assert last().startswith("scan [a].nii.gz (3/12): predicting")
        clock[0] += 5.0
        progress.windows_done(20, 40)
        assert last().endswith("window 20/40  4/s  5 s left")
        progress.windows_done(21, 40)  # too soon
        assert last() == ""
        progress.windows_done(0, 90)  # the first windows did not fit
        assert last().endswith("window 0/90")
        progress.windows_done(90, 90)
        assert "finishing" in last()
    with progress.scan(1, 1, "scan.nii"):
        progress.stage("reading")
        assert last().startswith("scan.nii: reading")


def test_a_log_gets_no_live_line(monkeypatch):
    progress, last = made(monkeypatch)
    with progress.scan(1, 2, "scan.nii"):
        progress.windows_done(2, 2)
    assert last() == ""
