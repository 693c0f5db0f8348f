"""The live line of a scan; a log gets none."""

import io

from rich.console import Console

from tests.reports.records import Terminal
from unet3d.cli import terminal_progress
from unet3d.cli.terminal_progress import TerminalProgress


def test_a_scan_has_its_stages_and_windows(monkeypatch):
    terminal = Terminal(monkeypatch, width=100)
    monkeypatch.setattr(terminal_progress, "Console", lambda **_: terminal.console)
    progress = TerminalProgress(is_live=True)
    with progress.scan(3, 12, "scan [a].nii.gz"):
        progress.stage("reading")
        assert terminal.shown()[-1].startswith("scan [a].nii.gz (3/12): reading")
        progress.done(0, 40)
        assert terminal.shown()[-1].startswith("scan [a].nii.gz (3/12): predicting")
        terminal.seconds += 5.0
        progress.done(20, 40)
        assert terminal.shown()[-1].endswith("window 20/40  4/s  5 s left")
        progress.done(21, 40)  # too soon after the last line
        assert not terminal.shown()
        progress.done(0, 90)  # begins again: the first windows did not fit into memory
        assert terminal.shown()[-1].endswith("window 0/90")
        progress.done(90, 90)
        assert "finishing" in terminal.shown()[-1]
        progress.done(0, 8, "block")
        assert terminal.shown()[-1].endswith("block 0/8")
    with progress.scan(1, 1, "scan.nii"):
        progress.stage("reading")
        assert terminal.shown()[-1].startswith("scan.nii: reading")


def test_a_log_gets_no_live_line(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(terminal_progress, "Console", lambda **_: Console(file=log))
    progress = TerminalProgress(is_live=True)
    with progress.scan(1, 2, "scan.nii"):
        progress.done(2, 2)
    assert log.getvalue() == ""
