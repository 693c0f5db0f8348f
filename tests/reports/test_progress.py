import io
import logging
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.reports.records import Terminal
from unet3d.reports.progress import ProgressLine


def metrics(epoch, **more):
    return {"epoch": epoch, "loss": 0.51234, "seconds": 2.0, **more}


SCORED = {"dice": {"a": 0.5}, "mean_dice": 0.5}


def line_on(console=None, **changes):
    counts = {"num_epochs": 10, "num_steps": 4, "validate_every": 5}
    console = console or Console(file=io.StringIO())
    return ProgressLine(console, **{**counts, "quiet": False, **changes})


def test_a_terminal_gets_a_live_line(monkeypatch):
    terminal = Terminal(monkeypatch)
    line = line_on(terminal.console, validate_every=2)
    line._validation_seconds = 6.0
    with line.shown():
        assert line.wants_loss()
        line.step_done(0, 1, 1.5)
        assert not line.wants_loss()  # reading it would wait for the device
        terminal.seconds += 3.0
        assert line.wants_loss()
        line.step_done(0, 2, 1.25)
        last = terminal.shown()[-1]
        assert last.startswith("epoch 1/10 step 2/4 ")
        # 38 of 40 steps at 3 s, and 5 validations at 6 s
        assert last.endswith(" loss 1.250  Dice –  2 min 24 s left")
        line.epoch_done(metrics(1), "waited")
        assert terminal.shown() == []  # the live line shows it
        scores = {"dice": {"lesion [core]": 0.75, "rim": None}, "mean_dice": 0.75}
        line.epoch_done(metrics(2, **scores, validation_seconds=1.0), "waited for [data]")
        shown = terminal.shown()
        assert "    waited for [data]" in shown
        assert "epoch 2/10: loss 0.5123, Dice 0.750, 3.0 s, 20 s left" in shown
        assert "    lesion [core] 0.750, rim –" in shown
        line.step_done(2, 1, 1.125)
        assert " loss 1.125  Dice 0.750 " in terminal.shown()[-1]


def test_a_validation_has_its_share_of_the_line(monkeypatch):
    terminal = Terminal(monkeypatch)
    line = line_on(terminal.console, num_epochs=5, num_steps=10)
    with line.shown():
        line.step_done(4, 1, 1.0)
        terminal.seconds += 9.0
        line.step_done(4, 10, 1.0)
        last = terminal.shown()[-1]
        assert last.endswith(" loss 1.000  Dice –  over 0 s left")  # its time is not measured yet
        line.validating(4, 0, 2, 0, 4)
        assert "validating case 1/2 window 0/4" in terminal.shown()[-1]
        terminal.seconds += 10.0
        line.validating(4, 0, 2, 1, 4)
        last = terminal.shown()[-1]
        assert "epoch 5/5 " in last
        assert last.endswith("validating case 1/2 window 1/4  1 min 10 s left")
        line.epoch_done(metrics(5, **SCORED, validation_seconds=80.0))
        shown = terminal.shown()
        assert shown[0] == "epoch 5/5: loss 0.5123, Dice 0.500, 82.0 s, 0 s left"
        assert "    a 0.500" in shown


@pytest.mark.parametrize("quiet", [False, True])
def test_a_log_gets_a_line_for_each_epoch_whose_time_left_knows_the_validations(caplog, quiet):
    text = io.StringIO()
    line = line_on(Console(file=text), num_epochs=11, quiet=quiet)
    with caplog.at_level(logging.INFO, logger="unet3d"), line.shown():
        for epoch, seconds in ((1, None), (5, 60.0), (6, None), (10, 30.0), (11, 30.0)):
            scores = {**SCORED, "validation_seconds": seconds} if seconds else {}
            line.epoch_done(metrics(epoch, **scores), "waited for [data]" if epoch == 1 else None)
    assert not text.getvalue() and not line.wants_loss()
    expected = [
        "epoch 1/11: loss 0.5123, 2.0 s, over 20 s left",
        "    waited for [data]",
        # 6 epochs, and validations of epochs 10 and 11
        "epoch 5/11: loss 0.5123, Dice 0.500, 62.0 s, 2 min 12 s left",
        "    a 0.500",
        "epoch 6/11: loss 0.5123, 2.0 s, 2 min 10 s left",
        "epoch 10/11: loss 0.5123, Dice 0.500, 32.0 s, 32 s left",
        "    a 0.500",
        "epoch 11/11: loss 0.5123, Dice 0.500, 32.0 s, 0 s left",
        "    a 0.500",
    ]
    assert caplog.messages == ([] if quiet else expected)


def test_a_log_is_told_of_long_validations_and_predictions(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level(logging.INFO, logger="unet3d")
    line = line_on()
    with line.shown():
        for case in range(20):
            line.validating(4, case, 20, 0, 1)
            clock[0] += 10.0
    log = line_on()
    with log.shown():
        for second in range(0, 130, 10):
            clock[0] += 10.0
            log.predicting(second // 50, 3, second % 50, 50)
    assert caplog.messages == [
        "epoch 5: validating case 7/20, 2 min 20 s left",
        "epoch 5: validating case 13/20, 1 min 20 s left",
        "epoch 5: validating case 19/20, 20 s left",
        "predicting case 2/3, 1 min 30 s left",
        "predicting case 3/3, 30 s left",
    ]


HEAD = "epoch 10/100: loss 0.5123, Dice 0.850, 12.5 s, 18 min 45 s left"


@pytest.mark.parametrize(
    ("dice", "line"),
    [
        ({"a\x1b": 0.912, "b": None}, "    a? 0.912, b –"),
        (
            {f"vertebra {n}": n / 30 for n in range(24, 0, -1)},
            "    lowest: vertebra 1 0.033, vertebra 2 0.067, vertebra 3 0.100, vertebra 4 0.…",
        ),
        ({"脳" * 40: 0.5, "b": 0.75}, f"    lowest: {'脳' * 33}…"),
    ],
)
@pytest.mark.parametrize("width", [None, 80])
def test_the_lines_of_an_epoch_fit_80_columns(dice, line, width, caplog, monkeypatch):
    terminal = Terminal(monkeypatch, width or 80)
    shows = line_on(terminal.console if width else None, num_epochs=100, validate_every=1)
    values = {"seconds": 8.0, "validation_seconds": 4.5, "dice": dice, "mean_dice": 0.85}
    with caplog.at_level(logging.INFO, logger="unet3d"), shows.shown():
        terminal.shown()
        shows.epoch_done({**metrics(10), **values})
        shown = terminal.shown() if width else caplog.messages
    assert [one for one in shown if "starting" not in one] == [HEAD, line]
    assert cell_len(line) <= 80


def test_the_prediction_at_the_end_has_a_line_of_its_own(monkeypatch):
    terminal = Terminal(monkeypatch)
    line = line_on(terminal.console)
    with line.shown():
        terminal.shown()
        line.predicting(0, 4, 0, 4)
        assert "predicting the validation" in terminal.shown()[-1]
        line.predicting(1, 4, 1, 4)  # too soon after the last line
        assert not terminal.shown()
        terminal.seconds += 30
        line.predicting(1, 4, 2, 4)  # 1.5 of 4 cases took 30 s
        assert "case 2/4 window 2/4  50 s left" in terminal.shown()[-1]
