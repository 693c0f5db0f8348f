import io

from rich.console import Console

from unet3d.reports.scan_progress import ScanProgress


def shown(progress, text):
    """Return what the terminal shows now."""
    progress._progress.refresh()  # a private one: else it is drawn by a thread, at some moment
    last = text.getvalue().rpartition("\x1b[2K")[2]
    return " ".join(last.replace("━", "").split())


def make(num_scans):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=120)
    return ScanProgress(console, num_scans), text


def test_a_terminal_shows_scan_stage_and_windows():
    progress, text = make(12)
    with progress.shown(3, "scan [a].nii.gz"):
        progress.stage("reading")
        assert shown(progress, text).startswith("scan [a].nii.gz (3/12): reading")
        progress.windows_done(0, 40)
        assert "scan [a].nii.gz (3/12): predicting window 0/40" in shown(progress, text)
        progress.windows_done(10, 40)
        progress.windows_done(20, 40)
        assert shown(progress, text).split("window 20/40 ")[1].split()[0].endswith("/s")
        progress.windows_done(0, 90)  # the first ones did not fit
        assert "predicting window 0/90" in shown(progress, text)
        progress.windows_done(90, 90)
        assert "finishing window 90/90" in shown(progress, text)
    before = text.getvalue()
    assert before.endswith("\x1b[2K")  # the line is gone
    with progress.shown(4, "other.nii"):
        progress.stage("reading")
        assert shown(progress, text).startswith("other.nii (4/12): reading")
        assert "[a]" not in text.getvalue()[len(before) :]


def test_a_single_scan_has_no_number_and_a_log_gets_nothing():
    progress, text = make(1)
    with progress.shown(1, "scan.nii"):
        progress.stage("writing")
        assert shown(progress, text).startswith("scan.nii: writing")
    log = io.StringIO()
    progress = ScanProgress(Console(file=log), 2)
    with progress.shown(1, "scan.nii"):
        progress.windows_done(2, 2)
    assert log.getvalue() == ""
