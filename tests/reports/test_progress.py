import io
import logging
import time

import pytest
from rich.console import Console

from unet3d.reports.progress import ProgressLine, duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (41.4, "41 s"),
        (59.7, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def metrics(epoch: int, **scores: object) -> dict[str, object]:
    return {"epoch": epoch, "loss": 0.51234, "seconds": 2.0, **scores}


def test_a_terminal_gets_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    text = io.StringIO()
    line = ProgressLine(Console(file=text, force_terminal=True, width=160), 10, 4, quiet=False)
    with line.shown():
        assert line.wants_loss()
        line.step_done(0, 1, 1.5)
        assert not line.wants_loss()  # reading it would wait for the device
        clock[0] += 3.0
        assert line.wants_loss()
        line.step_done(0, 2, 1.25)
        line.epoch_done(metrics(1), 18.0)
        scores = {"dice": {"lesion [core]": 0.75, "rim": None}, "mean_dice": 0.75}
        line.epoch_done(metrics(2, **scores), 16.0)
        line.step_done(2, 1, 1.125)
    shown = " ".join(text.getvalue().split())
    assert "epoch 1/10 step 2/4" in shown
    assert "loss 1.250 Dice – 1 min 54 s left" in shown  # 38 of 40 steps at 3 s
    assert "epoch 1/10: " not in shown  # the live line tells that
    assert "epoch 2/10: loss 0.5123, Dice 0.750 (lesion [core] 0.750, rim –), 2.0 s" in shown
    assert "loss 1.125 Dice 0.750" in shown


def test_a_log_gets_a_line_for_each_epoch(caplog: pytest.LogCaptureFixture) -> None:
    text = io.StringIO()
    line = ProgressLine(Console(file=text), 10, 4, quiet=False)
    with caplog.at_level(logging.INFO, logger="unet3d"), line.shown():
        assert not line.wants_loss()
        line.epoch_done(metrics(1), 125.0)
        line.epoch_done(metrics(2, dice={"a": 0.5}, mean_dice=0.5), 16.0)
    assert [record.message for record in caplog.records] == [
        "epoch 1/10: loss 0.5123, 2.0 s, 2 min 05 s left",
        "epoch 2/10: loss 0.5123, Dice 0.500 (a 0.500), 2.0 s, 16 s left",
    ]
    assert text.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool, caplog: pytest.LogCaptureFixture) -> None:
    text = io.StringIO()
    line = ProgressLine(Console(file=text, force_terminal=terminal), 10, 4, quiet=True)
    with caplog.at_level(logging.INFO, logger="unet3d"), line.shown():
        assert not line.wants_loss()
        line.epoch_done(metrics(1, dice={"a": 0.5}, mean_dice=0.5), 125.0)
    assert text.getvalue() == ""
    assert not caplog.records
